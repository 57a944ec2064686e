"""What makes a run fit the memory of its machines: tried before it is named, mildest first.

    the same experiment     shorter micro-batches, activations computed twice, fewer replicas, ranks
    another experiment      an adapter in the place of all weights

A remedy alone may not be enough, so what is named is enough together, and none of it can be spared.
Offload is none of them: on a CPU it moves nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl.config.facts import fact
from rl.config.limits import value_of
from rl.model.shape import Shape

Config = Mapping[str, Any]
Change = tuple[str, Any]  # a dotted key, or a group: its new value

_LEAST_CHUNK = 64  # tokens of logits at a time: fewer save nothing worth having
_LORA = {  # as conf/adapter/lora.yaml has it, as far as memory asks
    "_target_": "rl.model.lora.LoRA",
    "rank": 8,
    "target_modules": "all-linear",
    "modules_to_save": [],
}


def remedies(
    config: Config, shape: Shape, fits: Callable[[Config], bool]
) -> tuple[list[Change], bool]:
    """Return the changes that make a configuration fit, and whether they do; all if none do.

    Args:
        config: settled, and too large.
        shape: of its model.
        fits: whether a configuration has room.

    """
    chosen: list[Change] = []
    for key, values in _choices(config, shape):
        tried: Change | None = None
        for value in values:
            tried = key, value
            if fits(changed(config, [*chosen, tried])):
                return _needed(config, [*chosen, tried], fits), True
        chosen += [tried] if tried else []
    return chosen, False


def typed(changes: Sequence[Change]) -> str:
    """Return changes as the command line takes them: `a=1 b=true`."""
    return " ".join(
        "adapter=lora" if key == "adapter" else f"{key}={str(value).lower()}"
        for key, value in changes
    )


def _choices(config: Config, shape: Shape) -> Iterator[tuple[str, Sequence[Any]]]:
    """What could be another way, each with values from the mildest on."""
    row = config["max_seq_len"]
    least = shape.cache_gib(row, config["model"]["dtype"])
    if (value_of(config, "inference.cpu_kv_cache_gib") or 0) > least:
        yield "inference.cpu_kv_cache_gib", [least]
    tokens, chunk = (config["trainer"][k] for k in ("tokens_per_micro_batch", "logprob_chunk"))
    yield "trainer.tokens_per_micro_batch", _halves(tokens, row)  # a row stays whole
    if not config["trainer"]["gradient_checkpointing"]:
        yield "trainer.gradient_checkpointing", [True]
    yield "trainer.logprob_chunk", _halves(chunk, _LEAST_CHUNK)
    for key in ("inference.replicas", "trainer.ranks"):
        yield key, range((value_of(config, key) or 1) - 1, 0, -1)
    if not fact(config["adapter"]["_target_"], "freezes_base", False):
        yield "adapter", [_LORA]


def _halves(value: int, least: int) -> Sequence[int]:
    """Half of it, half of that, down to the least; nothing where it is less already."""
    halves = []
    while value > least:
        value = max(value // 2, least)
        halves.append(value)
    return halves


def _needed(config: Config, changes: list[Change], fits: Callable[[Config], bool]) -> list[Change]:
    """The changes without those that others have made superfluous, the mildest kept longest."""
    for change in changes[::-1]:
        others = [other for other in changes if other is not change]
        if fits(changed(config, others)):
            changes = others
    return changes


def changed(config: Config, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the configuration with changes."""
    changed = dict(config)
    for key, value in changes:
        group, _, name = key.partition(".")
        changed[group] = {**changed[group], name: value} if name else value
    return changed
