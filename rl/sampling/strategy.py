"""The interface of strategies, which decide how the rollouts of a group are made."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from envs.episode import Example
from envs.stateful import Stateful
from rl.records import Rollout
from rl.sampling.prefix import Given


@dataclass(frozen=True)
class StartedGroup:
    """The group that a strategy plays."""

    index: int  # number of the group, from 0 in starting order
    example: Example


class PlayOne(Protocol):
    """A callable that plays an example once. Each call is one attempt of the group."""

    async def __call__(
        self,
        example: Example,
        *,
        seed: int,
        prefix: Given | None = None,
        prefix_trains: bool = False,
        hint: str | None = None,
    ) -> Rollout:
        """Play an attempt, with retries after errors. If the errors persist, `reward` is None.

        Args:
            example: the group's example, or another example of the same environment.
            seed: the number of the attempt in the group, which no other attempt may have.
            prefix: first tokens of the attempt, as a Prefix (`prefix_of`), a list or a text.
            prefix_trains: whether the prefix is trained.
            hint: "" shows the example's info["hint"], another text replaces it, None shows none.
                With a hint, sampling and training use the prompt of `env.teacher_messages`.
        """
        ...


class Strategy(Stateful):
    """Base class of strategies. A strategy's constructor takes its YAML options as keywords.

    A strategy that remembers groups defines `state` and `load`, whose JSON is in each checkpoint.

    Attributes:
        reads_rewards: whether `play` reads rewards. The player then refuses envs with score_group.
        fixed_size: whether `play` always returns either `size` rollouts or none.
        needs_hints: whether every example needs a hint.
        begins_turns: whether `play` passes a `prefix`. rl/config then requires sampler.stop=[].
        samples: whether `play` needs attempts that the policy samples, not demonstrations.
    """

    reads_rewards: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True
    needs_hints: ClassVar[bool] = False
    begins_turns: ClassVar[bool] = False
    samples: ClassVar[bool] = True

    def num_first(self, size: int) -> int:
        """Return how many attempts `play` starts first: seeds from 0 on, without prefix or hint."""
        return size

    async def play(self, group: StartedGroup, play_one: PlayOne, size: int) -> Sequence[Rollout]:
        """Return the rollouts of a group. `size`: group_size. The buffer rejects an empty group."""
        raise NotImplementedError


class Independent(Strategy):
    """Play `size` independent attempts."""

    samples: ClassVar[bool] = False

    async def play(self, group: StartedGroup, play_one: PlayOne, size: int) -> Sequence[Rollout]:
        return await play_attempts(group, play_one, range(size))


async def play_attempts(
    group: StartedGroup, play_one: PlayOne, seeds: Iterable[int], **options: Any
) -> list[Rollout]:
    """Play an attempt for each seed, concurrently. `options`: further arguments of `play_one`."""
    return await asyncio.gather(*(play_one(group.example, seed=s, **options) for s in seeds))


async def play_strategy(
    strategy: Strategy, group: StartedGroup, play_one: PlayOne, size: int
) -> tuple[Rollout, ...]:
    """Return a strategy's rollouts. Raise ValueError if their number is wrong or a seed repeats."""
    name, seeds = type(strategy).__name__, set[int]()

    async def play_new_seed(example: Example, *, seed: int, **options: Any) -> Rollout:
        if seed in seeds:
            raise ValueError(f"{name} plays two attempts with seed={seed}: use another seed")
        seeds.add(seed)
        return await play_one(example, seed=seed, **options)

    rollouts = tuple(await strategy.play(group, play_new_seed, size))
    if rollouts and strategy.fixed_size and len(rollouts) != size:
        raise ValueError(
            f"{name} returned {len(rollouts)} rollouts for group_size={size}: return {size} or "
            "none, or set fixed_size = False"
        )
    return rollouts
