"""What an environment is: examples, an optional reply to every turn, and a score.

    class Reverse(Environment):
        def examples(self, split): ...
        async def score(self, episode): return {"exact": float(episode.text == ...)}

A single-turn environment needs those two. One with tools lists them in `tools` and raises
`max_turns`; one that answers the policy in words overrides `reply`. `reply` and `score` may be
plain functions where they block (they then run in a thread). Environment code may raise, hang or
return NaN: that costs the rollout, never the run.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from envs.episode import Episode, Example, Split
from envs.messages import Message
from envs.system_prompt import read_system_prompt, with_system_prompt
from envs.tools import Function, Toolbox


class ContextFull(Exception):
    """The conversation fills max_seq_len: the policy has no room to answer."""


@dataclass(frozen=True)
class Spoken:
    """One turn of the policy."""

    message: Message
    cut_off: bool  # by a token limit instead of by the policy
    prompt_tokens: int
    completion_tokens: int


Speak = Callable[[list[Message], list[dict[str, Any]] | None], Awaitable[Spoken]]
"""The policy's next turn after these messages, given these tools. May raise ContextFull."""


@dataclass(frozen=True)
class Pool:
    """Examples of one environment, and how often they are drawn."""

    weight: float
    examples: Sequence[Example]


class Environment:
    """Base of all environments. Constructors are cheap; `examples` may load data.

    Attributes:
        name: as it appears in metrics and rollout files.
        max_turns: assistant turns after which an episode ends.
        reward_weights: `reward` is the sum of these times the named rewards of `score`; a name
            that is not listed is logged and does not count.
        tools: functions that the policy may call (envs/tools.py).
        tool_timeout: seconds that one call of a tool may take.
        describe_tools: whether the prompt holds the tools' schemas. A policy that learned them by
            heart saves the tokens.
        max_concurrent: episodes of this environment at once; None: as many as the sampler allows.
        system_prompt: the first message, in the place of the environment's own; None: that one.
        sampling: what the sampler does otherwise here: max_tokens, stop, rollout_timeout; None:
            nothing.
        holds_conversation: whether it does so itself, in `play`; `reply` and `max_turns` are not
            looked at.

    """

    name: str = "environment"
    max_turns: int = 1
    reward_weights: Mapping[str, float]
    tools: Sequence[Function] = ()
    tool_timeout: float = 60.0
    describe_tools: bool = True
    max_concurrent: int | None = None
    system_prompt: str | None = None
    sampling: Mapping[str, Any] | None = None
    holds_conversation: bool = False

    def configure(
        self,
        *,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        tool_timeout: float | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        """Take the knobs that every environment has, unless its constructor has one of that name.

        They say how episodes are played: `env.<knob>` sets them, in YAML or as +env.<knob>=... .

        Args:
            system_prompt: a text, or a file that holds it (envs/system_prompt.py).
            max_turns: see above, as the others; None leaves them as the class says.
            tool_timeout: likewise.
            max_concurrent: likewise.

        Raises:
            ValueError: one of them cannot be that.

        """
        if system_prompt is not None:
            self.system_prompt = read_system_prompt(system_prompt)
        numbers = {"max_turns": max_turns, "max_concurrent": max_concurrent}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        if tool_timeout is not None and tool_timeout <= 0:
            raise ValueError(f"tool_timeout={tool_timeout:g}: more than 0 seconds")
        if max_turns is not None:
            if max_turns > 1 and type(self).reply is Environment.reply and not self.tools:
                raise ValueError(
                    f"max_turns={max_turns}, but nothing in {type(self).__name__} answers a turn: "
                    "leave it out, or give the environment tools or a reply()"
                )
            self.max_turns = max_turns
        if tool_timeout is not None:
            self.tool_timeout = tool_timeout
        if max_concurrent is not None:
            self.max_concurrent = max_concurrent

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """Return the first messages of an episode, or more of them, with `system_prompt`."""
        return with_system_prompt(messages, self.system_prompt)

    def check_machine(self) -> None:
        """Raise where this machine cannot play it: called once, before a run starts anything.

        Here: nothing to find out. A second at most, and nothing may be left running.
        """

    def examples(self, split: Split) -> Sequence[Example]:
        """All examples of a split, in an order that does not change between runs."""
        raise NotImplementedError

    async def reply(self, episode: Episode, message: Message) -> list[Message] | None:
        """The answer to the policy's `message`; None ends the episode.

        Here: the answer of each tool that it called, in order, and the end where it called none.
        """
        calls = message.get("tool_calls") or []
        return [await self.toolbox.answer(call, episode) for call in calls] or None

    async def play(self, episode: Episode, speak: Speak) -> None:
        """Hold the whole conversation (`holds_conversation`), asking for each turn by `speak`.

        Messages and turns of `episode` are kept up to date by `speak`. `stop_reason` may be set
        where something else than the policy's last turn ended the episode.
        """
        raise NotImplementedError

    async def score(self, episode: Episode) -> Mapping[str, float | Sequence[float]]:
        """Named rewards of a finished episode. NaN marks an episode that cannot be judged.

        Each is one number, or one for each of the policy's `episode.turns`, and then worth their
        sum: an advantage that looks at turns (advantage=turn_group_mean) learns which earned what.
        """
        raise NotImplementedError

    def close(self, episode: Episode) -> None:
        """Give back what the episode holds (a process, a file), however it ended. Cheap."""

    def demonstrations(
        self,
        rng: Random,  # noqa: ARG002 for those that override it
    ) -> Iterator[list[Message]]:
        """Endless whole conversations by a scripted expert, for warm starts (optional)."""
        raise ValueError(
            f"the environment {self.name!r} has no scripted expert: there is nothing to imitate; "
            "give it a demonstrations() method, or set model.warm_start=null, or another sampler"
        )

    def teacher_messages(self, example: Example, messages: list[Message]) -> list[Message]:
        """What a reference with `sees_hint` sees in the place of `messages`.

        They are those of a prompt: the opening, or where history was rewritten, all until then.
        Here: the last message of the opening with the example's hint below it.

        Raises:
            ValueError: the example has no hint.

        """
        hint = example.info.get("hint")
        if not isinstance(hint, str) or not hint.strip():
            raise ValueError(
                f"example {example.id} of env {self.name!r} has no hint, and the reference sees "
                "hints: put a text into its info['hint'], give the environment a "
                "teacher_messages() method, or set reference.sees_hint=false"
            )
        last = max(min(len(self.opened(example.messages)), len(messages)) - 1, 0)
        content = f"{messages[last].get('content') or ''}\n\n{hint}"
        return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]

    def environment_of(self, example: Example) -> "Environment":  # noqa: ARG002 for mixtures
        """The environment that plays this example: itself, but for a mixture."""
        return self

    def pools(self, split: Split) -> list[Pool]:
        """The examples of a split, by environment: one pool, but for a mixture."""
        return [Pool(1.0, self.examples(split))]

    @property
    def has_turns(self) -> bool:
        """Whether a conversation may have a second turn, so that history may be rewritten."""
        return self.max_turns > 1 or self.holds_conversation

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools, ready to be called."""
        return Toolbox(self.tools, self.tool_timeout)

    @property
    def tool_specs(self) -> list[dict[str, Any]] | None:
        """What the prompt says of the tools; None for nothing."""
        return (self.toolbox.specs or None) if self.describe_tools else None


def checked_weights(weights: Mapping[str, float], scored: Sequence[str]) -> dict[str, float]:
    """Return reward_weights; ValueError where they name a reward that `score` does not return."""
    if unknown := set(weights) - set(scored):
        raise ValueError(
            f"reward_weights names {sorted(unknown)}, which is not scored here: use "
            f"{' or '.join(scored)}"
        )
    return dict(weights)
