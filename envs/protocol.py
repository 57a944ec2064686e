"""The base class of environments: examples, an optional reply to each turn, and a score.

    class Reverse(Environment):
        def examples(self, split): ...
        async def score(self, episode): return {"exact": float(episode.text == ...)}

A single-turn environment needs these two methods. An environment with tools sets `tools` and
`max_turns`. An environment that answers the policy in words overrides `reply`. A `reply` or `score`
that blocks must be a plain function, because plain functions run in a thread. If `reply` or
`score` raises, hangs in a thread or returns NaN, only its rollout fails, and the run continues.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, Protocol

from envs.episode import Episode, Example, Split
from envs.messages import Message
from envs.options import PositiveFloat, PositiveInt, read_system_prompt
from envs.stateful import Stateful
from envs.tools import Function, Toolbox


class ContextFull(Exception):
    """`speak` raises this if the conversation leaves no tokens for the policy's turn."""


@dataclass(frozen=True)
class PolicyTurn:
    """One turn of the policy, as `speak` returns it."""

    message: Message
    cut_off: bool  # whether a token limit ended the turn
    prompt_tokens: int
    completion_tokens: int


class Speak(Protocol):
    """The type of `speak`, which samples the policy's turns in one episode."""

    async def __call__(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        role: str = "",
        prefix: Sequence[int] | str | None = None,
        prefix_trains: bool = False,
    ) -> PolicyTurn:
        """Return the policy's next turn. Raise ContextFull if the prompt fills max_seq_len.

        The prompt consists of `messages` and the schemas `tools`. If the policy plays several roles
        in the episode, `role` names the role that takes this turn. The turn begins with `prefix`
        (tokens or text), which is trained only if `prefix_trains` is True.
        """
        ...

    async def logprobs(self, messages: list[Message], text: str, *, after: str = "") -> list[float]:
        """Return the policy's logprob of each token of `text`, in a turn that follows `messages`.

        The turn begins with the text `after`, such as reasoning, and goes on with `text`. vLLM
        computes the logprobs with its current policy at temperature 1. The tokens are not trained.
        """
        ...


@dataclass(frozen=True)
class Pool:
    """The examples of one environment, and the weight of the environment in a mixture."""

    weight: float
    examples: Sequence[Example]


