"""Rules about batches that also contain replayed groups or demonstrations (conf/buffer/replay)."""

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.learned import Learned
from rl.config.limits import value_of


def batch_sources(config: Mapping[str, Any], learned: Learned) -> Iterator[str]:
    """Refuse replayed groups that are too old, and text for which a component needs logprobs."""
    loss, correction = config["loss"]["_target_"], config["correction"]["_target_"]
    replayed = value_of(config, "buffer.replay_share")
    oldest, newest = value_of(config, "buffer.max_staleness"), config["sampler"]["max_staleness"]
    if replayed and oldest is not None and oldest <= newest:
        yield (
            f"buffer.max_staleness={oldest} removes groups before they can be replayed, because "
            f"sampler.max_staleness={newest} versions may pass until their first batch: use "
            f"buffer.max_staleness={newest + 8}"
        )
    if replayed and not learned.takes_any_text and not learned.uses_ratio:
        yield (
            f"{loss} assumes that the current policy sampled the batch, but buffer.replay_share="
            f"{replayed} adds rollouts of earlier policies: use loss=cispo, or buffer=fifo"
        )
    shown = value_of(config, "buffer.demonstration_share")
    if shown and not learned.takes_any_text and not learned.reads({"source"}):
        yield (
            f"{loss} needs rollouts that the policy sampled, but buffer.demonstration_share="
            f"{shown} adds text that no policy sampled: use loss=sft_and_rl, or buffer=fifo"
        )
    if shown and not learned.correction_is_neutral:
        yield (
            f"{correction} needs the logprobs of the policy that sampled the text, which the "
            f"demonstrations of buffer.demonstration_share={shown} lack: use correction=none"
        )
