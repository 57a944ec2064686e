"""The records that processes exchange. They contain numpy arrays and builtin types, no tensors.

    sampling    turns -> TrainingRow -> Rollout -> Group
    rollouts    Group -> Credit -> WeightedRow (plan.py) -> MicroBatch -> RankBatch
    trainer     MicroBatch -> Batch, the input of a token loss (rl/learner/objective.py)

Letters: L = tokens of a row, B = rows of a micro-batch, T = padded length of a micro-batch's rows,
R = rollouts of a batch, K = largest number of turns of a rollout.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from envs.episode import Example, StopReason
from envs.messages import Message
from losses.groups import Source

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """The storage format of a quantity that has one value per token."""

    dtype: Any  # numpy dtype
    fill: float = 0  # value for padding and for tokens without a value of their own
    recorded_as: str = ""  # name of the column in tokens/*.parquet; "" if not recorded


@dataclass(frozen=True, eq=False)
class SampledColumns:
    """The token columns that the rollouts process fills while it samples.

    To add a column, add a field here and pass its values to `GrowingRow.extend`. Rows, padding,
    messages to the trainer and token files then include the column, because their code loops over
    these fields. A token loss receives the column if `losses.tokens.Tokens` has a field of the same
    name. The arrays are [L] in a row and [B, T] in a micro-batch.
    """

    token_ids: Annotated[Ints, Column(np.int32, recorded_as="token_ids")]
    # True at completion tokens, which the policy, or the expert of a demonstration, chose:
    completion_mask: Annotated[Bools, Column(np.bool_, recorded_as="mask")]
    # Logprob that vLLM computed when it sampled the token:
    rollout_logprobs: Annotated[Floats, Column(np.float32, recorded_as="mu")]
    # Version of the policy that sampled the token:
    token_versions: Annotated[Ints, Column(np.int32, fill=-1, recorded_as="version")]
    # Number of the assistant turn in the episode, from 0:
    turns: Annotated[Ints, Column(np.int32, fill=-1, recorded_as="turns")]


@dataclass(frozen=True, eq=False)
class PlannedColumns:
    """The token columns that rl/rollouts/plan.py adds to a row that is trained."""

    advantages: Annotated[Floats, Column(np.float32)]
    token_weights: Annotated[Floats, Column(np.float32)]  # weight of the token in the objective
    source: Annotated[NDArray[np.int8], Column(np.int8)]  # the `Source` of the token's rollout


def columns_of(record: type) -> dict[str, Column]:
    hints = get_type_hints(record, include_extras=True)
    return {name: h.__metadata__[0] for name, h in hints.items() if hasattr(h, "__metadata__")}


@dataclass(frozen=True, eq=False)
class TrainingRow(SampledColumns):
    """One row: exactly the tokens that vLLM read and sampled, or those of a demonstration."""

    hinted_prompt: Ints | None = None  # prompt with hints, for a reference model that uses hints
    # Tokens from which vLLM sampled each token, padded with -1; None if vLLM did not send them:
    kept: Ints | None = None  # [num_completion, largest number of such tokens]

    @property
    def length(self) -> int:
        """The number of tokens of the row, prompt included."""
        return len(self.token_ids)

    @property
    def num_completion(self) -> int:
        return int(self.completion_mask.sum())


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled episode of an example, with its reward."""

    rows: tuple[TrainingRow, ...]  # several if a turn's prompt changed the tokens of earlier turns
    messages: list[Message]  # the whole conversation, as text
    reward: float | None  # None if the episode failed or its reward is not finite
    rewards: dict[str, float]  # reward name -> unweighted value for the whole episode
    stop_reason: StopReason
    turns: int
    generation_time: float  # total seconds of the rollout's requests to the server
    error: str = ""  # one-line error message, "" without an error
    tool_calls: int = 0
    tool_errors: int = 0  # number of tool calls whose result was an error
    retries: int = 0  # number of earlier attempts that failed in the environment or in vLLM
    blocked_time: float = 0.0  # seconds in which the environment blocked all other rollouts
    num_untracked_tokens: int = 0  # number of sampled tokens if vLLM sent no token ids, else 0
    turn_limit: int | None = None  # maximum number of tokens of one turn, None if there is no limit
    source: Source = Source.POLICY
    # Reward name -> rewards that the environment gave per turn, one number for each of the `turns`.
    turn_rewards: dict[str, tuple[float, ...]] = field(default_factory=dict)
    role: str = ""  # role in the episode; an advantage compares only rollouts of the same role
    others: "tuple[Rollout, ...]" = ()  # rollouts of the episode's other roles; () in a Group

    @property
    def num_completion(self) -> int:
        """The number of completion tokens of all rows, plus `num_untracked_tokens`."""
        return sum(row.num_completion for row in self.rows) + self.num_untracked_tokens

    @property
    def turn_lengths(self) -> list[int]:
        """The number of completion tokens of each turn, summed over all rows."""
        turns = [row.turns[row.completion_mask] for row in self.rows]
        return np.bincount(np.concatenate([np.empty(0, np.int32), *turns])).tolist()


