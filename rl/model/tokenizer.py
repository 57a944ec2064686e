"""Load the tokenizer and the renderer of a model folder, without torch or transformers.

A renderer (library `renderers`) converts messages to tokens and parses completions. It gets
our own `Tokenizer`, because transformers would import torch, which takes five seconds.

Without model.renderer_options a renderer keeps its family's default for thinking. For Qwen3 this is
enable_thinking=True. With False, every prompt would end with an empty think block, but the tiny
model and Qwen3-4B-Instruct-2507 were not trained on such a block.
"""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import tokenizers
from jinja2 import Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from renderers import (
    ParsedResponse,
    Qwen3RendererConfig,
    Renderer,
    config_from_name,
    create_renderer,
)
from renderers.base import MODEL_RENDERER_MAP

Options = Mapping[str, Any]
# model.renderer is `auto` or one of these model families of the library `renderers`.
RENDERERS = tuple(sorted(set(MODEL_RENDERER_MAP.values())))
_CHOICES = ", ".join(RENDERERS)
_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation\b")

# This maps model_type of config.json to a renderer if `renderers` does not know a model's name.
# glm4_moe and deepseek_v3 are missing, because each has several formats. Users must choose one.
FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "gpt_oss": "gpt-oss"}


class Tokenizer:
    """The tokenizer in tokenizer.json, with the methods that `renderers.Tokenizer` requires."""

    def __init__(self, folder: Path) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises no narrower type
            raise ValueError(
                f"{folder}/tokenizer.json cannot be read ({error}): download it again"
            ) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        self.name_or_path = hub_name(folder) or str(folder)
        self.eos_token_id, self.pad_token_id, self.unk_token_id = (
            self._special_token_id(config.get(key))
            for key in ("eos_token", "pad_token", "unk_token")
        )

    def encode_special_tokens_as_text(self, as_text: bool = True) -> None:
        """If `as_text`, make `encode` treat special tokens such as `<|im_end|>` as plain text."""
        self._inner.encode_special_tokens = as_text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            token_id = self._inner.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def _special_token_id(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self._inner.token_to_id(text) if isinstance(text, str) else None


def load_renderer(
    folder: Path,
    name: str,
    options: Options | None = None,
    *,
    keep_thinking: bool = False,
    skip_unknown: bool = False,
) -> Renderer:
    """Return the renderer `name` (a value of RENDERERS, or "auto") for the model in `folder`.

    If `skip_unknown`, ignore unknown options. If `keep_thinking`, keep the thinking of earlier
    turns, even if the model's template drops it. Raise ValueError if no renderer fits the model.
    """
    tokenizer = Tokenizer(folder)
    if name == "auto":
        name = _find_renderer(folder, tokenizer)
    elif name not in RENDERERS:
        close = get_close_matches(name, RENDERERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"model.renderer={name} does not exist: {hint}choose auto, {_CHOICES}")
    config: Any = config_from_name(name)
    fields, given = type(config).model_fields, dict(options or {})
    if skip_unknown:
        given = {key: value for key, value in given.items() if key in fields}
    try:
        config = type(config)(**{**config.model_dump(exclude_unset=True), **given})
    except ValueError as error:
        raise ValueError(
            f"model.renderer_options={given} does not fit the renderer {name}, which has the "
            f"options {', '.join(sorted(fields.keys() - {'name'}))}: {error}"
        ) from error
    never_drops = name == "qwen3" and "<think>" not in (chat_template(folder) or "<think>")
    if keep_thinking or never_drops:
        # If thinking is kept, later prompts contain all sampled tokens, so a rollout stays one row.
        config = config.model_copy(update={"thinking_retention": "all"})
    try:
        renderer = create_renderer(tokenizer, config)
    except AssertionError as error:  # the tokenizer lacks a special token of the renderer
        raise ValueError(
            f"model.renderer={name} does not fit the tokenizer in {folder} ({error}): set "
            f"model.renderer to the family of the model: {_CHOICES}"
        ) from error
    _encode_messages_as_text(renderer, tokenizer)
    return renderer


# This test conversation has every element of a chat format, but no special token in a message.
_CONVERSATION: Any = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "How much is 2 + 3?"},
    {
        "role": "assistant",
        "content": "Wait.",
        "reasoning_content": "Add.",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "5"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Thanks."},
]
_TOOLS: Any = [{"name": "f", "description": "Adds.", "parameters": {"type": "object"}}]


