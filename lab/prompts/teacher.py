"""The options of the reflection model, which reads rollouts and writes a better prompt."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from rl.config.limits import NEUTRAL_SAMPLING
from rl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rl.sampling.messages_chat import MessagesClient
from rl.sampling.sampler import PolicySampler

PLACEHOLDERS = ("<curr_param>", "<side_info>")


class _EndpointClient(MessagesClient):
    option: ClassVar[str] = "reflection.base_url"


@dataclass(frozen=True, kw_only=True)
class Reflection:
    base_url: str | None
    model: str | None
    api_key_variable: str
    path: str | None
    revision: str | None
    renderer: str
    dtype: Literal["bfloat16", "float32"]
    max_seq_len: Annotated[int, Meta(ge=2)]
    temperature: NonNegativeFloat
    max_tokens: PositiveInt
    timeout: PositiveFloat
    max_retries: NonNegativeInt
    template: str | None

    def __post_init__(self) -> None:
        if self.base_url is not None and self.path is not None:
            raise ValueError(
                f"reflection.base_url={self.base_url} and reflection.path={self.path} are both "
                "set: set one to null (base_url: an endpoint; path: a model for a second vLLM)"
            )
        if (self.base_url is None) != (self.model is None):
            raise ValueError(
                f"reflection.base_url={self.base_url}, reflection.model={self.model}: set both "
                "(the endpoint's address with /v1 and the name of its model) or neither"
            )
        if self.path is not None and self.max_tokens >= self.max_seq_len:
            raise ValueError(
                f"reflection.max_tokens={self.max_tokens}: set it below reflection.max_seq_len="
                f"{self.max_seq_len}, which limits the question and the answer together"
            )
        if lacking := [p for p in PLACEHOLDERS if self.template and p not in self.template]:
            raise ValueError(
                f"reflection.template lacks {' and '.join(lacking)}: insert both (<curr_param> is "
                "replaced by the prompt, <side_info> by the rollouts and their rewards)"
            )
        _ = self.client  # raises ValueError if reflection.base_url is invalid

    @property
    def client(self) -> MessagesClient | None:
        if self.base_url is None or self.model is None:
            return None
        return _EndpointClient(
            url=self.base_url,
            model=self.model,
            api_key_variable=self.api_key_variable,
            max_retries=self.max_retries,
        )

    def sampler(self, policy_sampler: PolicySampler) -> PolicySampler:
        return replace(
            policy_sampler,
            **NEUTRAL_SAMPLING,  # pyright: ignore[reportArgumentType] each value has its field's type
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            max_prompt_len=None,
            stop=(),
            seeded=False,
            rollout_timeout=self.timeout,
            max_retries=self.max_retries,
        )
