"""Changes that make a run fit the memory of its machines, tried before they are suggested.

    the same experiment     shorter micro-batches, recomputed activations, fewer replicas or ranks
    another experiment      an adapter instead of all weights

One change may not be enough. The suggested changes are enough together, and each is necessary.
Offload is not among them, because on a CPU it moves nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rl.config.schema import Run
from rl.model.shape import Shape

Changes = dict[str, Any]  # a dotted key, or a group: its new value

_LEAST_CHUNK = 64  # tokens of logits at a time; fewer save almost nothing
_LORA = {  # the keys of conf/adapter/lora.yaml that the memory depends on
    "_target_": "rl.model.lora.LoRA",
    "rank": 8,
    "target_modules": "all-linear",
    "modules_to_save": [],
}


def remedies(
    run: Run, shape: Shape, fits: Callable[[Run], bool], *, fewer_processes: bool
) -> tuple[Changes, bool]:
    """Return the changes that make a run fit, and whether they do; all changes if none suffice.

    Args:
        run: with its counts; it is too large.
        shape: the sizes of its model.
        fits: says whether a changed run has enough memory.
        fewer_processes: whether fewer replicas or ranks could help.

    """
    chosen: Changes = {}
    for key, values in _choices(run, shape, fewer_processes):
        tried = chosen
        for value in values:
            tried = {**chosen, key: value}
            if fits(run.changed(tried)):
                return _necessary(run, tried, fits), True
        chosen = tried
    return chosen, False


def typed(changes: Changes) -> str:
    """Return changes as the command line takes them: `a=1 b=true`."""
    return " ".join(
        "adapter=lora" if key == "adapter" else f"{key}={str(value).lower()}"
        for key, value in changes.items()
    )


def _choices(run: Run, shape: Shape, fewer_processes: bool) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each key with the values to try, the mildest first."""
    least = shape.cache_gib(run.max_seq_len, run.model.dtype)
    if (run.inference.cpu_kv_cache_gib or 0) > least:
        yield "inference.cpu_kv_cache_gib", [least]
    # A micro-batch holds at least one row.
    yield (
        "trainer.tokens_per_micro_batch",
        _halves(run.trainer.tokens_per_micro_batch, run.max_seq_len),
    )
    if not run.trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing", [True]
    yield "trainer.logprob_chunk", _halves(run.trainer.logprob_chunk, _LEAST_CHUNK)
    if fewer_processes:
        yield "inference.replicas", range((run.inference.replicas or 1) - 1, 0, -1)
        yield "trainer.ranks", range((run.trainer.ranks or 1) - 1, 0, -1)
    if not run.adapter.freezes_base:
        yield "adapter", [_LORA]


def _halves(value: int, least: int) -> list[int]:
    """Return half of a value, a quarter, ..., and last `least`; nothing if it is not larger."""
    halves = []
    while value > least:
        value = max(value // 2, least)
        halves.append(value)
    return halves


def _necessary(run: Run, changes: Changes, fits: Callable[[Run], bool]) -> Changes:
    """Return the changes without those that later changes made unnecessary."""
    for key in reversed(changes):
        others = {other: value for other, value in changes.items() if other != key}
        if fits(run.changed(others)):
            changes = others
    return changes
