"""The reflection model of GEPA, which reads rollouts and writes a better prompt.

Options in `reflection` of conf/optimize_prompt.yaml select the model:

    base_url     any OpenAI-compatible endpoint
    path         a model that a second vLLM serves
    neither      the policy itself
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from rl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rl.inference.completion import Completion
from rl.runtime.failure import RunFailed
from rl.runtime.files import append_line
from rl.sampling.chat import Chat, Prompt
from rl.sampling.messages_chat import MessagesClient
from rl.sampling.sampler import NEUTRAL, PolicySampler

PLACEHOLDERS = ("<curr_param>", "<side_info>")
_MAX_EMPTY = 4  # this many consecutive answers without a prompt end the search


class _EndpointClient(MessagesClient):
    option: ClassVar[str] = "reflection.base_url"


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """The options `reflection` of conf/optimize_prompt.yaml, which explains each option."""

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
                f"{self.max_seq_len}, which also counts the question"
            )
        if lacking := [p for p in PLACEHOLDERS if self.template and p not in self.template]:
            raise ValueError(
                f"reflection.template lacks {' and '.join(lacking)}: insert it (<curr_param> is "
                "replaced by the prompt, <side_info> by the rollouts and their rewards)"
            )
        _ = self.client  # raises ValueError at the start if reflection.base_url is invalid

    @property
    def client(self) -> MessagesClient | None:
        """The client of the endpoint at base_url; None if base_url is null."""
        if self.base_url is None or self.model is None:
            return None
        return _EndpointClient(
            url=self.base_url,
            model=self.model,
            api_key_variable=self.api_key_variable,
            max_retries=self.max_retries,
        )

    @property
    def sampler(self) -> PolicySampler:
        """The sampling options of the reflection model."""
        return PolicySampler(
            **NEUTRAL,  # pyright: ignore[reportArgumentType] each value has its type
            max_staleness=0,
            max_concurrent=1,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            max_prompt_len=None,
            stop=(),
            seeded=False,
            rollout_timeout=self.timeout,
            max_retries=self.max_retries,
            allow_biased_ratio=False,
        )


class SearchEnded(BaseException):
    """The error that ends a search. Not an Exception, because GEPA ignores those of a round."""


@dataclass
class ReflectionModel:
    """The callable that GEPA calls to get a better prompt."""

    chat: Chat
    runner: asyncio.Runner
    path: Path  # reflections.jsonl, to which each question with its answer is appended
    timeout: float  # reflection.timeout in seconds
    _num_empty: int = field(default=0, init=False)

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """Return the reflection model's answer to a question of GEPA, and record both.

        Raises:
            ValueError: the answer has no prompt. GEPA continues with the next round.
            SearchEnded: the next answer would not be better.
        """
        question = str(prompt)  # a text, because GEPA passes a list only with images
        record = append_line(self.path, {"asked": question, **self._ask(question)})
        said = record["said"].rpartition("</think>")[2].strip()
        if said and not record["cut_off"]:
            self._num_empty = 0
            return said
        self._num_empty += 1
        if self._num_empty == _MAX_EMPTY:
            why = "was cut off" if record["cut_off"] else "returned no text"
            raise SearchEnded(
                f"the reflection model {why}, {_MAX_EMPTY} times in a row: raise "
                "reflection.max_tokens, or choose another model"
            )
        raise ValueError("the reflection model's answer has no complete prompt")

    def _ask(self, question: str) -> dict[str, object]:
        try:
            prompt, completion = self.runner.run(self._completed(question))
        except TimeoutError as error:
            raise SearchEnded(
                f"the reflection model did not answer: raise reflection.timeout={self.timeout:g}"
            ) from error
        except (RunFailed, ValueError) as error:
            raise SearchEnded(str(error)) from error
        if completion is None or (completion.cut_off and self.chat.fills_context(completion)):
            raise SearchEnded(
                f"the question to the reflection model has {len(question):,} characters, which "
                "leaves no tokens for an answer: lower minibatch_size, or raise "
                "reflection.max_seq_len (model.max_seq_len if the policy is the reflection model)"
            )
        content = self.chat.message(prompt, completion).get("content") or ""
        return {"said": content, "cut_off": completion.cut_off}

    async def _completed(self, question: str) -> tuple[Prompt, Completion | None]:
        with self.chat.group() as chat:
            prompt = await chat.first_prompt([{"role": "user", "content": question}], None)
            if chat.max_new_tokens(prompt) <= 0:
                return prompt, None
            async with asyncio.timeout(self.timeout):
                return prompt, (await chat.generate(prompt, 1))[0]
