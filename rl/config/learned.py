"""Facts about a run's components, found by calling them with made-up values (rl/dry_call).

The supervisor writes the facts into config.yaml, so that no other process repeats the calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.config.schema import Run

RATIO = {"rollout_logprobs", "old_logprobs"}
CANDIDATES = {"candidate_logprobs", "ref_candidate_logprobs"}
REFERENCE = {"ref_logprobs"} | CANDIDATES


@dataclass(frozen=True, kw_only=True)
class Learned:
    loss_reads: Sequence[str]  # names of the fields of losses.tokens.Tokens that the loss reads
    loss_weighs_sequences: bool  # whether the loss needs equal weights of sequences (PER_SEQUENCE)
    loss_corrects: bool  # whether the loss corrects for the difference between trainer and vLLM
    correction_is_neutral: bool  # whether the correction leaves every weight at 1
    divergence_is_linear: bool  # whether kl.estimator has the same gradient for every token
    advantage_by_turn: bool  # whether the advantage returns one number per turn
    advantage_by_token: bool  # whether the advantage returns one number per completion token
    advantage_is_reward: bool  # whether the advantage returns the rewards unchanged
    advantage_compares: bool  # whether a rollout that is alone in its group always gets advantage 0
    advantage_refuses_negative: bool
    batch_credit_is_neutral: bool  # whether the batch credit leaves all advantages unchanged
    aggregation_takes_turns: bool  # whether the aggregation gets token counts by turn
    aggregation_weighs_sequences: bool  # whether the aggregation gives all rollouts equal weight
    truncation_lowers_rewards: bool  # whether the truncation can make a reward negative
    selects_examples: bool = False  # whether rewards may choose examples or rollouts

    @staticmethod
    def of(run: Run) -> "Learned":
        return Learned(**run.learned)

    def reads(self, fields: set[str]) -> bool:
        return not fields.isdisjoint(self.loss_reads)

    @property
    def reads_advantages(self) -> bool:
        return self.reads({"advantages"})

    @property
    def uses_ratio(self) -> bool:
        return self.reads(RATIO)

    @property
    def reads_candidates(self) -> bool:
        return self.reads(CANDIDATES)

    @property
    def takes_any_text(self) -> bool:
        """Whether the loss accepts text that no policy sampled."""
        return not self.reads({"advantages", "ref_logprobs"} | RATIO)

    @property
    def is_supervised(self) -> bool:
        return self.takes_any_text and not self.reads_candidates
