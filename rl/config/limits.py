"""The ranges of single values, and the keys of free-form mappings that a run decides itself.

    RANGES = {"clip_low": ">= 0 and < clip_high"}      in the file of a function, or in a class

A bound is a number or another option of the same target.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.facts import fact

COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def range_problems(node: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a sentence for each option of a node that is outside the range its target states."""
    prefix = f"{path}." if path else ""
    for key, bounds in fact(node["_target_"], "RANGES", {}).items():
        if not isinstance(value := node.get(key), int | float):
            continue
        for bound in bounds.split(" and "):
            comparison, limit = bound.split()
            is_option = limit.isidentifier()
            number = node.get(limit) if is_option else float(limit)
            if number is None or COMPARISONS[comparison](value, number):
                continue
            if is_option:
                order = "below" if "<" in comparison else "above"
                other = f"{prefix}{limit}={number}"
                yield f"{prefix}{key}={value} is not {order} {other}: move one of them"
            else:
                yield f"{prefix}{key}={value}, but it must be {bounds}"
                break


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, None if there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


DECIDED_ELSEWHERE = {
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
        "host": "inference.listen",
        "port": "inference.listen",
        "middleware": "inference.listen (the run's own middleware asks for its key)",
        "model": "model.path",
        "tokenizer": "model.path",
        "revision": "model.revision",
        "served_model_name": "model.path (the run chooses the name)",
        "dtype": "model.dtype",
        "max_model_len": "max_seq_len",
        "tensor_parallel_size": "inference.tensor_parallel_size",
        "seed": "seed",
        "logprobs_mode": "sampler.temperature (logprobs are always those after temperature)",
        "weight_transfer_config": "sync",
        **dict.fromkeys(("enable_lora", "max_loras"), "adapter and sync"),
        "max_lora_rank": "adapter.rank",
        "lora_target_modules": "adapter.target_modules",
        **dict.fromkeys(
            ("api_key", "ssl_keyfile", "ssl_certfile", "root_path"),
            "output_dir (the socket's folder says who may connect; a run's requests bring no key)",
        ),
    },
}


def free_form_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key of a free-form mapping that another option decides."""
    inference = config.get("inference")
    arguments = inference.get("args") if isinstance(inference, dict) else None
    for path, given in (("deepspeed", config.get("deepspeed")), ("inference.args", arguments)):
        for key in given if isinstance(given, dict) else ():
            owner = DECIDED_ELSEWHERE[path].get(str(key).removeprefix("--").replace("-", "_"))
            if owner:
                yield f"{path}.{key} is decided by {owner}: set that, and leave {key} out"
