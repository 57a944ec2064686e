"""Turn Python functions into tools: build their schemas and answer the policy's calls.

    def search_pages(query: str, limit: int = 3) -> str:
        '''Find pages by title.

        Args:
            query: words of the title.
        '''

The signature and the docstring become the schema. A parameter named `episode` is not in the schema.
It receives the `Episode`, whose `memory` keeps state between calls. A tool may be a coroutine
function. A plain function runs in a thread.

After a mistake of the policy (a malformed call, a wrong name, wrong arguments, a `ToolError`) or a
timeout, the answer is an error message for the policy. Any other exception of the tool is an error
of the environment, and the rollout fails.
"""

import inspect
import json
import typing
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from docstring_parser import parse as parse_docstring

from envs.deadline import Deadline
from envs.messages import Message, clean_json, parse_json, replace_surrogates
from envs.threads import call as call_function

if TYPE_CHECKING:
    from envs.episode import Episode

Function = Callable[..., Any]
EPISODE = "episode"  # name of the parameter that receives the Episode


def unwrap(function: Function) -> Function:
    """Return the function that a `partial` wraps. Return any other function unchanged."""
    return function.func if isinstance(function, partial) else function


def call_parameters(function: Function) -> dict[str, inspect.Parameter]:
    """Return the parameters before the `*`, which callers pass. YAML sets those after the `*`."""
    parameters = inspect.signature(unwrap(function)).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


class ToolError(Exception):
    """The error by which a tool reports a mistake of the policy. The policy reads the message."""


class Tool:
    """A function that the policy can call. `spec` describes the function for chat templates."""

    def __init__(self, function: Function) -> None:
        """Build the schema. Raise ValueError if a parameter has no type with a JSON schema."""
        self.name: str = function.__name__
        self._function = function
        parameters = inspect.signature(function).parameters
        self._wants_episode = EPISODE in parameters
        described = parse_docstring(inspect.getdoc(function) or "")
        notes = {p.arg_name: p.description for p in described.params if p.description}
        self._hints = typing.get_type_hints(function, include_extras=True)
        fields = [
            self._struct_field(parameter, notes)
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

    def _struct_field(self, parameter: inspect.Parameter, notes: dict[str, str]) -> tuple[Any, ...]:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"the tool {self.name} has the parameter {str(parameter).partition(':')[0]}: use a "
                "list or named parameters, because the policy passes every argument by its name"
            )
        if name not in self._hints:
            raise ValueError(
                f"the tool {self.name} has a parameter {name!r} without a type: "
                "annotate it, because the policy reads the types"
            )
        kind = self._hints[name]
        if name in notes:
            kind = Annotated[kind, msgspec.Meta(description=notes[name])]
        if parameter.default is parameter.empty:
            return (name, kind)
        default = parameter.default
        if isinstance(default, list | dict | set):
            raise ValueError(f"the tool {self.name}: the default of {name!r} is mutable: use None")
        return (name, kind, default)

    def _schema(self) -> dict[str, Any]:
        try:
            schema = msgspec.json.schema(self._arguments)
        except TypeError as error:
            raise ValueError(
                f"the tool {self.usage} has a parameter whose type has no JSON schema: use str, "
                "int, float, bool, list, dict, Literal or a dataclass"
            ) from error
        definitions: dict[str, Any] = schema["$defs"]
        arguments = definitions.pop(self.name)
        del arguments["title"]
        return arguments | ({"$defs": definitions} if definitions else {})

    @property
    def usage(self) -> str:
        """The signature for error messages, such as `search(query: str, limit: int = 3)`."""
        signature = inspect.signature(self._function)
        parameters = [
            parameter.replace(annotation=self._hints[name])
            for name, parameter in signature.parameters.items()
            if name != EPISODE
        ]
        return f"{self.name}{inspect.Signature(parameters)}"

    async def answer(self, arguments: Any, episode: "Episode") -> str:
        """Call the tool and return its result as text. Raise ToolError for invalid arguments."""
        try:
            # Many policies write "3" for the number 3, which strict=False accepts.
            parsed = msgspec.convert(arguments, self._arguments, strict=False)
        except msgspec.ValidationError as error:
            raise ToolError(f"{error}. Usage: {self.usage}") from error
        values = {name: getattr(parsed, name) for name in self._arguments.__struct_fields__}
        if self._wants_episode:
            values[EPISODE] = episode
        result = await call_function(self._function, **values)
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)


class Toolbox:
    """The tools of one environment. `specs` lists the schemas in the order of `functions`."""

    def __init__(self, functions: Sequence[Function], timeout: float) -> None:
        self._tools = {tool.name: tool for tool in map(Tool, functions)}
        if len(self._tools) < len(functions):
            names = [function.__name__ for function in functions]
            raise ValueError(f"two tools have the same name: rename one of {names}")
        self._timeout = timeout
        self.specs = [tool.spec for tool in self._tools.values()]

    async def answer(self, tool_call: Message, episode: "Episode") -> Message:
        """Run the tool that `tool_call` names. Return the answer as a `tool` message."""
        try:
            content = await self._run_tool(tool_call, episode)
        except ToolError as error:
            episode.tool_errors += 1
            content = f"Error: {error}"
        episode.tool_calls += 1
        # The result may repeat text of the policy, which can contain lone surrogates.
        content = replace_surrogates(content)
        return {"role": "tool", "tool_call_id": tool_call.get("id", ""), "content": content}

    async def _run_tool(self, tool_call: Message, episode: "Episode") -> str:
        if problem := tool_call.get("error"):
            raise ToolError(f"{problem}. {self._list_of_tools}")
        name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            shown = repr(name) if isinstance(name, str) else f"with a {type(name).__name__} as name"
            raise ToolError(f"there is no tool {shown}. {self._list_of_tools}")
        try:
            is_text = isinstance(arguments, str)
            arguments = parse_json(arguments or "{}") if is_text else clean_json(arguments)
        except ValueError as error:
            raise ToolError(f"the arguments are not JSON: {error}") from error
        deadline = Deadline(self._timeout)
        try:
            async with deadline.run():
                return await tool.answer(arguments, episode)
        except TimeoutError as error:
            if not deadline.expired:  # The tool itself raised TimeoutError.
                raise
            raise ToolError(f"{tool.name} took longer than {self._timeout:g} s") from error

    @cached_property
    def _list_of_tools(self) -> str:
        return f"Tools: {', '.join(tool.usage for tool in self._tools.values()) or 'none'}"