@dataclass(frozen=True)
class Credit:
    """The reward and the advantages with which one rollout is trained.

    The truncation function sets `reward`, `trains` and `is_zeroed`. rl/rollouts/credit.py then
    subtracts penalties from `reward` and sets the other fields.
    """

    reward: float | None  # after truncation and shaping; None excludes the rollout from baselines
    advantages: tuple[float, ...] = ()  # one for all tokens, or one per turn or token
    trains: bool = True  # whether tokens of the rollout are trained
    turn_rewards: tuple[float, ...] = ()  # `reward` divided among the turns
    # Numbers that are equal for all rollouts if the advantage function found no difference. None:
    # `reward`, or `advantages` if these are per turn. (): the function compares no rollouts.
    compared: tuple[float, ...] | None = None
    by_token: bool = False  # whether `advantages` has one number per completion token
    # Whether truncation set the reward to 0. If so, each named reward also counts as 0:
    is_zeroed: bool = field(default=False, compare=False)


@dataclass(frozen=True, eq=False)
class Group:
    """All rollouts of one example, and the credit of each rollout."""

    index: int  # number of the group, from 0 in starting order
    example: Example
    version: int  # policy version when the group started
    rollouts: tuple[Rollout, ...]
    credits: tuple[Credit, ...]  # one credit per rollout
    suffix: str = ""  # appended to the ids of replayed rollouts; "" for a new group

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def rollout_ids(self) -> list[str]:
        return [f"{self.index:06d}.{i}{self.suffix}" for i in range(len(self.rollouts))]


@dataclass(frozen=True, eq=False)
class MicroBatch(SampledColumns, PlannedColumns):
    """Rows of one forward pass, padded on the right to T, the length of the longest row."""

    rollout_ids: Ints  # [B] index of the row's rollout in the batch, -1 for an empty row
    group_ids: Ints  # [B] number that identifies the row's group and role, -1 for an empty row
    first_positions: Ints  # [B] number of completion tokens in the rollout's earlier rows
    row_numbers: Ints  # [B] index of the row among its rollout's rows, from 0
    envs: tuple[str, ...] = ()  # [B] name of the row's environment, "" for an empty row
    # The rows with hinted prompts, padded to H tokens, for a reference model that uses hints:
    hinted_token_ids: Ints | None = None  # [B, H]
    hinted_mask: Bools | None = None  # [B, H]
    kept: Ints | None = None  # `kept` of all rows, concatenated


@dataclass(frozen=True, eq=False)
class RankBatch:
    """The micro-batches of one trainer rank for one step. R counts the rollouts of all ranks."""

    step: int
    micro_batches: tuple[MicroBatch, ...]  # every rank has equally many micro-batches
    # [R] reward of each rollout, or NaN if it has none. A critic and kl.place=reward read them.
    rewards: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    # [R] number that identifies the rollout's group and role
    group_ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    metrics: dict[str, float] = field(default_factory=dict)  # batch metrics, which rank 0 logs
    # [R, K] `rewards` divided among the turns; NaN after a rollout's last turn
    turn_rewards: Floats = field(default_factory=lambda: np.empty((0, 1), np.float32))
    # [R] number of completion tokens of each trained rollout, 0 for the other rollouts
    lengths: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    # [R] policy version when the rollout's group started
    versions: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    record_ids: tuple[str, ...] = ()  # [R] rollout id, "" if not recorded; () if none is recorded
