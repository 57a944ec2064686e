"""Python functions as tools: the schema that the policy reads, and the answer to each of its calls.

    def search_pages(query: str, limit: int = 3) -> str:
        '''Find pages by title.

        Args:
            query: words of the title.
        '''

Signature and docstring are the schema. A parameter named `episode` is not part of it: it gets the
`Episode`, whose `memory` is the place for state between calls. A tool may be a coroutine function;
a plain one runs in a thread.

The policy's mistakes (a malformed call, a wrong name, arguments that do not fit, whatever the tool
raises as `ToolError`) are answered in a sentence that it can use. Any other exception is a fault of
the environment and costs the rollout.
"""

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from docstring_parser import parse as parse_docstring

from envs.messages import Message, parse_json, plain_json, well_formed
from envs.threads import call as call_function

if TYPE_CHECKING:
    from envs.episode import Episode

Function = Callable[..., Any]
EPISODE = "episode"  # the parameter that we supply


def unwrapped(function: Function) -> Function:
    """Return a function without the knobs that a configuration gave it."""
    return function.func if isinstance(function, partial) else function


def supplied(function: Function) -> dict[str, inspect.Parameter]:
    """Return the parameters before the `*`."""
    parameters = inspect.signature(unwrapped(function)).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


class ToolError(Exception):
    """Raised by a tool for what the policy did wrong; the policy reads the message."""


class Tool:
    """One function as a tool.

    Attributes:
        name: the function's.
        spec: `name`, `description` and `parameters` (JSON schema), as chat templates want it.

    Raises:
        ValueError: a parameter has no type, or one that JSON cannot carry.

    """

    def __init__(self, function: Function) -> None:
        self.name: str = function.__name__
        self._function = function
        parameters = inspect.signature(function).parameters
        self._wants_episode = EPISODE in parameters
        described = parse_docstring(inspect.getdoc(function) or "")
        notes = {p.arg_name: p.description for p in described.params if p.description}
        hints = typing.get_type_hints(function, include_extras=True)
        fields = [
            self._field(parameter, hints, notes)
            for parameter in parameters.values()
            if parameter.name != EPISODE
        ]
        self._arguments = msgspec.defstruct(
            self.name, fields, kw_only=True, forbid_unknown_fields=True
        )
        description = " ".join(
            filter(None, [described.short_description, described.long_description])
        )
        self.spec: dict[str, Any] = {
            "name": self.name,
            "description": " ".join(description.split()),
            "parameters": self._schema(),
        }

    def _field(
        self, parameter: inspect.Parameter, hints: dict[str, Any], notes: dict[str, str]
    ) -> tuple[Any, ...]:
        name = parameter.name
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"the tool {self.name} has a parameter {name!r} without a type: annotate it, for "
                "the policy is told the types"
            )
        kind = hints[name]
        if name in notes:
            kind = Annotated[kind, msgspec.Meta(description=notes[name])]
        if parameter.default is parameter.empty:
            return (name, kind)
        default = parameter.default
        if isinstance(default, list | dict | set):
            raise ValueError(f"the tool {self.name}: default of {name!r} is mutable, use None")
        return (name, kind, default)

    def _schema(self) -> dict[str, Any]:
        try:
            schema = msgspec.json.schema(self._arguments)
        except TypeError as error:
            raise ValueError(f"the tool {self.name}: {error}") from error
        definitions: dict[str, Any] = schema["$defs"]
        own = definitions.pop(self.name)
        del own["title"]
        return own | ({"$defs": definitions} if definitions else {})

    @property
    def usage(self) -> str:
        """How the policy should have called it: `search_pages(query: string, limit?: integer)`."""
        schema = self.spec["parameters"]
        required = schema.get("required", [])
        parts = [
            f"{name}{'' if name in required else '?'}: {_kind(kind)}"
            for name, kind in schema["properties"].items()
        ]
        return f"{self.name}({', '.join(parts)})"

    async def answer(self, arguments: Any, episode: "Episode") -> str:
        """Return what the tool says, as text; ToolError where the arguments do not fit."""
        try:
            # Not strict: many policies write "3" where a number is meant, and 3 is what they mean.
            known = msgspec.convert(arguments, self._arguments, strict=False)
        except msgspec.ValidationError as error:
            raise ToolError(f"{error}. Usage: {self.usage}") from error
        knobs = {name: getattr(known, name) for name in self._arguments.__struct_fields__}
        if self._wants_episode:
            knobs[EPISODE] = episode
        result = await call_function(self._function, **knobs)
        return (
            result
            if isinstance(result, str)
            else json.dumps(result, ensure_ascii=False, default=str)
        )


class Toolbox:
    """The tools of one environment.

    Attributes:
        specs: of all tools, in the order given.

    """

    def __init__(self, functions: Sequence[Function], timeout: float) -> None:
        """`timeout`: seconds that one call may take; the policy is told when it took longer."""
        self._tools = {tool.name: tool for tool in map(Tool, functions)}
        if len(self._tools) < len(functions):
            raise ValueError(f"two tools have the same name: {[f.__name__ for f in functions]}")
        self._timeout = timeout
        self.specs = [tool.spec for tool in self._tools.values()]

    async def answer(self, tool_call: Message, episode: "Episode") -> Message:
        """Return the `tool` message that answers one entry of a message's `tool_calls`."""
        try:
            content = await self._answer(tool_call, episode)
        except ToolError as error:
            episode.tool_errors += 1
            content = f"Error: {error}"
        episode.tool_calls += 1
        # A tool repeats what it was asked, or what the policy's own program printed.
        content = well_formed(content)
        return {"role": "tool", "tool_call_id": tool_call.get("id", ""), "content": content}

    async def _answer(self, tool_call: Message, episode: "Episode") -> str:
        if problem := tool_call.get("error"):
            raise ToolError(f"{problem}. {self._names}")
        name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            raise ToolError(f"there is no tool {name!r}. {self._names}")
        try:
            is_text = isinstance(arguments, str)
            arguments = parse_json(arguments or "{}") if is_text else plain_json(arguments)
        except ValueError as error:
            raise ToolError(f"the arguments are not JSON: {error}") from error
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                return await tool.answer(arguments, episode)
        except TimeoutError as error:
            if not deadline.expired():  # the tool's own
                raise
            raise ToolError(f"{tool.name} took longer than {self._timeout:g} s") from error

    @cached_property
    def _names(self) -> str:
        return f"Tools: {', '.join(tool.usage for tool in self._tools.values()) or 'none'}"


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema in a word or two."""
    if "enum" in schema:
        return " or ".join(json.dumps(option) for option in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    return schema.get("type", "any")
