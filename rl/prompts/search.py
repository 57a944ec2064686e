"""GEPA over an environment: it proposes, we play. (arXiv:2507.19457; the package `gepa`.)

    prompt -> a mini-batch of train examples -> the teacher reads what came of it -> another prompt
           -> the same mini-batch; where that scores higher, all validation examples -> a candidate

The next round starts from a candidate that is best at some validation example, drawn by how many.
Only here is `gepa` imported, and only when a search begins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch, ProposalFn
from gepa.core.result import GEPAResult
from gepa.core.state import GEPAState
from gepa.proposer.base import CandidateProposal

from rl.config.prompt_optimization import PromptOptimization
from rl.evaluation.summary import average
from rl.prompts.lesson import lesson
from rl.prompts.outputs import Candidates
from rl.prompts.progress import Progress
from rl.prompts.prompt_player import Attempt, PromptPlayer, Task
from rl.prompts.teacher import Teacher
from rl.run.failure import RunFailed

COMPONENT = "system_prompt"  # GEPA's candidates are texts by name; ours have this one
Texts = dict[str, str]


@dataclass(frozen=True)
class GepaLog:
    """GEPA's own lines, for whoever wants to know why it did what."""

    path: Path

    def log(self, message: str) -> None:
        """Write one."""
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")


@dataclass
class Search:
    """What one search needs.

    Attributes:
        keep: called with the candidates whenever there is a new one.

    """

    settings: PromptOptimization
    player: PromptPlayer
    teacher: Teacher
    progress: Progress
    keep: Callable[[Candidates], None]
    log: GepaLog
    ended_by: str = ""
    _failure: Exception | None = None  # that GEPA would take for bad luck
    _unscored: set[tuple[str, int]] = field(default_factory=set)  # prompt, place in validation

    def run(self, start: str, train: Sequence[Task], validation: Sequence[Task]) -> Candidates:
        """Look for a better prompt than `start` until the budget is spent; the candidates.

        Raises:
            RunFailed: the environment, the policy's server or the teacher cannot go on.

        """
        settings, perfect = self.settings, self.settings.perfect_score
        self._round_calls = 2 * settings.minibatch_size + len(validation)
        adapter = _Adapter(self.player, settings.state_columns, self._unscored, self._fail)
        result = gepa.optimize(
            seed_candidate={COMPONENT: start},
            trainset=list(train),
            valset=list(validation),
            adapter=adapter,
            reflection_lm=self.teacher,
            reflection_prompt_template=settings.reflection["template"],
            reflection_minibatch_size=settings.minibatch_size,
            skip_perfect_score=perfect is not None,
            perfect_score=1.0 if perfect is None else perfect,
            acceptance_criterion=_BetterAndNew(),
            stop_callbacks=self._is_over,
            callbacks=[self],  # pyright: ignore[reportArgumentType] any part of the protocol will do
            logger=self.log,
            seed=settings.seed,
        )
        if failure := self._failure or self.teacher.failure:
            raise failure
        return self._candidates(result)

    def _fail(self, failure: Exception) -> None:
        self._failure = failure

    def _is_over(self, gepa_state: GEPAState) -> bool:
        """Whether no further round may begin; one that begins never exceeds the budget."""
        settings, rounds = self.settings, gepa_state.i + 1
        scores = gepa_state.program_full_scores_val_set
        if self._failure or self.teacher.failure:
            self.ended_by = "a failure"
        elif settings.perfect_score is not None and max(scores) >= settings.perfect_score:
            self.ended_by = f"every validation example has perfect_score={settings.perfect_score:g}"
        elif settings.num_rounds is not None and rounds >= settings.num_rounds:
            self.ended_by = f"num_rounds={settings.num_rounds}"
        elif gepa_state.total_num_evals + self._round_calls > settings.max_calls:
            self.ended_by = f"max_calls={settings.max_calls} has no room for another round"
        else:
            return False
        return True

    def on_iteration_start(self, event: Mapping[str, Any]) -> None:
        """GEPA begins a round, from 1."""
        self.progress.round(event["iteration"])

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """GEPA has a candidate with its validation score."""
        self.progress.candidate(event["average_score"])

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        """GEPA ends a round."""
        self.keep(self._candidates(GEPAResult.from_state(event["state"])))

    def _candidates(self, result: GEPAResult) -> Candidates:
        prompts = [candidate[COMPONENT] for candidate in result.candidates]
        return Candidates(
            prompts=prompts,
            parents=[[p for p in parents if p is not None] for parents in result.parents],
            scores=[
                [None if (prompt, i) in self._unscored else scores[i] for i in sorted(scores)]
                for prompt, scores in zip(prompts, result.val_subscores, strict=True)
            ],
            discovered=list(result.discovery_eval_counts),
            num_calls=result.total_metric_calls or 0,
        )


