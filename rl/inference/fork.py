"""Runs inside vLLM on a CPU: its engine is one forked process instead of two spawned ones.

vLLM spawns an engine there and the engine spawns a worker, and each imports torch, transformers and
vLLM again: 20 of the 33 seconds that a start takes on two cores. On GPUs it forks the one and runs
the other inside of it, and so do we. It spawns on CPU to bind each worker's OpenMP threads to cores
before OpenMP is loaded; ours are counted by OMP_NUM_THREADS (server.py) and the system places
them. An engine of several workers is left as vLLM has it.
"""

import os
from typing import Any

from vllm.platforms import current_platform


def fork_engine() -> None:
    """Have vLLM fork its engine, if it is going to compute on CPU with one worker."""
    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    decide = platform.check_and_update_config

    def decided(config: Any) -> None:
        decide(config)
        if config.parallel_config.world_size == 1:
            config.parallel_config.distributed_executor_backend = "uni"
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(decided)
