"""The teacher: a model that reads rollouts and writes a better prompt.

Options in `reflection` of conf/optimize_prompt.yaml select the model:

    base_url     any OpenAI-compatible endpoint
    path         a model that a second vLLM serves
    neither      the policy itself
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from msgspec import Meta

from envs.chat_endpoint import ChatEndpoint
from rl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rl.inference.completion import Completion, GenerationError
from rl.runtime.failure import RunFailed
from rl.runtime.files import append_line
from rl.sampling.chat import Chat, Prompt
from rl.sampling.messages_chat import MessagesChat
from rl.sampling.sampler import PolicySampler

PLACEHOLDERS = ("<curr_param>", "<side_info>")
_MAX_EMPTY = 4  # the search ends after this many consecutive answers without a prompt


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """The teacher's options, which conf/optimize_prompt.yaml explains."""

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
                f"reflection.base_url={self.base_url} and reflection.path={self.path}: give one of "
                "them, an endpoint or a model for a second vLLM"
            )
        if (self.base_url is None) != (self.model is None):
            raise ValueError(
                f"reflection.base_url={self.base_url}, reflection.model={self.model}: an endpoint "
                "needs both, its address with /v1 and the name under which it serves the model"
            )
        if self.path is not None and self.max_tokens >= self.max_seq_len:
            raise ValueError(
                f"reflection.max_tokens={self.max_tokens} leaves no tokens for a question in "
                f"reflection.max_seq_len={self.max_seq_len}: lower max_tokens or raise max_seq_len"
            )
        if lacking := [p for p in PLACEHOLDERS if self.template and p not in self.template]:
            raise ValueError(
                f"reflection.template lacks {' and '.join(lacking)}: <curr_param> stands for the "
                "prompt so far, <side_info> for the rollouts and their rewards"
            )
        _ = self.endpoint  # ChatEndpoint checks the URL when it is created

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """The endpoint at base_url, or None if base_url is not set."""
        if self.base_url is None or self.model is None:
            return None
        return ChatEndpoint(
            url=self.base_url,
            model=self.model,
            api_key_variable=self.api_key_variable,
            max_retries=self.max_retries,
            option="reflection.base_url",
            raises=GenerationError,
        )

    @property
    def sampler(self) -> PolicySampler:
        """The teacher's sampling options, which do not depend on the policy's options."""
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
        """Check that the endpoint responds, and yield a chat with that endpoint."""
        async with endpoint.client(max_concurrent=1, timeout=self.timeout) as client:
            await endpoint.check_access(client)
            yield MessagesChat(self.sampler, endpoint, client)


@dataclass
class Teacher:
    """The callable that GEPA calls to get a better prompt.

    GEPA ignores every exception of a teacher and continues with the next round. An error that would
    occur again is therefore stored in `failure`, which ends the search.
    """

    chat: Chat
    runner: asyncio.Runner
    path: Path  # the file that records every question and answer
    timeout: float
    failure: RunFailed | None = None
    _num_empty: int = field(default=0, init=False)

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """Return the teacher's answer to a question of GEPA, and record both."""
        question = str(prompt)  # already a text, because GEPA passes a list only for images
        if self.failure is not None:
            raise self.failure
        record = append_line(self.path, {"asked": question, **self._ask(question)})
        said = record["said"].rpartition("</think>")[2].strip()
        if said and not record["cut_off"]:
            self._num_empty = 0
            return said
        self._num_empty += 1
        if self._num_empty == _MAX_EMPTY:
            why = "was cut off" if record["cut_off"] else "returned no text"
            self._fail(
                f"the reflection model {why}, {_MAX_EMPTY} times in a row: raise "
                "reflection.max_tokens, or choose another model"
            )
        raise ValueError("the reflection model's answer has no complete prompt")

    def _ask(self, question: str) -> dict[str, object]:
        try:
            prompt, completion = self.runner.run(self._completed(question))
        except TimeoutError:
            self._fail(
                f"the reflection model did not answer within reflection.timeout={self.timeout:g} s"
            )
        except (RunFailed, ValueError) as error:
            self._fail(str(error))
        if completion is None or (completion.cut_off and self.chat.fills_context(completion)):
            self._fail(
                f"the question to the reflection model has {len(question):,} characters, which "
                "leaves no tokens for an answer: lower minibatch_size, or choose a model with a "
                "longer context (reflection.max_seq_len; model.max_seq_len for the policy itself)"
            )
        content = self.chat.message(prompt, completion).get("content") or ""
        return {"said": content, "cut_off": completion.cut_off}

    async def _completed(self, question: str) -> tuple[Prompt, Completion | None]:
        with self.chat.group() as chat:
            prompt = await chat.open([{"role": "user", "content": question}], None)
            if chat.max_new_tokens(prompt) <= 0:
                return prompt, None
            async with asyncio.timeout(self.timeout):
                return prompt, (await chat.generate(prompt, 1))[0]

    def _fail(self, problem: str) -> NoReturn:
        self.failure = RunFailed(problem)
        raise self.failure