def _encode_messages_as_text(renderer: Renderer, tokenizer: Tokenizer) -> None:
    """Make the renderer encode messages as plain text, so that <|im_end|> in them ends no turn.

    Change nothing if the renderer's own special tokens would become plain text, too.
    """

    def render_all() -> list[list[int]] | None:
        try:
            return [
                renderer.render_ids(
                    _CONVERSATION[:end], tools=tools, add_generation_prompt=end != 5
                )
                for end in (2, 4, 5, 6)
                for tools in (None, _TOOLS)
            ]
        except Exception:  # noqa: BLE001 the format has no tools or system messages
            return None

    before = render_all()
    tokenizer.encode_special_tokens_as_text()
    if before is None or render_all() != before:
        tokenizer.encode_special_tokens_as_text(False)


def decode_text(renderer: Renderer, token_ids: Sequence[int]) -> str:
    """Return the text of `token_ids` without special tokens, for turns that cannot be parsed."""
    tokenizer: Tokenizer = cast("Any", renderer)._tokenizer  # every renderer has this attribute
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def hub_name(folder: Path) -> str | None:
    """Return the model's hub name, from its path in the hub's cache or config.json, or None."""
    for part in reversed(folder.parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    remembered = _read_json(folder / "config.json").get("_name_or_path")
    return remembered if remembered in MODEL_RENDERER_MAP else None


def chat_template(folder: Path) -> str | None:
    """Return the Jinja chat template in chat_template.jinja or tokenizer_config.json, or None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # in old folders
        template = next((one["template"] for one in template if one["name"] == "default"), None)
    return template if isinstance(template, str) else None


def parse_template(text: str | None) -> Template:
    """Parse a chat template. Raise ValueError if it is missing (None) or has an error."""
    if text is None:
        raise ValueError("the model has no chat template: add chat_template.jinja to its folder")
    # The options are those of transformers, which also defines the tag `generation`.
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    text = _GENERATION_TAG.sub(lambda m: m[1] + ("endif" if m[2] else "if true"), text)
    try:
        return jinja.from_string(text)
    except TemplateSyntaxError as error:
        why = f"{error.message}, line {error.lineno}"
        raise ValueError(f"the model's chat template has an error ({why}): correct it") from error


def _find_renderer(folder: Path, tokenizer: Tokenizer) -> str:
    if tokenizer.name_or_path in MODEL_RENDERER_MAP:
        return MODEL_RENDERER_MAP[tokenizer.name_or_path]
    model_type = _read_json(folder / "config.json").get("model_type")
    family, but = FAMILIES.get(str(model_type)), ""
    # Qwen3-Coder and some fine-tunes share Qwen3's model_type, but have another format.
    template = chat_template(folder)
    if family == "qwen3" and template and not _is_qwen3_format(template, tokenizer):
        family, but = None, ", but its chat template differs from Qwen3's"
    if family is None:
        raise ValueError(
            f"model.renderer=auto does not know the chat format of {tokenizer.name_or_path} "
            f"(model_type {model_type!r}{but}): use client=tokens, which takes the model's own "
            "chat template but no demonstrations, or set model.renderer to the family of the "
            f"model: {_CHOICES}"
        )
    return family


def _is_qwen3_format(template: str, tokenizer: Tokenizer) -> bool:
    """Return whether a chat template and Qwen3's renderer give the same text after a question."""
    messages: Any = [{**message, "reasoning_content": ""} for message in _CONVERSATION[1:]]
    messages = messages if "tool_calls" in template else [messages[0], *messages[3:]]
    renderer = Qwen3RendererConfig()
    try:
        ids = create_renderer(tokenizer, renderer).render_ids(messages, add_generation_prompt=True)
        text = parse_template(template).render(messages=messages, add_generation_prompt=True)
    except Exception:  # noqa: BLE001 special tokens are missing, or the format has no tools
        return False
    question = messages[0]["content"]
    return text.partition(question)[2] == tokenizer.decode(ids).partition(question)[2]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


class PlainParser:
    """The parser of models without a renderer. Tool calls and thinking stay in the text."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer(folder)
        stops = _read_json(folder / "generation_config.json").get("eos_token_id")
        stops = self._tokenizer.eos_token_id if stops is None else stops
        given = stops if isinstance(stops, list) else [] if stops is None else [stops]
        # Leave out ids without a token, because no completion ends with them.
        self._stops: list[int] = [stop for stop in given if self._tokenizer.decode([stop])]
        if given and not self._stops:
            raise ValueError(
                f"the tokenizer in {folder} has no token with an id in {given}, so no completion "
                "would end: correct eos_token_id in generation_config.json"
            )

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        return ParsedResponse(content=self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode_completion(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text), *self._stops[:1]]


def load_parser(folder: Path, name: str, options: Options | None = None) -> Renderer:
    """Return the renderer `name`, or a PlainParser if `name` is auto and load_renderer fails."""
    try:
        return load_renderer(folder, name, options, skip_unknown=True)
    except ValueError:
        if name != "auto":  # the user chose a renderer
            raise
        return cast("Renderer", PlainParser(folder))
