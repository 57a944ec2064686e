"""Facts about the callables of a run that the dry call finds (rl/dry_call/learn.py).

The supervisor writes the facts into config.yaml, so that no other process repeats the dry call.
"""

from dataclasses import dataclass
from typing import Any

from rl.config.schema import Run

RATIO = {"rollout_logprobs", "old_logprobs"}
CANDIDATES = {"candidate_logprobs", "ref_candidate_logprobs"}
REFERENCE = {"ref_logprobs"} | CANDIDATES


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Facts about the components of a run, found by calling them with made-up values."""

    loss_reads: tuple[str, ...]  # names of the fields of losses.tokens.Tokens that the loss reads
    loss_weighs_sequences: bool  # the loss's file contains PER_SEQUENCE = True
    loss_corrects: bool  # given old_logprobs, the loss also reads rollout_logprobs
    correction_is_neutral: bool  # the correction leaves every weight at 1
    divergence_is_linear: bool  # the estimator's gradient is the same for every token
    advantage_takes_turns: bool
    advantage_is_reward: bool  # the advantage returns the rewards unchanged
    advantage_compares: bool  # the only rollout of a group has the advantage 0
    advantage_refuses_negative: bool
    aggregation_takes_turns: bool
    aggregation_weighs_sequences: bool  # every rollout has the same weight, whatever its length
    truncation_lowers_rewards: bool  # a reward of 0 may become negative
    truncation_changes_rewards: bool

    @staticmethod
    def of(run: Run) -> "Learned":
        """Return the facts that the supervisor wrote into a run's config.yaml."""
        if not run.learned:
            raise ValueError("config.yaml has no `learned`: start the run by train.py")
        return Learned.from_settings(run.learned)

    @staticmethod
    def from_settings(settings: dict[str, Any]) -> "Learned":
        """Convert the output of `asdict`, possibly read back from JSON or YAML, to facts."""
        return Learned(**{**settings, "loss_reads": tuple(settings["loss_reads"])})

    def reads(self, fields: set[str]) -> bool:
        """Return whether the loss reads one of these fields of its tokens."""
        return not fields.isdisjoint(self.loss_reads)

    @property
    def reads_advantages(self) -> bool:
        """Whether the loss reads advantages, which depend on rewards."""
        return self.reads({"advantages"})

    @property
    def uses_ratio(self) -> bool:
        """Whether the loss reads rollout_logprobs or old_logprobs to compute a ratio."""
        return self.reads(RATIO)

    @property
    def compares_distributions(self) -> bool:
        """Whether the loss reads logprobs of several candidates per token."""
        return self.reads(CANDIDATES)

    @property
    def takes_any_text(self) -> bool:
        """Whether the loss accepts text that no policy sampled, as it reads no reward or ratio."""
        return not self.reads({"advantages", "ref_logprobs"} | RATIO)

    @property
    def is_supervised(self) -> bool:
        """Whether the loss reads the tokens alone, without rewards, ratios or a reference."""
        return self.takes_any_text and not self.compares_distributions
