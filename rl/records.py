"""The records that travel between the parts. Plain data: numpy arrays and builtins, no torch.

Letters: L tokens of a sequence, B sequences of a micro-batch, T its padded length, R rollouts of a
batch, K the most turns of any of them.
"""

from collections import abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from envs.episode import Example, StopReason
from envs.messages import Message

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Turns = abc.Sequence[float]  # one number for each turn of a rollout


@dataclass(frozen=True, eq=False)
class Sequence:
    """One training row: exactly the tokens vLLM saw and sampled, in order."""

    token_ids: Ints  # [L]
    completion_mask: Bools  # [L] True where the policy chose the token
    rollout_logprobs: Floats  # [L] vLLM's logprob at sampling; 0 outside the mask
    token_versions: Ints  # [L] policy version that sampled the token; -1 outside the mask
    turns: Ints  # [L] assistant turn of the episode, from 0, that the token is of; -1 outside
    # What a reference that sees hints gets in the place of all before the first completion token.
    hinted_prompt: Ints | None = None

    @property
    def num_completion(self) -> int:
        """Completion tokens of the row."""
        return int(self.completion_mask.sum())


@dataclass(frozen=True, eq=False)
class Rollout:
    """One attempt at an example."""

    sequences: tuple[Sequence, ...]  # one, unless a later turn's prompt did not extend the last
    messages: list[Message]  # the whole conversation as text
    reward: float | None  # None: unscorable (the environment failed, or returned NaN)
    rewards: dict[str, float]  # by name, unweighted, whole
    stop_reason: StopReason
    turns: int
    generation_time: float  # seconds spent waiting for the server
    error: str = ""  # what went wrong, one line
    tool_calls: int = 0
    tool_errors: int = 0  # calls answered with an error
    retries: int = 0  # earlier attempts that the environment broke
    blocked_time: float = 0.0  # seconds for which its environment's code held up all rollouts
    num_untracked_tokens: int = 0  # sampled by a remote server that counts them and gives no ids
    turn_limit: int | None = None  # tokens that one of its turns could have; None: nobody's limit
    turn_rewards: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Of the rewards that were given by turn: each turn's part, `turns` of them."""

    @property
    def num_completion(self) -> int:
        """Completion tokens of all its rows."""
        return sum(row.num_completion for row in self.sequences) + self.num_untracked_tokens

    @property
    def turn_lengths(self) -> list[int]:
        """Completion tokens of each turn, whichever of its rows they are in."""
        turns = [row.turns[row.completion_mask] for row in self.sequences]
        return np.bincount(np.concatenate([np.empty(0, np.int32), *turns])).tolist()


@dataclass(frozen=True)
class Credit:
    """What one rollout of a group is worth to the training."""

    reward: float | None  # after truncation and shaping; None: it stays out of the baseline
    advantages: tuple[float, ...]  # one for all of its tokens, or one for those of each turn
    trains: bool = True  # False: none of its tokens counts
    turn_rewards: tuple[float, ...] = ()  # `reward`, by the turn that earned it


@dataclass(frozen=True, eq=False)
class Group:
    """All rollouts of one example, and what each of them is worth."""

    index: int  # order in which groups were started, from 0
    example: Example
    version: int  # policy version when the group was started
    rollouts: tuple[Rollout, ...]
    credits: tuple[Credit, ...]  # one per rollout

    @property
    def rollout_ids(self) -> list[str]:
        """What the run's files know each rollout by."""
        return [f"{self.index:06d}.{i}" for i in range(len(self.rollouts))]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Sequences of one forward pass, padded on the right to T = the longest of them."""

    token_ids: Ints  # [B, T]
    completion_mask: Bools  # [B, T]
    rollout_logprobs: Floats  # [B, T]
    advantages: Floats  # [B, T]
    token_weights: Floats  # [B, T] weight of each completion token in the objective
    token_versions: Ints  # [B, T] -1 where nothing was sampled
    turns: Ints  # [B, T] likewise
    rollout_ids: Ints  # [B] position of the row's rollout in the batch; -1: not a row
    first_positions: Ints  # [B] completion tokens of the rollout's rows before this one
    row_numbers: Ints  # [B] place of the row among its rollout's, from 0
    envs: tuple[str, ...] = ()  # [B] environment that the row was played in; "": not a row
    # The same completion tokens after the prompts that a reference with hints sees, if it has any:
    hinted_token_ids: Ints | None = None  # [B, H]
    hinted_mask: Bools | None = None  # [B, H]


@dataclass(frozen=True, eq=False)
class RankBatch:
    """What one trainer rank gets for one step. R counts the rollouts of all ranks."""

    step: int
    micro_batches: tuple[MicroBatch, ...]  # every rank gets equally many
    # What advantages are made from, for a penalty that only the trainer knows.
    rewards: Floats = field(default_factory=lambda: np.empty(0, np.float32))  # [R] NaN: unscorable
    group_ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # [R] rising
    metrics: dict[str, float] = field(default_factory=dict)  # of the whole batch; rank 0 logs them
    # [R, K] `rewards` by the turn that earned them; NaN beyond a rollout's last turn.
    turn_rewards: Floats = field(default_factory=lambda: np.empty((0, 1), np.float32))
    # [R] completion tokens of each rollout that trains, 0 of the others.
    lengths: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    # [R] id of each rollout whose tokens are recorded, "" of the others; empty: nothing is.
    record_ids: tuple[str, ...] = ()


PlayGroup = Callable[[int, Example, int], Awaitable[tuple[Rollout, ...]]]
"""(group index, example, group size) -> its rollouts"""

Advantage = Callable[[abc.Sequence[float | None]], abc.Sequence[float]]
"""the rewards of one group, None where a rollout cannot be scored -> one number a rollout"""

TurnAdvantage = Callable[[abc.Sequence[Turns | None]], abc.Sequence[abc.Sequence[float]]]
"""the same by turn, of what its file marks PER_TURN -> one number a turn of each rollout"""
