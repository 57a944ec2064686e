"""The two free-form parts of a configuration, and the keys in them that ours decide."""

from collections.abc import Iterator, Mapping
from typing import Any

OWNED_BY_US = {
    "deepspeed": {
        "train_batch_size": "batch_size",
        "train_micro_batch_size_per_gpu": "trainer.tokens_per_micro_batch",
        "gradient_accumulation_steps": "trainer.tokens_per_micro_batch",
        "gradient_clipping": "trainer.max_grad_norm",
        "optimizer": "optim",
        "scheduler": "optim.schedule",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
    },
    "inference.args": {
        "uds": "output_dir (the socket lies in the run folder)",
        "host": "output_dir (a socket in the run folder replaces host and port)",
        "port": "output_dir (a socket in the run folder replaces host and port)",
        "model": "model.path",
        "tokenizer": "model.path",
        "revision": "model.revision",
        "served_model_name": "model.path (the name is ours)",
        "dtype": "model.dtype",
        "max_model_len": "max_seq_len",
        "seed": "seed",
        "logprobs_mode": "sampler.temperature (logprobs are always those after temperature)",
        "weight_transfer_config": "sync.strategy",
        **dict.fromkeys(("enable_lora", "max_loras"), "adapter and sync.strategy"),
        "max_lora_rank": "adapter.rank",
        "lora_target_modules": "adapter.target_modules",
    },
}


def free_form_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of the free-form parts that would overrule one of ours."""
    inference = config.get("inference")
    arguments = inference.get("args") if isinstance(inference, dict) else None
    for path, part in (("deepspeed", config.get("deepspeed")), ("inference.args", arguments)):
        for key in part if isinstance(part, dict) else ():
            ours = OWNED_BY_US[path].get(str(key).removeprefix("--").replace("-", "_"))
            if ours:
                yield f"{path}.{key} is decided by {ours}: set that, and leave {key} out"
