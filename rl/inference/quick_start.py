"""Runs inside vLLM on a CPU: it starts in half of the time.

vLLM spawns an engine there and the engine spawns a worker, and each imports torch, transformers and
vLLM again: 20 of the 33 seconds that a start takes on two cores. On GPUs it forks the one and runs
the other inside of it, and so do we. It spawns on CPU to bind each worker's OpenMP threads to cores
before OpenMP is loaded; ours are counted by OMP_NUM_THREADS (server.py) and the system places
them. An engine of several workers is left as vLLM has it.

Even if it computes eagerly, vLLM compiles the function that ranks each token among the vocabulary.
Over a small vocabulary that takes 0.1 ms as it is written, and seconds of every start to compile.
"""

import os
from typing import Any

import torch
from vllm.platforms import current_platform

_SMALL_VOCAB = 1024  # rows of logits; 0.1 ms for 256 sequences over 512, 200 ms over 150,000


def start_quickly() -> None:
    """Have vLLM fork its engine and compile nothing, where it computes on CPU with one worker."""
    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    decide = platform.check_and_update_config

    def decided(config: Any) -> None:
        decide(config)
        if config.parallel_config.world_size > 1:
            return
        config.parallel_config.distributed_executor_backend = "uni"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        model = config.model_config
        if model and model.enforce_eager and model.get_vocab_size() <= _SMALL_VOCAB:
            torch.compiler.set_stance("force_eager")

    platform.check_and_update_config = staticmethod(decided)
