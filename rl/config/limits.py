"""Check lower and upper bounds. Refuse keys of DeepSpeed and vLLM that other options set.

The constant ORDERED = ("clip_low", "clip_high") in the file of a function, or in a class, means
that the value of clip_low must be below the value of clip_high.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.facts import Config, fact

# With these values, only the temperature modifies the distribution from which vLLM samples.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# With top_k and no other options than these, vLLM can return the tokens from which it samples:
LIMITING_SAMPLING = ("top_p", "top_k", "min_p")
MAX_TOP_K = 128  # largest sampler.top_k with which vLLM returns the likely tokens


def num_returned_tokens(sampler: Mapping[str, Any]) -> int:
    """Return how many likely tokens vLLM returns at each position; 0 if the trainer uses none.

    In bfloat16 several logits often equal the k-th largest, and vLLM may keep all of their tokens.
    The number is therefore 2 * top_k, and at least 20.
    """
    top_k = sampler.get("top_k", -1)
    is_exact = 0 < top_k <= MAX_TOP_K and not any(
        sampler.get(key, neutral) != neutral
        for key, neutral in NEUTRAL_SAMPLING.items()
        if key not in LIMITING_SAMPLING
    )
    return max(2 * top_k, 20) if is_exact and not sampler.get("allow_biased_ratio", False) else 0


def bounds_problems(node: Mapping[str, Any], path: str) -> Iterator[str]:
    low, high = fact(node["_target_"], "ORDERED", ("", ""))
    bottom, top = node.get(low), node.get(high)
    if isinstance(bottom, int | float) and isinstance(top, int | float) and bottom >= top:
        yield f"{path}.{low}={bottom} is not below {path}.{high}={top}: change one of the two"


def value_of(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def sampling_limits(config: Config) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (config path, options) of the sampler and of each environment in env.sampling."""
    limits = value_of(config, "env.sampling") or {}
    return [("sampler", config["sampler"]), *((f"env.sampling.{k}", v) for k, v in limits.items())]


DECIDED_ELSEWHERE = {  # path -> key that the user must not set -> the option that sets the key
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
        "uds": "output_dir (the socket is in the run folder)",
        "host": "inference.listen",
        "port": "inference.listen",
        "middleware": "inference.listen (the run sets its own middleware, which checks its key)",
        "model": "model.path",
        "tokenizer": "model.path",
        "revision": "model.revision",
        "served_model_name": "model.path (the run chooses the name)",
        "dtype": "model.dtype",
        "max_model_len": "max_seq_len",
        "tensor_parallel_size": "inference.tensor_parallel_size",
        "seed": "seed",
        "logprobs_mode": "sampler.temperature (logprobs are always computed after temperature)",
        "weight_transfer_config": "sync",
        **dict.fromkeys(("enable_lora", "max_loras"), "adapter and sync"),
        "max_lora_rank": "adapter.rank",
        "lora_target_modules": "adapter.target_modules",
        "hf_token": "the environment variable HF_TOKEN (a run writes its options to files)",
        **dict.fromkeys(
            ("api_key", "ssl_keyfile", "ssl_certfile", "root_path"),
            "inference.listen (only the user can open the Unix socket, and TCP routes need a key)",
        ),
    },
}


def reserved_key_problems(config: Mapping[str, Any]) -> Iterator[str]:
    inference = config.get("inference")
    arguments = inference.get("args") if isinstance(inference, dict) else None
    for path, node in (("deepspeed", config.get("deepspeed")), ("inference.args", arguments)):
        for key in node if isinstance(node, dict) else ():
            owner = DECIDED_ELSEWHERE[path].get(str(key).removeprefix("--").replace("-", "_"))
            if owner:
                yield f"{path}.{key} is set by {owner}: change that option, and leave {key} out"
