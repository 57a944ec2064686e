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
from gepa.core.state import GEPAState
from gepa.proposer.base import CandidateProposal

from lab.prompts.describe import describe_rollout
from lab.prompts.outputs import Candidate
from lab.prompts.prompt_player import Attempt, PromptPlayer, Task
from lab.prompts.settings import PromptOptimization
from lab.prompts.teacher import SearchEnded
from rl.evaluation.summary import average
from rl.runtime.failure import RunFailed

COMPONENT = "system_prompt"  # the only key of GEPA's candidates, which map names to texts


@dataclass
class Search:
    """One prompt search, which GEPA uses as its adapter, criterion, callback and logger.

    Attributes:
        reflect: function that returns the reflection model's answer to a question of GEPA.
        save: function that is called when another candidate was scored.
        log_path: the file for GEPA's log messages.
    """

    settings: PromptOptimization
    player: PromptPlayer
    reflect: Callable[..., str]
    save: Callable[[list[Candidate]], None]
    log_path: Path
    candidates: list[Candidate] = field(default_factory=list)
    ended_by: str = ""
    _validated: tuple[int, list[float | None]] = (0, [])  # calls before the evaluation, rewards
    propose_new_texts: ProposalFn | None = None  # with None, GEPA asks the reflection model

    def run(self, start: str, train: Sequence[Task], validation: Sequence[Task]) -> None:
        """Search from the prompt `start` until the budget is spent.

        Raises:
            RunFailed: the environment, the policy's server or the reflection model failed.
        """
        settings, perfect = self.settings, self.settings.perfect_score
        self._round_calls = 2 * settings.minibatch_size + len(validation)
        try:
            gepa.optimize(
                seed_candidate={COMPONENT: start},
                trainset=list(train),
                valset=list(validation),
                adapter=self,
                reflection_lm=self.reflect,
                reflection_prompt_template=settings.reflection["template"],
                reflection_minibatch_size=settings.minibatch_size,
                skip_perfect_score=perfect is not None,
                perfect_score=1.0 if perfect is None else perfect,
                acceptance_criterion=self,
                stop_callbacks=self._is_over,
                callbacks=[self],  # pyright: ignore[reportArgumentType] has some of the methods
                logger=self,
                seed=settings.seed,
            )
        except SearchEnded as end:
            raise RunFailed(str(end)) from end

    def log(self, message: str) -> None:
        """Append a message to the log file."""
        self.log_path.parent.mkdir(exist_ok=True)
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")

    def _is_over(self, gepa_state: GEPAState) -> bool:
        """Return whether the search must end before another round. Set `ended_by` if so."""
        settings, best = self.settings, max(candidate.mean for candidate in self.candidates)
        if settings.perfect_score is not None and best >= settings.perfect_score:
            self.ended_by = f"every validation example has perfect_score={settings.perfect_score:g}"
        elif settings.num_rounds is not None and gepa_state.i + 1 >= settings.num_rounds:
            self.ended_by = f"num_rounds={settings.num_rounds}"
        elif self.player.progress.done + self._round_calls > settings.max_calls:
            self.ended_by = f"another round could exceed max_calls={settings.max_calls}"
        return bool(self.ended_by)

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """Save the candidates, and print the validation score of the new one."""
        prompt, number = event["candidate"][COMPONENT], event["candidate_idx"]
        new = Candidate(prompt, list(event["parent_ids"]), *self._validated)
        self.candidates.append(new)
        self.save(self.candidates)
        best, start = max(c.mean for c in self.candidates), self.candidates[0].mean
        better = ", the best so far" if number and event["is_best_program"] else ""
        name, calls = f"candidate {number}" if number else "start", self.player.progress.done
        self.player.progress.advance(
            text=f"best {best:.3f} (start {start:.3f}), {number + 1} candidates",
            note=f"{name}: validation score {new.mean:.3f}{better} ({calls} calls)",
        )

    def evaluate(
        self,
        batch: list[Task],
        candidate: dict[str, str],
        capture_traces: bool = False,  # noqa: ARG002 always returned
    ) -> EvaluationBatch[Attempt, Attempt]:
        """Score a prompt on a batch. A rollout without a reward gets the mean of the others.

        A rollout has no reward after an error of the environment, which is not the prompt's fault.
        """
        num_calls = self.player.progress.done
        attempts = self.player.play(batch, candidate[COMPONENT])
        rewards = [attempt.reward for attempt in attempts]
        if not (scored := [reward for reward in rewards if reward is not None]):
            causes = {attempt.record["error"] for attempt in attempts}
            raise RunFailed(
                f"none of the {len(attempts)} rollouts of a batch has a reward, so prompts cannot "
                f"be compared; correct these errors: {'; '.join(sorted(causes))[:500]}"
            )
        if batch[0].split == "eval":  # such a batch is always the whole validation set, in order
            self._validated = num_calls, rewards
        scores = [average(scored) if reward is None else reward for reward in rewards]
        return EvaluationBatch(outputs=attempts, scores=scores, trajectories=attempts)

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],  # noqa: ARG002 the attempts belong to it
        eval_batch: EvaluationBatch[Attempt, Attempt],
        components_to_update: list[str],
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the descriptions of the rollouts with a reward, for the reflection model."""
        attempts = [a for a in eval_batch.trajectories or [] if a.reward is not None]
        shown = [describe_rollout(attempt, self.settings.state_columns) for attempt in attempts]
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
