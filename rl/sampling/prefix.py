"""Sample turns that begin with given tokens: those of an earlier rollout, or of a text.

Given tokens of an earlier rollout keep the logprobs and policy versions with which they were
sampled. If other given tokens are trained, the policy in vLLM computes their logprobs. Given tokens
that are not trained are part of the row, but not of its completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rl.inference.completion import Completion, RequestFailed
from rl.records import Rollout, TrainingRow
from rl.sampling.chat import Chat, Prompt


@dataclass(frozen=True)
class Prefix:
    """The tokens with which an attempt begins."""

    turns: tuple[Completion, ...]  # the policy continues the last turn, which may be empty
    trains: bool = False  # whether the given tokens are trained

    @staticmethod
    def of(chat: Chat, given: "Given", *, trains: bool) -> "Prefix":
        """Return `given` as a Prefix. Tokens or a text become the beginning of the first turn."""
        if isinstance(given, Prefix):
            return replace(given, trains=trains)
        return Prefix((Completion(chat.encode(given), [], [], cut_off=False),), trains)

    def turn(self, number: int, prompt: Prompt) -> Completion | None:
        """Return the given tokens of turn `number`; None if there are none for this prompt."""
        given = self.turns[number] if number < len(self.turns) else None
        return given if given and given.prompt_ids in ([], prompt.token_ids) else None


Given = Prefix | Sequence[int] | str
_BY_TOKEN = ("token_ids", "logprobs", "versions", "kept")  # fields with one value per token


def turns_of(rollout: Rollout) -> list[Completion]:
    """Return a rollout's turns. Version -1 marks a given token that is not trained."""
    turns: dict[int, Completion] = {}
    for row in rollout.rows:
        for number in np.unique(row.turns[row.turns >= 0]).tolist():
            (at,) = np.nonzero(row.turns == number)
            token_ids, versions = row.token_ids[at].tolist(), row.token_versions[at].tolist()
            logprobs, kept = row.rollout_logprobs[at].tolist(), _kept_at(row, at)
            prompt = row.token_ids[: at[0]].tolist()
            turns[number] = Completion(token_ids, logprobs, versions, False, prompt, kept=kept)
    return [turns[number] for number in sorted(turns)]


def _kept_at(row: TrainingRow, at: NDArray[np.int64]) -> Sequence[Sequence[int]]:
    """Return, for each token at the positions `at`, the ids from which vLLM chose it."""
    if row.kept is None:
        return ()
    mask = row.completion_mask
    kept = zip(row.kept[mask.cumsum()[at] - 1], mask[at], strict=True)
    return [ids[ids >= 0].tolist() if sampled else () for ids, sampled in kept]


def prefix_of(rollout: Rollout, turn: int, count: int) -> Prefix:
    """Return all turns of a rollout before `turn`, and the first `count` tokens of `turn`."""
    *complete, last = turns_of(rollout)[: turn + 1]
    cut = {name: getattr(last, name)[:count] for name in _BY_TOKEN}
    return Prefix((*complete, replace(last, **cut)))


async def sample_turn(
    chat: Chat, prompt: Prompt, seed: int | None, prefix: Prefix | None = None, number: int = 0
) -> Completion:
    """Return turn `number`. The policy samples the tokens that `prefix` does not contain."""
    given = prefix.turn(number, prompt) if prefix else None
    if prefix is None or given is None or not given.token_ids:
        (completion,) = await chat.generate(prompt, 1, seed)
        return completion
    if chat.sampler.stop:
        stop = [*chat.sampler.stop]
        raise ValueError(f"vLLM ignores sampler.stop={stop} in a prefix: set sampler.stop=[]")
    count = len(given.token_ids)
    begun = replace(prompt, token_ids=[*prompt.token_ids, *given.token_ids])
    max_tokens = min(chat.sampler.max_tokens - count, chat.max_new_tokens(begun))
    continues = number == len(prefix.turns) - 1  # only the last given turn is continued
    if continues and max_tokens <= 0:
        raise RequestFailed(
            f"a prefix of {count} tokens leaves no tokens for the policy's turn: shorten it, or "
            "raise sampler.max_tokens or max_seq_len"
        )
    if num_unscored := given.versions.count(-1) if given.versions else count:
        changed = chat.sampler.non_default_parameters()
        if prefix.trains and changed != {"temperature": 1.0}:
            raise ValueError(
                "vLLM computes logprobs of a prefix at temperature 1 only, but the sampler has "
                f"{changed}: use prefix_trains=False, or the defaults of these options"
            )
        to_score = begun.token_ids[: len(prompt.token_ids) + num_unscored]
        unscored = [0.0] * num_unscored, -1
        logprobs, version = await chat.score(to_score, num_unscored) if prefix.trains else unscored
        versions = [version] * num_unscored + given.versions[num_unscored:]
        given = replace(given, logprobs=logprobs + given.logprobs[num_unscored:], versions=versions)
    given = replace(given, prompt_ids=prompt.token_ids, num_masked=0 if prefix.trains else count)
    if not continues:
        return given
    chat = replace(chat, sampler=replace(chat.sampler, max_tokens=max_tokens))
    (new,) = await chat.generate(begun, 1, seed)
    if new.kept and not given.kept:  # given tokens without `kept` are not trained
        given = replace(given, kept=[()] * count)
    joined = {name: [*getattr(given, name), *getattr(new, name)] for name in _BY_TOKEN}
    return replace(new, **joined, prompt_ids=given.prompt_ids, num_masked=given.num_masked)
