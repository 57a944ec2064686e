"""Who the teacher is, that rewrites the prompt: `reflection` of conf/optimize_prompt.yaml.

base_url     any OpenAI-compatible endpoint
path         a model that a second vLLM of ours serves
neither      the policy itself
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from rl.sampling.chat import Chat
from rl.sampling.chat_endpoint import ChatEndpoint, Keys
from rl.sampling.messages_chat import MessagesChat
from rl.sampling.sampler import PolicySampler

ENDPOINT = Keys("reflection.base_url", "reflection", "")
PLACEHOLDERS = ("<curr_param>", "<side_info>")


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """Who rewrites the prompt. The knobs are explained in conf/optimize_prompt.yaml."""

    base_url: str | None
    model: str | None
    api_key_variable: str
    path: str | None
    revision: str | None
    renderer: str
    dtype: Literal["bfloat16", "float32"]
    max_seq_len: int
    temperature: float
    max_tokens: int
    timeout: float
    max_retries: int
    template: str | None

    def __post_init__(self) -> None:
        if self.base_url is not None and self.path is not None:
            raise ValueError(
                f"reflection.base_url={self.base_url} and reflection.path={self.path}: give one of "
                "them, an endpoint or a model of which we start a vLLM"
            )
        if (self.base_url is None) != (self.model is None):
            raise ValueError(
                f"reflection.base_url={self.base_url}, reflection.model={self.model}: an endpoint "
                "needs both, its address with /v1 and the name that it serves the model under"
            )
        if self.path is not None and self.max_tokens >= self.max_seq_len:
            raise ValueError(
                f"reflection.max_tokens={self.max_tokens} leaves no room for a question in "
                f"reflection.max_seq_len={self.max_seq_len}: lower the one or raise the other"
            )
        if lacking := [p for p in PLACEHOLDERS if self.template and p not in self.template]:
            raise ValueError(
                f"reflection.template lacks {' and '.join(lacking)}: <curr_param> stands for the "
                "prompt so far, <side_info> for the rollouts and their rewards"
            )
        _ = self.endpoint  # an address that is none

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """Somebody else's server."""
        if self.base_url is None or self.model is None:
            return None
        return ChatEndpoint(
            url=self.base_url,
            model=self.model,
            api_key_variable=self.api_key_variable,
            max_retries=self.max_retries,
            keys=ENDPOINT,
        )

    @property
    def sampler(self) -> PolicySampler:
        """How the teacher is sampled: one answer at a time, nothing of the policy's."""
        return PolicySampler(
            max_staleness=0,
            max_concurrent=1,
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_tokens=self.max_tokens,
            max_prompt_len=None,
            stop=(),
            seeded=False,
            rollout_timeout=self.timeout,
            max_retries=self.max_retries,
            allow_biased_ratio=False,
        )

    @asynccontextmanager
    async def at_endpoint(self, endpoint: ChatEndpoint) -> AsyncIterator[Chat]:
        """The chat with somebody else's server."""
        async with endpoint.session(limit=1, timeout=self.timeout) as session:
            await endpoint.look(session)
            yield MessagesChat(self.sampler, endpoint, session)
