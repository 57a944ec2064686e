"""What the dry call learned about the callables of a run (rl/dry_call/learn.py).

The supervisor writes it into config.yaml, so that no other process has to find it out again.
"""

from dataclasses import dataclass
from typing import Any

from rl.config.schema import Run

RATIO = {"rollout_logprobs", "old_logprobs"}
CANDIDATES = {"candidate_logprobs", "ref_candidate_logprobs"}
REFERENCE = {"ref_logprobs"} | CANDIDATES


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Facts about what a run composes, seen by calling it with made-up values."""

    loss_reads: tuple[str, ...]  # fields of losses.tokens.Tokens
    loss_weighs_sequences: bool  # its file says PER_SEQUENCE = True
    loss_corrects: bool  # with old_logprobs at hand, it also reads rollout_logprobs
    correction_is_neutral: bool  # every weight is 1
    divergence_is_linear: bool  # the gradient of the estimator is the same whatever the reference
    advantage_takes_turns: bool
    advantage_is_reward: bool  # it returns the rewards as they are
    advantage_compares: bool  # a rollout alone in its group has the advantage 0
    advantage_refuses_negative: bool
    aggregation_takes_turns: bool
    aggregation_weighs_sequences: bool  # every rollout has the same weight, however long it is
    truncation_lowers_rewards: bool  # a reward of 0 may become negative
    truncation_changes_rewards: bool

    @staticmethod
    def of(run: Run) -> "Learned":
        """Return what the supervisor has written into a run's config.yaml."""
        if not run.learned:
            raise ValueError("config.yaml has no `learned`: start the run by train.py")
        return Learned.from_settings(run.learned)

    @staticmethod
    def from_settings(settings: dict[str, Any]) -> "Learned":
        """Return what `asdict` made plain, JSON or YAML in between."""
        return Learned(**{**settings, "loss_reads": tuple(settings["loss_reads"])})

    def reads(self, fields: set[str]) -> bool:
        """Whether the loss reads one of these fields of its tokens."""
        return not fields.isdisjoint(self.loss_reads)

    @property
    def reads_advantages(self) -> bool:
        """Whether the loss looks at rewards."""
        return self.reads({"advantages"})

    @property
    def uses_ratio(self) -> bool:
        """Whether the loss reads the probability that its tokens were sampled with."""
        return self.reads(RATIO)

    @property
    def compares_distributions(self) -> bool:
        """Whether the loss reads the logprobs of candidates beside the sampled token."""
        return self.reads(CANDIDATES)

    @property
    def takes_any_text(self) -> bool:
        """Whether the loss may train on text that no policy sampled: no reward, no ratio."""
        return not self.reads({"advantages", "ref_logprobs"} | RATIO)

    @property
    def is_supervised(self) -> bool:
        """Whether the loss learns from the tokens alone: not even from a reference."""
        return self.takes_any_text and not self.compares_distributions
