"""The command and the environment of one vLLM of a run."""

from collections.abc import Mapping

from rl.config.build import build
from rl.config.schema import Run
from rl.inference.replica import Replica
from rl.inference.server import ServedPolicy, adapter_limits, vllm_process
from rl.runtime.folder import RunFolder


def served_policy(run: Run, run_folder: RunFolder, seed: int) -> ServedPolicy:
    """Return what vLLM must know of the policy of a run."""
    limits = None
    if run.pushes_adapter:
        limits = adapter_limits(run.adapter.rank, run.adapter.target_modules, run_folder.model())
    return ServedPolicy(
        dtype=run.model.dtype,
        max_seq_len=run.max_seq_len,
        seed=seed,
        adapter=limits,
        head_dtype=run.model.head_dtype,
    )


def replica_process(
    run: Run, run_folder: RunFolder, replica: Replica, place: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a replica; `place` is the environment of its place."""
    # Each replica samples with its own seed, and a restarted one with another seed than before.
    seed = run.seed + run.inference.names.index(replica.name) + 1000 * replica.incarnation
    policy = served_policy(run, run_folder, seed)
    return vllm_process(build(run.inference)(), run_folder, replica, policy, place)
