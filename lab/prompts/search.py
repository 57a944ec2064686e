"""Search for a better system prompt with GEPA (arXiv:2507.19457; the package `gepa`).

    prompt -> rollouts of a mini-batch -> the reflection model reads them and writes a new prompt
           -> the same mini-batch; if the new prompt scores higher, all validation examples

A prompt with validation scores is a candidate. Each round starts from a random candidate. GEPA
prefers candidates that score best on many validation examples. Only this module imports `gepa`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch, ProposalFn
from gepa.core.state import GEPAState
from gepa.proposer.base import CandidateProposal

from envs.episode import Example
from envs.messages import without_reasoning
from lab.prompts.describe import Attempt, Task, describe_rollout
from lab.prompts.outputs import Candidate, compared_means, index_of_best, prompt_fingerprint
from lab.prompts.settings import PromptOptimization
from rl.evaluation.play import eval_line, play
from rl.evaluation.summary import PlayedExample, average
from rl.records import Rollout
from rl.runtime.failure import RunFailed
from rl.runtime.files import append_line
from rl.runtime.folder import RunFolder
from rl.sampling.chat import Chat
from rl.sampling.player import Player
from rl.sampling.watchdog import Watchdog
from rl.terminal.progress import Progress

_MAX_EMPTY = 4  # this many consecutive answers without a prompt end the search
COMPONENT = "system_prompt"  # the only key of GEPA's candidates, which map names to texts


class SearchEnded(BaseException):
    """The error that ends a search. It is a BaseException, because GEPA catches each Exception."""


@dataclass
class Search:
    """A prompt search, which GEPA uses as adapter, acceptance criterion, callback and logger."""

    settings: PromptOptimization
    run_folder: RunFolder
    player: Player  # samples rollouts of the policy
    reflecting: Chat  # the chat with the reflection model
    runner: asyncio.Runner  # the event loop in which all requests of the search run
    progress: Progress  # counts all rollouts of the search, including those of earlier starts
    save: Callable[[list[Candidate]], None]  # called after each validation of a candidate
    candidates: list[Candidate] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)  # error -> number of rollouts with it
    ended_by: str = ""
    propose_new_texts: ProposalFn | None = None  # None tells GEPA to get prompts from `reflect`
    # The fields calls_before and scores of the next Candidate.
    _validated: tuple[int, list[float | None]] = (0, [])
    _num_empty: int = 0  # number of consecutive answers without a prompt

    def run(self, start: str, train: Sequence[Task], validation: Sequence[Task]) -> None:
        """Search from the prompt `start` until `_is_over` is true. Raise RunFailed on failure."""
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
                callbacks=[self],  # pyright: ignore[reportArgumentType] callbacks may lack methods
                logger=self,
                seed=settings.seed,
            )
        except SearchEnded as end:
            raise RunFailed(str(end)) from end

    def log(self, message: str) -> None:
        path = self.run_folder.log_of("gepa")
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")

    def reflect(self, prompt: str | list[dict[str, Any]]) -> str:
        """Return the reflection model's answer to a question of GEPA, and record both.

        Raise ValueError if the answer is empty or cut off. GEPA retries once, then ends the round.
        Raise SearchEnded if no answer arrives, or if _MAX_EMPTY answers in a row are unusable.
        """
        question = str(prompt)  # always a text, because GEPA passes lists only for images
        try:
            text, cut_off = self.runner.run(self._answer(question))
        except TimeoutError as error:
            timeout = self.reflecting.sampler.rollout_timeout
            raise SearchEnded(
                f"the reflection model did not answer within reflection.timeout={timeout:g} s: "
                "raise this limit"
            ) from error
        except (RunFailed, ValueError) as error:
            raise SearchEnded(str(error)) from error
        record = {"asked": question, "said": text, "cut_off": cut_off}
        append_line(self.run_folder.path / "reflections.jsonl", record)
        text = without_reasoning(text).strip()
        if text and not cut_off:
            self._num_empty = 0
            return text
        self._num_empty += 1
        if self._num_empty == _MAX_EMPTY:
            why = "was cut off" if cut_off else "has no text"
            raise SearchEnded(
                f"the reflection model's answer {why}, {_MAX_EMPTY} times in a row: raise "
                "reflection.max_tokens, or choose another model"
            )
        raise ValueError("the reflection model gave no full answer: raise reflection.max_tokens")

    async def _answer(self, question: str) -> tuple[str, bool]:
        completion = None
        with self.reflecting.group() as chat:
            prompt = await chat.first_prompt([{"role": "user", "content": question}], None)
            if chat.max_new_tokens(prompt) > 0:
                async with asyncio.timeout(chat.sampler.rollout_timeout):
                    completion = (await chat.generate(prompt, 1))[0]
        if completion is None or (completion.cut_off and chat.fills_context(completion)):
            raise ValueError(
                f"the question to the reflection model has {len(question):,} characters, which "
                "leaves no tokens for an answer: lower minibatch_size, or raise "
                "reflection.max_seq_len (max_seq_len if the policy is the reflection model)"
            )
        return chat.message(prompt, completion).get("content") or "", completion.cut_off

    async def _play(self, tasks: Sequence[Task], prompt: str) -> list[Attempt]:
        envs = [self.player.env.environment_of(task.example) for task in tasks]
        for env in envs:
            env.system_prompt = prompt
        attempts: dict[int, Attempt] = {}
        first = self.progress.done

        async def play_group(index: int, example: Example, group_size: int) -> tuple[Rollout, ...]:
            # `first + index` is the rollout's number in the search, from which its seed is derived.
            rollouts = await self.player.play_group(first + index, example, group_size)
            line = eval_line(PlayedExample(example, rollouts), rollouts[0])
            key = {"prompt": prompt_fingerprint(prompt), "split": tasks[index].split}
            record = append_line(self.run_folder.evaluated, {**key, **line})
            num_opening = len(envs[index].add_system_prompt(example.messages))
            attempts[index] = Attempt(example, record["messages"][num_opening:], record)
            self.progress.advance(1)
            if record["reward"] is None:
                self.failures[record["error"]] += 1
            return rollouts

        most = self.player.sampler.max_concurrent
        with Watchdog(self.progress.console.print) as self.player.watchdog:
            await play(play_group, [task.example for task in tasks], 1, max_concurrent=most)
        return [attempts[index] for index in range(len(tasks))]

    def _is_over(self, gepa_state: GEPAState) -> bool:
        settings, best = self.settings, max(compared_means(self.candidates))
        if settings.perfect_score is not None and best >= settings.perfect_score:
            self.ended_by = f"the validation reached perfect_score={settings.perfect_score:g}"
        elif settings.num_rounds is not None and gepa_state.i + 1 >= settings.num_rounds:
            self.ended_by = f"num_rounds={settings.num_rounds}"
        elif self.progress.done + self._round_calls > settings.max_calls:
            self.ended_by = f"another round could exceed max_calls={settings.max_calls}"
        return bool(self.ended_by)

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        prompt, number = event["candidate"][COMPONENT], event["candidate_idx"]
        new = Candidate(prompt, list(event["parent_ids"]), *self._validated)
        self.candidates.append(new)
        self.save(self.candidates)
        best, start = max(compared_means(self.candidates)), self.candidates[0].mean
        better = ", the best so far" if index_of_best(self.candidates) == number > 0 else ""
        name, calls = f"candidate {number}" if number else "start", self.progress.done
        self.progress.advance(
            text=f"best {best:.3f} (start {start:.3f}), {number + 1} candidates",
            note=f"{name}: validation score {new.mean:.3f}{better} ({calls} calls)",
        )

    def evaluate(
        self,
        batch: list[Task],
        candidate: dict[str, str],
        capture_traces: bool = False,  # noqa: ARG002 traces are always returned
    ) -> EvaluationBatch[Attempt, Attempt]:
        """Score a prompt on a batch. A rollout without a reward gets the batch's mean reward."""
        num_calls = self.progress.done
        attempts = self.runner.run(self._play(batch, candidate[COMPONENT]))
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
        candidate: dict[str, str],  # noqa: ARG002 eval_batch has its rollouts
        eval_batch: EvaluationBatch[Attempt, Attempt],
        components_to_update: list[str],
    ) -> dict[str, list[dict[str, Any]]]:
        """Return a description of each rollout with a reward, for the reflection model to read."""
        attempts = [a for a in eval_batch.trajectories or [] if a.reward is not None]
        shown = [describe_rollout(attempt, self.settings.state_columns) for attempt in attempts]
        return dict.fromkeys(components_to_update, shown)

    def should_accept(self, proposal: CandidateProposal, state: GEPAState) -> bool:
        """Return whether the prompt is new and scores higher than its parent on the mini-batch."""
        if proposal.candidate in state.program_candidates:
            return False
        assert proposal.eval_before is not None
        assert proposal.eval_after is not None
        before, after = proposal.eval_before.outputs, proposal.eval_after.outputs
        pairs = [(b.reward, a.reward) for b, a in zip(before, after, strict=True)]
        return sum(a - b for b, a in pairs if a is not None and b is not None) > 0
