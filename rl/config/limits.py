"""What single values may be, and the keys of the free-form parts that ours decide."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.facts import fact

COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}

RANGES = {
    "seed": ">= 0",
    "max_steps": ">= 1",
    "batch_size": ">= 1",
    "group_size": ">= 1",
    "max_seq_len": ">= 2",
    "updates_per_batch": ">= 1",
    "entropy_bonus": ">= 0",
    "model.warm_start.steps": ">= 1",
    "model.warm_start.batch_size": ">= 1",
    "model.warm_start.learning_rate": "> 0",
    "model.warm_start.corruption_rate": ">= 0 and <= 1",
    "adapter.rank": ">= 1",
    "adapter.alpha": "> 0",
    "adapter.dropout": ">= 0 and < 1",
    "sampler.max_staleness": ">= 0",
    "sampler.max_concurrent": ">= 1",
    "sampler.temperature": "> 0",
    "sampler.corruption_rate": ">= 0 and <= 1",
    "sampler.top_p": "> 0 and <= 1",
    "sampler.top_k": ">= -1",
    "sampler.min_p": ">= 0 and <= 1",
    "sampler.repetition_penalty": "> 0",
    "sampler.max_tokens": ">= 1",
    "sampler.max_prompt_len": ">= 1",
    "sampler.rollout_timeout": "> 0",
    "aggregation.length": ">= 1",
    "reward.length_penalty": ">= 0",
    "truncation.limit": ">= 1",
    "truncation.start": ">= 0 and < 1",
    "truncation.weight": ">= 0",
    "buffer.min_spread": ">= 0",
    "buffer.min_reward_variance": ">= 0",
    "kl.beta": ">= 0",
    "kl.target_kl": "> 0",
    "reference.refresh_every": ">= 0",
    "reference.refresh_mix": "> 0 and <= 1",
    "reference.timeout": "> 0",
    "reference.max_retries": ">= 0",
    "reference.top_k": ">= 1",
    "correction.cap": "> 0",
    "correction.low": ">= 0",
    "critic.head_start": ">= 0",
    "optim.learning_rate": "> 0",
    "optim.beta1": ">= 0 and < 1",
    "optim.beta2": ">= 0 and < 1",
    "optim.eps": "> 0",
    "optim.weight_decay": ">= 0",
    "optim.warmup_steps": ">= 0",
    "optim.min_ratio": ">= 0 and <= 1",
    "optim.momentum": ">= 0 and < 1",
    "optim.ns_steps": ">= 1 and < 100",
    "optim.adamw_ratio": "> 0",
    "inference.replicas": ">= 1",
    "inference.startup_timeout": "> 0",
    "inference.tensor_parallel_size": ">= 1",
    "inference.cpu_kv_cache_gib": "> 0",
    "evaluation.every": ">= 1",
    "evaluation.num_examples": ">= 1",
    "evaluation.rollouts_per_example": ">= 1",
    "evaluation.temperature": "> 0",
    "record.num_groups": ">= 0",
    "logger.rollouts_every": ">= 0",
    "logger.num_rollouts": ">= 1",
    "logger.loggers.wandb.rollouts_every": ">= 0",
    "logger.loggers.wandb.num_rollouts": ">= 1",
    "num_examples": ">= 1",
    "rollouts_per_example": ">= 1",
    **dict.fromkeys(("max_calls", "num_rounds", "num_train", "num_val", "minibatch_size"), ">= 1"),
    "reflection.max_seq_len": ">= 2",
    "reflection.temperature": ">= 0",
    "reflection.max_tokens": ">= 1",
    "reflection.timeout": "> 0",
    "reflection.max_retries": ">= 0",
    "client.max_retries": ">= 0",
    "sync.probe_every": ">= 0",
    "sync.probe_rows": ">= 1",
    "sync.max_mismatch": "> 0",
    "trainer.ranks": ">= 1",
    "trainer.tokens_per_micro_batch": ">= 1",
    "trainer.logprob_chunk": ">= 1",
    "trainer.max_grad_norm": "> 0",
    "trainer.num_threads": ">= 1",
    "trainer.checkpoint_every": ">= 0",
    "trainer.keep_checkpoints": ">= 1",
    "trainer.max_nonfinite_steps": ">= 1",
    "trainer.wait_timeout": "> 0",
}
# A critic has an optimizer of its own.
RANGES |= {f"critic.{key}": bounds for key, bounds in RANGES.items() if key.startswith("optim.")}


def range_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each number outside of its range; absent and null ones are none."""
    for key, bounds in RANGES.items():
        yield from outside(key, value_of(config, key), bounds)


def outside(key: str, value: Any, bounds: str) -> Iterator[str]:
    """A sentence where a value is not within bounds such as ">= 0 and < 1"; null always is."""
    conditions = [condition.split() for condition in bounds.split(" and ")]
    if value is not None and not all(COMPARISONS[c](value, float(x)) for c, x in conditions):
        yield f"{key}={value}, but it must be {bounds}"


def outside_own(path: str, node: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each knob of a node that is not within what its target says of it (RANGES)."""
    for key, bounds in fact(node["_target_"], "RANGES", {}).items():
        yield from outside(f"{path}.{key}", node.get(key), bounds)


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


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
        "host": "inference.listen",
        "port": "inference.listen",
        "middleware": "inference.listen (ours asks for the run's key)",
        "model": "model.path",
        "tokenizer": "model.path",
        "revision": "model.revision",
        "served_model_name": "model.path (the name is ours)",
        "dtype": "model.dtype",
        "max_model_len": "max_seq_len",
        "tensor_parallel_size": "inference.tensor_parallel_size",
        "seed": "seed",
        "logprobs_mode": "sampler.temperature (logprobs are always those after temperature)",
        "weight_transfer_config": "sync.transport",
        **dict.fromkeys(("enable_lora", "max_loras"), "adapter and sync.transport"),
        "max_lora_rank": "adapter.rank",
        "lora_target_modules": "adapter.target_modules",
        **dict.fromkeys(
            ("api_key", "ssl_keyfile", "ssl_certfile", "root_path"),
            "output_dir (the socket's folder says who may come in; our own requests bring no key)",
        ),
    },
}


def free_form_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of the free-form parts that would overrule one of ours."""
    inference = config.get("inference")
    arguments = inference.get("args") if isinstance(inference, dict) else None
    for path, part in (("deepspeed", config.get("deepspeed")), ("inference.args", arguments)):
        for key in part if isinstance(part, dict) else ():
            owner = OWNED_BY_US[path].get(str(key).removeprefix("--").replace("-", "_"))
            if owner:
                yield f"{path}.{key} is decided by {owner}: set that, and leave {key} out"
