"""Send requests to /chat/completions of any OpenAI-compatible server."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

from envs.http_client import HttpClient, HttpError
from envs.messages import parse_json


class _AnswerMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    message: _AnswerMessage
    finish_reason: Any = None


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Answer(msgspec.Struct):
    """The fields of a chat completion (OpenAI API) that we read."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None


def is_context_full(status: int, text: str) -> bool:
    """Return whether an answer of an OpenAI-compatible server says that the prompt is too long."""
    lower = text.lower().replace("_", " ")
    return status == 400 and any(words in lower for words in ("context length", "context window"))


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """The address of a chat server, its model and the environment variable with the API key."""

    option: ClassVar[str]  # option that sets `url`, such as client.url; error messages name it
    raises: ClassVar[type[Exception]]  # class of the exceptions that the methods raise

    url: str
    model: str
    api_key_variable: str | None
    max_retries: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"{self.option}={self.url} is not an address: write http://host:port/v1, the base "
                "address of the server's OpenAI-compatible API"
            )

    def client(self, *, max_concurrent: int, timeout: float, retry_wait: float = 0.5) -> HttpClient:
        """Return an HTTP client for `check_access` and `ask`. `async with` closes it."""
        return HttpClient(
            timeout=timeout,
            max_retries=self.max_retries,
            max_concurrent=max_concurrent,
            max_mib=32,
            api_key_variable=self.api_key_variable,
            retry_wait=retry_wait,
        )

    async def check_access(self, client: HttpClient) -> None:
        """Request the list of models. Raise an error if the server refuses the key or is down."""
        try:
            await client.send_once("GET", f"{self.url.rstrip('/')}/models")
        except HttpError as error:
            if error.status in (0, 401, 403):  # not 404, because some servers lack this list
                raise self._exception_for(error) from error

    async def ask(self, client: HttpClient, **body: Any) -> Answer | None:
        """Send a request. Return the completion, or None if the conversation is too long."""
        request = {"model": self.model, **body}
        try:
            text = await client.post(f"{self.url.rstrip('/')}/chat/completions", request)
        except HttpError as error:
            if is_context_full(error.status, error.text):
                return None
            raise self._exception_for(error) from error
        try:
            return msgspec.convert(parse_json(text), Answer)
        except ValueError as error:  # The text is not JSON or lacks required fields.
            excerpt = client.remove_key(text)[:200]
            raise self.raises(
                f"{self.option}={self.url} did not answer as the OpenAI API does, but with "
                f"{excerpt!r}: correct {self.option}"
            ) from error

    def _exception_for(self, error: HttpError) -> Exception:
        group, key = self.option.partition(".")[0], self.api_key_variable
        remedies = {
            0: f"check that the server runs, and correct {self.option}",
            401: f"the server refused the key in {key}: export the right key in this variable, or "
            f"set {group}.api_key_variable to another variable",
            403: f"the server refuses this model to the key in {key}: set another {group}.model or "
            "export another key",
            404: f"the server knows no model {group}.model={self.model}: correct {group}.model, or "
            f"{self.option} if it does not end in /v1",
            429: f"send fewer requests at once (max_concurrent), or raise {group}.max_retries",
        }
        if key is None:
            needs_key = f"set {group}.api_key_variable to the environment variable with the key"
            remedies[401] = remedies[403] = f"the request had no key: {needs_key}"
        remedy = remedies.get(error.status)
        return self.raises(f"{self.option}={self.url} {error}{f': {remedy}' if remedy else ''}")
