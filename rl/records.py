"""The records that processes exchange. Plain data: numpy arrays and builtins, no torch.

    sampling    turns -> TrainingRow -> Rollout -> Group
    rollouts    Group -> Credit -> WeightedRow (plan.py) -> MicroBatch -> RankBatch
    trainer     MicroBatch -> Batch, which is what a token loss sees (rl/learner/objective.py)

Letters: L tokens of a row, B rows of a micro-batch, T its padded length, R rollouts of a batch,
K the largest number of turns of a rollout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, get_type_hints

import numpy as np
from numpy.typing import NDArray

from envs.episode import Example, StopReason
from envs.messages import Message

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """How a quantity with one number per token is stored."""

    dtype: Any  # of numpy
    fill: float = 0  # for tokens that the policy did not choose, and for padding
    recorded_as: str = ""  # its column in the token record; "": not recorded


@dataclass(frozen=True, eq=False)
class SampledColumns:
    """The table of token columns, part one: what the rollouts process knows of a sampled token.

    A new column is one line here and the value that its producer passes to `GrowingRow.extend`.
    Rows, padding, messages to the trainer and the token record are loops over this table. A token
    loss sees the column if `losses.tokens.Tokens` has a field of the same name. The arrays are [L]
    in a row and [B, T] in a micro-batch.
    """

    token_ids: Annotated[Ints, Column(np.int32, recorded_as="token_ids")]
    # True where the policy chose the token:
    completion_mask: Annotated[Bools, Column(np.bool_, recorded_as="mask")]
    # vLLM's logprob at sampling:
    rollout_logprobs: Annotated[Floats, Column(np.float32, recorded_as="mu")]
    # Policy version that sampled the token:
    token_versions: Annotated[Ints, Column(np.int32, fill=-1, recorded_as="version")]
    # Assistant turn of the episode, from 0:
    turns: Annotated[Ints, Column(np.int32, fill=-1, recorded_as="turns")]


@dataclass(frozen=True, eq=False)
class PlannedColumns:
    """The table of token columns, part two: what rl/rollouts/plan.py adds to a row that trains."""

    advantages: Annotated[Floats, Column(np.float32)]
    token_weights: Annotated[Floats, Column(np.float32)]  # of the token in the objective


def columns_of(record: type) -> dict[str, Column]:
    """Return the token columns of a record class by field name."""
    hints = get_type_hints(record, include_extras=True)
    return {name: h.__metadata__[0] for name, h in hints.items() if hasattr(h, "__metadata__")}


@dataclass(frozen=True, eq=False)
class TrainingRow(SampledColumns):
    """One training row: exactly the tokens that vLLM saw and sampled, in order."""

    hinted_prompt: Ints | None = None  # what a reference with hints reads instead of the prompt

    @property
    def num_completion(self) -> int:
        """Completion tokens of the row."""
        return int(self.completion_mask.sum())


@dataclass(frozen=True, eq=False)
class Rollout:
    """One attempt at an example."""

    rows: tuple[TrainingRow, ...]  # more than one if a later prompt did not extend the last turn
    messages: list[Message]  # the whole conversation as text
    reward: float | None  # None: unscorable (the environment failed, or returned NaN)
    rewards: dict[str, float]  # by name, unweighted, of the whole episode
    stop_reason: StopReason
    turns: int
    generation_time: float  # seconds that the server worked on it
    error: str = ""  # what went wrong, one line
    tool_calls: int = 0
    tool_errors: int = 0  # tool calls answered with an error
    retries: int = 0  # earlier attempts that the environment broke
    blocked_time: float = 0.0  # seconds for which its environment's code blocked all rollouts
    num_untracked_tokens: int = 0  # sampled by a remote server, which returns no token ids
    turn_limit: int | None = None  # token limit of one turn; None: no limit is known
    # Rewards that the environment gave by turn: one number for each of the `turns`.
    turn_rewards: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def num_completion(self) -> int:
        """Completion tokens of all its rows."""
        return sum(row.num_completion for row in self.rows) + self.num_untracked_tokens

    @property
    def turn_lengths(self) -> list[int]:
        """Completion tokens of each turn, over all rows."""
        turns = [row.turns[row.completion_mask] for row in self.rows]
        return np.bincount(np.concatenate([np.empty(0, np.int32), *turns])).tolist()


@dataclass(frozen=True)
class Credit:
    """What one rollout of a group contributes to the training.

    Truncation returns it with the reward alone; rl/rollouts/credit.py adds the rest.
    """

    reward: float | None  # after truncation and shaping; None: not compared with the group
    advantages: tuple[float, ...] = ()  # one for all of its tokens, or one per turn
    trains: bool = True  # False: no token of the rollout counts
    turn_rewards: tuple[float, ...] = ()  # `reward`, split into what each turn earned


@dataclass(frozen=True, eq=False)
class Group:
    """All rollouts of one example, and the credit of each."""

    index: int  # groups are numbered from 0 in the order in which they start
    example: Example
    version: int  # policy version when the group started
    rollouts: tuple[Rollout, ...]
    credits: tuple[Credit, ...]  # one per rollout

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that could be scored."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def rollout_ids(self) -> list[str]:
        """The id of each rollout in the run's files."""
        return [f"{self.index:06d}.{i}" for i in range(len(self.rollouts))]


@dataclass(frozen=True, eq=False)
class MicroBatch(SampledColumns, PlannedColumns):
    """Rows of one forward pass, padded on the right to T = the longest of them."""

    rollout_ids: Ints  # [B] position of the row's rollout in the batch; -1: the row is empty
    first_positions: Ints  # [B] completion tokens of the rollout's rows before this one
    row_numbers: Ints  # [B] position of the row among the rows of its rollout, from 0
    envs: tuple[str, ...] = ()  # [B] environment that the row was played in; "": the row is empty
    # The same completion tokens after the prompts that a reference with hints sees, if it has any:
    hinted_token_ids: Ints | None = None  # [B, H]
    hinted_mask: Bools | None = None  # [B, H]


@dataclass(frozen=True, eq=False)
class RankBatch:
    """What one trainer rank receives for one step. R counts the rollouts of all ranks."""

    step: int
    micro_batches: tuple[MicroBatch, ...]  # every rank receives the same number
    # [R] for a critic, and for a penalty in the reward; NaN: unscorable
    rewards: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    group_ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # [R] increasing
    metrics: dict[str, float] = field(default_factory=dict)  # of the whole batch; rank 0 logs them
    # [R, K] `rewards`, split into what each turn earned; NaN after a rollout's last turn
    turn_rewards: Floats = field(default_factory=lambda: np.empty((0, 1), np.float32))
    # [R] completion tokens of each rollout that trains, 0 for the others
    lengths: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    record_ids: tuple[str, ...] = ()  # [R] of recorded rollouts, "" for others; empty: no record


class PlayGroup(Protocol):
    """Plays one group."""

    async def __call__(self, index: int, example: Example, group_size: int) -> tuple[Rollout, ...]:
        """Return `group_size` rollouts of `example`; `index` numbers the group."""
        ...


Advantage = Callable[[Sequence[float | None]], Sequence[float]]
"""rewards of one group's rollouts, None where unscorable -> one number for each rollout"""

TurnAdvantage = Callable[[Sequence[Sequence[float] | None]], Sequence[Sequence[float]]]
"""the same by turn, for an advantage that takes turns -> a number for each turn of each"""
