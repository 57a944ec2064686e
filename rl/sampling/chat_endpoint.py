"""/chat/completions of any OpenAI-compatible server: client=messages and the reflection model.

Each of them names the options of its endpoint in the user's words (`Keys`), so that a message
quotes the option that the user can change.
"""

import json
from dataclasses import dataclass
from typing import Any

from envs.http_client import HttpClient, HttpError
from envs.messages import parse_json
from rl.inference.completion import GenerationError

_LARGEST_ANSWER_MIB = 32


@dataclass(frozen=True)
class Keys:
    """The configuration's names for the options of an endpoint."""

    url: str
    group: str  # of the other options
    limit: str  # what to do about too many requests, besides max_retries

    @property
    def remedies(self) -> dict[int, str]:
        """What to do, by HTTP status; {key} is the variable of the key."""
        return {
            0: "is the server running at this address?",
            401: f"the server refused the key in {{key}}: set that variable, or {self.group}."
            "api_key_variable",
            403: f"the server refuses this model to the key in {{key}}: use another {self.group}."
            "model or key",
            404: f"the server knows no model {self.group}.model={{model}} (or {self.url} is not "
            "its .../v1)",
            429: f"{self.limit}raise {self.group}.max_retries",
        }


CLIENT = Keys("client.url", "client", "lower sampler.max_concurrent or ")


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """The address of a server, the model's name, and the name of the key's variable."""

    url: str
    model: str
    api_key_variable: str
    max_retries: int
    keys: Keys = CLIENT

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"{self.where} is not an address: write http://host:port/v1, the base address of "
                "the server's OpenAI-compatible API"
            )

    @property
    def where(self) -> str:
        """The option and its value, for messages."""
        return f"{self.keys.url}={self.url}"

    def client(self, *, max_concurrent: int, timeout: float) -> HttpClient:
        """Return the client for `check_access` and `post`; the caller closes it."""
        return HttpClient(
            timeout=timeout,
            max_retries=self.max_retries,
            max_concurrent=max_concurrent,
            max_mib=_LARGEST_ANSWER_MIB,
            api_key_variable=self.api_key_variable,
        )

    async def check_access(self, client: HttpClient) -> None:
        """Ask for the list of models, which costs nothing.

        Raises:
            GenerationError: the server does not answer or refuses the key. Other errors are
                ignored, because not every server has this list.

        """
        try:
            await client.send_once("GET", f"{self.url.rstrip('/')}/models")
        except HttpError as error:
            if error.status in (0, 401, 403):
                raise self._failed(error) from error

    async def post(self, client: HttpClient, body: dict[str, Any]) -> Any:
        """Return the answer; None if the conversation is longer than the model's context.

        Raises:
            GenerationError: the server cannot be used.

        """
        try:
            text = await client.post(f"{self.url.rstrip('/')}/chat/completions", body)
        except HttpError as error:
            said = error.text.lower().replace("_", " ")
            if error.status == 400 and "context length" in said:
                return None
            raise self._failed(error) from error
        try:
            return parse_json(text)
        except ValueError as error:
            raise self.wrong_answer("with JSON", text) from error

    def wrong_answer(self, expected: str, answer: object) -> GenerationError:
        """Return the error for an answer that is not what the API promises."""
        shown = repr(answer[:200]) if isinstance(answer, str) else json.dumps(answer)[:200]
        return GenerationError(f"{self.where} did not answer {expected}: {shown}")

    def _failed(self, error: HttpError) -> GenerationError:
        remedy = self.keys.remedies.get(error.status, "")
        hint = ": " + remedy.format(key=self.api_key_variable, model=self.model) if remedy else ""
        return GenerationError(f"{self.where} {error}{hint}")
