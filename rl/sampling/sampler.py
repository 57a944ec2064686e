"""conf/sampler: how vLLM draws tokens, and how long a rollout may take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from renderers import Renderer

from envs.options import checked_stops
from rl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability


@dataclass(frozen=True, kw_only=True)
class PolicySampler:
    """Samples rollouts of the policy in training; conf/sampler/async.yaml explains the options."""

    uses_vllm: ClassVar[bool] = True
    max_staleness: NonNegativeInt
    max_concurrent: PositiveInt
    temperature: PositiveFloat
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Annotated[int, Meta(ge=-1)]
    min_p: Probability
    repetition_penalty: PositiveFloat
    presence_penalty: float
    frequency_penalty: float
    max_tokens: PositiveInt
    max_prompt_len: PositiveInt | None
    stop: Sequence[str]
    seeded: bool
    rollout_timeout: PositiveFloat
    max_retries: int
    allow_biased_ratio: bool

    def __post_init__(self) -> None:
        checked_stops(self.stop, "sampler.stop")

    def changed(self) -> dict[str, Any]:
        """Return the temperature and the parameters that differ from their neutral value.

        A server that knows only the OpenAI API refuses the other parameters.
        """
        neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        values = {name: getattr(self, name) for name in neutral}
        changed: dict[str, Any] = {n: value for n, value in values.items() if value != neutral[n]}
        if self.stop:
            changed["stop"] = list(self.stop)
        return {"temperature": self.temperature, **changed}

    def sampling(self, renderer: Renderer) -> dict[str, object]:
        """Return vLLM's sampling parameters, except the token limit."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop_token_ids": renderer.get_stop_token_ids(),
            # Only with a stop text does vLLM decode while it samples. A special token may be part
            # of a stop text.
            **({"stop": list(self.stop), "skip_special_tokens": False} if self.stop else {}),
        }