class Environment(Stateful):
    """Base class of all environments. Constructors must be cheap; `examples` may load data.

    Attributes:
        name: name of the environment in metrics and rollout files.
        max_turns: number of assistant turns after which an episode ends.
        reward_weights: the reward of an episode is the sum of the rewards of `score`, each times
            its weight. A reward without a weight is only logged.
        tools: functions that the policy may call (envs/tools.py).
        tool_timeout: maximum seconds of one tool call.
        describe_tools: whether the prompt contains the tools' schemas. A policy that was trained
            with the tools may not need the schemas.
        max_concurrent: maximum number of parallel episodes; None: only the sampler's limit applies.
        system_prompt: replaces the environment's own system message; None: no change.
        sampling: sampler options for this environment alone: max_tokens, stop, rollout_timeout.
        holds_conversation: True if `play` controls the whole conversation. rl/sampling/player.py
            then calls `play` instead of `reply`, and ignores `max_turns`.
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
        max_turns: PositiveInt | None = None,
        tool_timeout: PositiveFloat | None = None,
        max_concurrent: PositiveInt | None = None,
    ) -> None:
        """Set the options common to all environments, except those that the constructor takes.

        YAML (`env.<option>`) or the command line (`+env.<option>=...`) gives the values. None
        keeps the current value. `system_prompt` is a text or a file (envs/options.py).
        Raise ValueError if a value is invalid.
        """
        # Read `tools` last, because reading them may load data.
        if (max_turns or 1) > 1 and type(self).reply is Environment.reply and not self.tools:
            raise ValueError(
                f"max_turns={max_turns}, but {type(self).__name__} has no tools and no reply(), so "
                "episodes have one turn: remove max_turns, or add tools or reply()"
            )
        if system_prompt is not None:
            self.system_prompt = read_system_prompt(system_prompt)
        limits = {"max_turns": max_turns, "tool_timeout": tool_timeout}
        for name, value in {**limits, "max_concurrent": max_concurrent}.items():
            if value is not None:
                setattr(self, name, value)

    def add_system_prompt(self, messages: Sequence[Message]) -> list[Message]:
        """Return an example's messages with `system_prompt` as the system message.

        If `system_prompt` is empty, return them without one. If it is None, return them unchanged.
        """
        if self.system_prompt is None:
            return list(messages)
        others = messages[1:] if messages and messages[0].get("role") == "system" else messages
        own = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*own, *others]

    def check_machine(self) -> None:
        """Raise ValueError if this machine cannot run the environment, or its data cannot be read.

        A run calls this method once at its start. The method must end every process that it starts.
        """

    def examples(self, split: Split) -> Sequence[Example]:
        """Return all examples of a split. Every run must get the same order.

        The environment may append to the sequence of the train split during the run. It must then
        also return the new examples in `state`, and append them again in `load`.
        """
        raise NotImplementedError

    def begin_version(self, version: int) -> None:
        """Prepare for `version` of the policy, which vLLM has loaded. The default does nothing."""

    async def reply(self, episode: Episode, message: Message) -> list[Message] | None:
        """Return the messages that answer the policy's `message`, or None to end the episode.

        The default returns the results of all tool calls in order, or None if the policy called
        no tool.
        """
        calls = message.get("tool_calls") or []
        return [await self.toolbox.answer(call, episode) for call in calls] or None

    async def play(self, episode: Episode, speak: Speak) -> None:
        """Control the whole conversation, if `holds_conversation` is True. `speak` samples a turn.

        `speak` updates the messages and turns of `episode`. Unless `play` sets the stop reason of
        `episode`, the stop reason of the last turn is used. With `speak(..., role=name)` each role
        has its own episode, rollout and reward. Advantages never compare two roles.
        """
        raise NotImplementedError

    async def score(self, episode: Episode) -> Mapping[str, float | Sequence[float]]:
        """Return name -> reward of a finished episode. NaN: the episode cannot be scored.

        A reward may also be a list of `episode.turns` numbers, one per turn of the policy. The list
        counts as its sum, but advantage=turn_group_mean uses the number of each turn.
        """
        raise NotImplementedError

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Return, for each finished episode of one group, a mapping name -> additional reward.

        Use this for rewards that compare episodes: a judge's ranking, a majority vote, diversity.
        The player first calls `score` and `close` for each episode, and omits failed episodes. If
        `score_group` raises, no rollout of the group has a reward. The default adds no rewards.
        """
        return [{} for _ in episodes]

    @property
    def scores_groups(self) -> bool:
        return type(self).score_group is not Environment.score_group

    def close(self, episode: Episode) -> None:
        """Release processes and files of an episode. The player calls this after every episode."""

    def demonstrations(
        self,
        rng: Random,  # noqa: ARG002 (overriding methods use it)
    ) -> Iterator[list[Message]]:
        """Yield expert conversations to imitate, endlessly. The default raises ValueError.

        Choose each conversation with `rng`, because every group calls this method again.
        """
        raise ValueError(
            f"the environment {self.name!r} has no scripted expert: give it a demonstrations() "
            "method, or set model.warm_start=null, or sampler=async"
        )

    def teacher_messages(
        self,
        example: Example,
        messages: list[Message],
        episode: Episode | None = None,  # noqa: ARG002 (overriding methods use it)
        group: Sequence[Episode] = (),  # noqa: ARG002
    ) -> list[Message]:
        """Return the prompt with the hint of an example.

        A reference model with `sees_hint` reads this prompt while the policy reads `messages`. The
        policy also reads this prompt if the strategy shows the hint (rl/sampling/strategy.py).

        `messages` are the example's messages, or the whole conversation if a chat template changed
        earlier turns. The default appends the example's hint to the last message of the example,
        and raises ValueError if the example has no hint.

        After the group was played, `episode` is the finished episode, and `group` has all episodes
        of the group that did not fail, with their `reward`. Before that, `episode` is None and
        `group` is empty, so the hint depends on the example alone.
        """
        hint = example.info.get("hint")
        if not isinstance(hint, str) or not hint.strip():
            raise ValueError(
                f"example {example.id} of env {self.name!r} has no hint for the reference model or "
                "the strategy: set its info['hint'] to a text, give the environment a "
                "teacher_messages() method, or set reference.sees_hint=false and "
                "strategy=independent"
            )
        last = max(min(len(self.add_system_prompt(example.messages)), len(messages)) - 1, 0)
        content = f"{messages[last].get('content') or ''}\n\n{hint}"
        return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]

    def environment_of(self, example: Example) -> "Environment":  # noqa: ARG002 (for mixtures)
        """Return the environment to which `example` belongs: this one, except in a mixture."""
        return self

    def pools(self, split: Split) -> list[Pool]:
        """Return the split's examples as one pool per environment. Only a mixture has several."""
        return [Pool(1.0, self.examples(split))]

    @property
    def is_multi_turn(self) -> bool:
        return self.max_turns > 1 or self.holds_conversation

    @cached_property
    def toolbox(self) -> Toolbox:
        return Toolbox(self.tools, self.tool_timeout)

    @property
    def tool_specs(self) -> list[dict[str, Any]] | None:
        """The tools' schemas for the prompt; None if the prompt does not contain them."""
        return (self.toolbox.specs or None) if self.describe_tools else None


def check_weights(weights: Mapping[str, float], scored: Sequence[str]) -> None:
    """Raise ValueError if a name in `weights` is not in `scored`, the names of all rewards."""
    if unknown := set(weights) - set(scored):
        raise ValueError(
            f"reward_weights contains {sorted(unknown)}, which this environment does not score: "
            f"choose from {', '.join(scored)}"
        )
