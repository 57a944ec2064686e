"""The command and the environment of one vLLM of a run."""

from collections.abc import Mapping

from rl.config.build import build
from rl.config.schema import Run
from rl.config.transport import transport
from rl.inference.replica import Replica, names_of
from rl.inference.server import adapter_room, vllm_process
from rl.run.folder import RunFolder


def replica_process(
    run: Run, run_folder: RunFolder, replica: Replica, place: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return what starts it; `place` is its environment where it runs."""
    return vllm_process(
        build(run.inference)(),
        run_folder,
        replica,
        dtype=run.model["dtype"],
        max_seq_len=run.max_seq_len,
        # Each draws with noise of its own, and one that is started again with another than before.
        seed=run.seed + names_of(run.inference).index(replica.name) + 1000 * replica.incarnation,
        adapter=adapter_room(transport(vars(run)), run.adapter, run_folder.model()),
        head_dtype=run.model["head_dtype"],
        place=place,
    )
