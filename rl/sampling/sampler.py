"""What the policy in training is asked for: how tokens are drawn, and how long it may take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from renderers import Renderer

from envs.turn_limits import checked_stops


@dataclass(frozen=True, kw_only=True)
class PolicySampler:
    """Rollouts of the policy in training (conf/sampler). Knobs are explained in async.yaml."""

    uses_vllm: ClassVar[bool] = True
    max_staleness: int
    max_concurrent: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    max_prompt_len: int | None
    stop: Sequence[str]
    seeded: bool
    rollout_timeout: float
    max_retries: int
    allow_biased_ratio: bool

    def __post_init__(self) -> None:
        checked_stops(self.stop, "sampler.stop")

    def changed(self) -> dict[str, Any]:
        """Return temperature, and of the other parameters those that change anything.

        For servers that know no more than the OpenAI API as long as nobody asks them to.
        """
        neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        values = {name: getattr(self, name) for name in neutral}
        changed: dict[str, Any] = {n: value for n, value in values.items() if value != neutral[n]}
        if self.stop:
            changed["stop"] = list(self.stop)
        return {"temperature": self.temperature, **changed}

    def sampling(self, renderer: Renderer) -> dict[str, object]:
        """Return vLLM's sampling parameters, the turn's token limit excepted."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop_token_ids": renderer.get_stop_token_ids(),
            # vLLM reads along only where it has a text to look for. What ends a turn was sampled,
            # so it belongs to the completion; marks of the format are texts, too.
            **({"stop": list(self.stop), "skip_special_tokens": False} if self.stop else {}),
        }
