"""Prompts by the server's own chat template; completions as tokens all the same.

    messages --/tokenize--> token ids --/inference/v1/generate--> tokens, logprobs, versions

vLLM's /v1/chat/completions would give token ids too, but no policy version per token. Every turn is
rendered anew, so a rollout stays one row only while the template repeats what was sampled exactly;
where it does not, the rollout forks (rl/rows.py) and nothing is trained that was not sampled.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from renderers import ParsedResponse, Renderer

from envs.messages import Message
from rl.chat import Prompt, RendererChat, ToolSpecs
from rl.client import Completion, TokenClient
from rl.tokenizer import Tokenizer, load_renderer


@dataclass
class TokensChat(RendererChat):
    """The server renders; the renderer only parses."""

    client: TokenClient  # pyright: ignore[reportIncompatibleVariableOverride] it is set once

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Let the server render the opening messages."""
        return Prompt(messages, tools, await self.client.tokenize(messages, tools))

    async def follow(
        self,
        prompt: Prompt,
        done: Completion,  # noqa: ARG002 rendered anew, not extended
        message: Message,
        reply: list[Message],
    ) -> Prompt:
        """Let the server render the conversation anew."""
        messages = [*prompt.messages, message, *reply]
        return await self.open(messages, prompt.tools)


class PlainParser:
    """Reads a completion as text, for chat formats that `renderers` does not know.

    Tool calls and thinking stay in the text: an environment that wants them must read them there.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer(folder)
        path = folder / "generation_config.json"
        stops = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        stops = self._tokenizer.eos_token_id if stops is None else stops
        self._stops: list[int] = (
            stops if isinstance(stops, list) else [] if stops is None else [stops]
        )

    def get_stop_token_ids(self) -> list[int]:
        """Those of generation_config.json, else the tokenizer's end of text."""
        return list(self._stops)

    def parse_response(
        self,
        token_ids: list[int],
        **_: Any,
    ) -> ParsedResponse:
        """All of it as content, special tokens left out."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return ParsedResponse(content=text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a whole completion."""
        return [*self._tokenizer.encode(text), *self._stops[:1]]


def parser(folder: Path, name: str) -> Renderer:
    """Return what reads completions: the family's renderer, or text alone where none fits."""
    try:
        return load_renderer(folder, name)
    except ValueError:
        if name != "auto":  # the user named one
            raise
        return cast("Renderer", PlainParser(folder))