class _Adapter:
    """What GEPA knows of an environment."""

    propose_new_texts: ProposalFn | None = None  # GEPA asks the teacher itself

    def __init__(
        self,
        player: PromptPlayer,
        columns: Sequence[str],
        unscored: set[tuple[str, int]],
        fail: Callable[[Exception], None],
    ) -> None:
        """`unscored` takes prompts and places, `fail` what must end the search."""
        self._player, self._columns = player, columns
        self._unscored, self._fail = unscored, fail

    def evaluate(
        self,
        batch: list[Task],
        candidate: Texts,
        capture_traces: bool = False,  # noqa: ARG002 they cost nothing
    ) -> EvaluationBatch[Attempt, Attempt]:
        """Play a batch. One that could not be scored counts as the mean of the others.

        It then changes no mean: the environment's errors are not the prompt's fault.
        """
        attempts = self._player.play(batch, candidate[COMPONENT])
        rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
        if not rewards:
            causes = {attempt.record["error"] for attempt in attempts}
            raise RunFailed(
                f"none of {len(attempts)} rollouts in a row could be scored, so prompts cannot be "
                f"compared: {'; '.join(sorted(causes))[:500]}"
            )
        if batch[0].split == "eval":  # all of them, in order
            failed = (i for i, attempt in enumerate(attempts) if attempt.reward is None)
            self._unscored.update((candidate[COMPONENT], i) for i in failed)
        mean = average(rewards)
        scores = [mean if attempt.reward is None else attempt.reward for attempt in attempts]
        return EvaluationBatch(outputs=attempts, scores=scores, trajectories=attempts)

    def make_reflective_dataset(
        self,
        candidate: Texts,  # noqa: ARG002 the attempts are its
        eval_batch: EvaluationBatch[Attempt, Attempt],
        components_to_update: list[str],
    ) -> dict[str, list[dict[str, Any]]]:
        """Return what the teacher is shown; rollouts that say nothing of the prompt are not."""
        attempts = [a for a in eval_batch.trajectories or [] if a.reward is not None]
        try:
            shown = [lesson(attempt, self._columns) for attempt in attempts]
        except Exception as error:  # GEPA would go on, round after round without a proposal
            self._fail(error)
            raise
        return dict.fromkeys(components_to_update, shown)


class _BetterAndNew:
    """A prompt is better if it scores higher on the examples that both it and its parent scored."""

    def should_accept(self, proposal: CandidateProposal, state: GEPAState) -> bool:
        """Whether the proposal becomes a candidate; one that is a candidate already does not."""
        if proposal.candidate in state.program_candidates:
            return False
        assert proposal.eval_before is not None
        assert proposal.eval_after is not None
        before, after = proposal.eval_before.outputs, proposal.eval_after.outputs
        pairs = [(b.reward, a.reward) for b, a in zip(before, after, strict=True)]
        return sum(a - b for b, a in pairs if a is not None and b is not None) > 0
