"""What goes with a critic, which computes the advantages itself. A problem is one sentence."""

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.facts import fact
from rl.config.learned import Learned
from rl.config.limits import value_of

Config = Mapping[str, Any]


def critic(config: Config, learned: Learned) -> Iterator[str]:
    """Require a loss that reads the critic's advantages, and no other source of them."""
    kind, loss = config["critic"]["_target_"], config["loss"]["_target_"]
    if not fact(kind, "estimates", True):
        return
    if not learned.reads_advantages:
        yield f"{kind} estimates advantages, and {loss} reads none: use critic=none, or loss=ppo"
    if not learned.advantage_is_reward:
        yield (
            f"{kind} makes the advantages, so those of {config['advantage']['_target_']} would be "
            "thrown away: use advantage=none, or critic=none"
        )
    if value_of(config, "reward.normalise_each"):
        yield (
            f"reward.normalise_each=true makes an advantage of each reward, and {kind} one of "
            "their sum: set it to false, or use critic=none"
        )
    head_start, steps = value_of(config, "critic.head_start"), config["max_steps"]
    if head_start is not None and head_start >= steps:
        yield (
            f"critic.head_start={head_start} leaves the policy none of max_steps={steps}: "
            "lower the one, or raise the other"
        )
