"""What goes with a critic, which makes the advantages itself. A problem is one sentence."""

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.facts import ADVANTAGES, fact, is_marked, reads
from rl.config.limits import outside_own, value_of

Config = Mapping[str, Any]


def critic(config: Config) -> Iterator[str]:
    """Somebody reads what it estimates, and nobody else estimates the same."""
    kind, loss = config["critic"]["_target_"], config["loss"]["_target_"]
    if not fact(kind, "estimates", True):
        return
    if not reads(loss, ADVANTAGES):
        yield (f"{kind} estimates advantages, and {loss} reads none: use critic=none, or loss=ppo")
    for name in ("estimator", "loss"):
        node = value_of(config, f"critic.{name}") or {}
        if node:
            yield from outside_own(f"critic.{name}", node)
    advantage = config["advantage"]["_target_"]
    if not is_marked(advantage, "NEUTRAL"):
        yield (
            f"{kind} makes the advantages, so those of {advantage} would be thrown away: use "
            "advantage=none, or critic=none"
        )
    if config["reward"]["normalise_each"]:
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
