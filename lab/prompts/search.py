"""Searches for a better system prompt with GEPA (arXiv:2507.19457; the package `gepa`).

    prompt -> rollouts of a mini-batch -> the reflection model reads them and writes a new prompt
           -> the same mini-batch; if the new prompt scores higher, all validation examples

A round starts from a random candidate. Its probability is proportional to the number of validation
examples at which it is the best candidate. Only this module imports `gepa`.
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

from lab.prompts.describe import describe_rollout
from lab.prompts.outputs import Candidates
from lab.prompts.prompt_player import Attempt, PromptPlayer, Task
from lab.prompts.settings import PromptOptimization
from lab.prompts.teacher import ReflectionModel
from rl.evaluation.summary import average
from rl.runtime.failure import RunFailed

COMPONENT = "system_prompt"  # the only key of GEPA's candidates, which map names to texts
Texts = dict[str, str]


@dataclass
class Search:
    """One prompt search, which GEPA uses as its adapter, criterion, callback and logger.

    Attributes:
        save: function that is called with the candidates after each round.
        log_path: the file for GEPA's log messages.
    """

    settings: PromptOptimization
    player: PromptPlayer
    reflection_model: ReflectionModel
    save: Callable[[Candidates], None]
    log_path: Path
    ended_by: str = ""
    _failure: Exception | None = None  # an exception that GEPA ignores but that ends the search
    _scores: list[float] = field(default_factory=list)  # validation scores of the candidates
    _unscored: set[tuple[str, int]] = field(default_factory=set)  # (prompt, validation index)
    propose_new_texts: ProposalFn | None = None  # with None, GEPA asks the reflection model

    def run(self, start: str, train: Sequence[Task], validation: Sequence[Task]) -> Candidates:
        """Search from the prompt `start` until the budget is spent, and return the candidates.

        Raises:
            RunFailed: the environment, the policy's server or the reflection model failed.
        """
        settings, perfect = self.settings, self.settings.perfect_score
        self._round_calls = 2 * settings.minibatch_size + len(validation)
        result = gepa.optimize(
            seed_candidate={COMPONENT: start},
            trainset=list(train),
            valset=list(validation),
            adapter=self,
            reflection_lm=self.reflection_model,
            reflection_prompt_template=settings.reflection["template"],
            reflection_minibatch_size=settings.minibatch_size,
            skip_perfect_score=perfect is not None,
            perfect_score=1.0 if perfect is None else perfect,
            acceptance_criterion=self,
            stop_callbacks=self._is_over,
            callbacks=[self],  # pyright: ignore[reportArgumentType] has some methods of the protocol
            logger=self,
            seed=settings.seed,
        )
        if failure := self._failure or self.reflection_model.failure:
            raise failure
        return self._candidates(result)

    def log(self, message: str) -> None:
        """Append a message to the log file."""
        self.log_path.parent.mkdir(exist_ok=True)
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")

    def _is_over(self, gepa_state: GEPAState) -> bool:
        """Return whether the search must end before another round. Set `ended_by` if so."""
        settings, rounds = self.settings, gepa_state.i + 1
        scores = gepa_state.program_full_scores_val_set
        if self._failure or self.reflection_model.failure:
            self.ended_by = "a failure"
        elif settings.perfect_score is not None and max(scores) >= settings.perfect_score:
            self.ended_by = f"every validation example has perfect_score={settings.perfect_score:g}"
        elif settings.num_rounds is not None and rounds >= settings.num_rounds:
            self.ended_by = f"num_rounds={settings.num_rounds}"
        elif self.player.progress.done + self._round_calls > settings.max_calls:
            self.ended_by = f"another round could exceed max_calls={settings.max_calls}"
        else:
            return False
        return True

    def on_iteration_start(self, event: Mapping[str, Any]) -> None:
        """Show the number of the new round and the best score above the progress bar."""
        if self._scores:
            best = f"best {max(self._scores):.3f} (start {self._scores[0]:.3f})"
            text = f"{best}, {len(self._scores)} candidates, round {event['iteration']}"
            self.player.progress.advance(text=text)

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """Print the validation score of a new candidate."""
        score = event["average_score"]
        name = f"candidate {len(self._scores)}" if self._scores else "start"
        better = ", the best so far" if self._scores and score > max(self._scores) else ""
        self._scores.append(score)
        calls = f"({self.player.progress.done} calls)"
        self.player.progress.advance(note=f"{name}: validation score {score:.3f}{better} {calls}")

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        """Save the candidates after a round."""
        self.save(self._candidates(GEPAResult.from_state(event["state"])))

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
            num_calls=self.player.progress.done,
        )

    def evaluate(
        self,
        batch: list[Task],
        candidate: Texts,
        capture_traces: bool = False,  # noqa: ARG002 always returned
    ) -> EvaluationBatch[Attempt, Attempt]:
        """Score a prompt on a batch. A rollout without a reward gets the mean of the others.

        A rollout has no reward after an error of the environment, which is not the prompt's fault.
        """
        attempts = self.player.play(batch, candidate[COMPONENT])
        rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
        if not rewards:
            causes = {attempt.record["error"] for attempt in attempts}
            raise RunFailed(
                f"none of the {len(attempts)} rollouts of a batch has a reward, so prompts cannot "
                f"be compared; correct these errors: {'; '.join(sorted(causes))[:500]}"
            )
        if batch[0].split == "eval":  # such a batch is always the whole validation set, in order
            failed = (i for i, attempt in enumerate(attempts) if attempt.reward is None)
            self._unscored.update((candidate[COMPONENT], i) for i in failed)
        mean = average(rewards)
        scores = [mean if attempt.reward is None else attempt.reward for attempt in attempts]
        return EvaluationBatch(outputs=attempts, scores=scores, trajectories=attempts)

    def make_reflective_dataset(
        self,
        candidate: Texts,  # noqa: ARG002 the attempts belong to it
        eval_batch: EvaluationBatch[Attempt, Attempt],
        components_to_update: list[str],
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the descriptions of the rollouts with a reward, for the reflection model."""
        attempts = [a for a in eval_batch.trajectories or [] if a.reward is not None]
        try:
            shown = [describe_rollout(attempt, self.settings.state_columns) for attempt in attempts]
        except Exception as error:  # GEPA ignores exceptions, so `_failure` stores this one
            self._failure = error
            raise
        return dict.fromkeys(components_to_update, shown)

    def should_accept(self, proposal: CandidateProposal, state: GEPAState) -> bool:
        """Return whether the new prompt has more reward, on examples where both have a reward."""
        if proposal.candidate in state.program_candidates:
            return False
        assert proposal.eval_before is not None
        assert proposal.eval_after is not None
        before, after = proposal.eval_before.outputs, proposal.eval_after.outputs
        pairs = [(b.reward, a.reward) for b, a in zip(before, after, strict=True)]
        return sum(a - b for b, a in pairs if a is not None and b is not None) > 0
