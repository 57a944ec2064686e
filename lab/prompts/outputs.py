"""Write the result files of a prompt search, and format the last lines that the search prints.

system_prompt.txt       the best prompt; env.system_prompt accepts the path of this file
results.jsonl           one candidate prompt per line; the first is the search's initial prompt
pareto_frontier.jsonl   one validation example per line, with the candidates that score best on it
metadata.json           the configuration and the summary
"""

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lab.evaluation.table import error_lines, replace_nan
from lab.prompts.describe import Task
from rl.evaluation.summary import average, standard_error
from rl.runtime.files import json_line, to_json, write_atomically
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import program
from rl.runtime.text import key_of

PROMPT = "system_prompt.txt"
# The printed commands repeat only overrides of these keys. train.py has no adapter_path.
_POLICY_KEYS = ("env", "model", "sampler", "max_seq_len", "inference", "client", "adapter_path")
_EVALUATION_FACTOR = 10  # the printed evaluate.py command sets num_examples=10 * num_val


def prompt_fingerprint(prompt: str) -> str:
    """Return a short hash of the prompt. Result files identify the prompt by this hash."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Candidate:
    prompt: str
    parents: list[int]  # indices of the candidates from which the prompt was made
    calls_before: int  # number of rollouts in the search before the validation of this prompt
    scores: list[float | None]  # reward on each validation example, None if it could not be scored

    @property
    def mean(self) -> float:
        return average([score for score in self.scores if score is not None])


def compared_means(candidates: Sequence[Candidate]) -> list[float]:
    """Return the mean score of each candidate on the examples that the first candidate scored.

    Where another candidate has no score, the first one's counts, so that failures gain nothing.
    """
    pairs = (zip(one.scores, candidates[0].scores, strict=True) for one in candidates)
    return [average([b if a is None else a for a, b in both if b is not None]) for both in pairs]


def index_of_best(candidates: Sequence[Candidate]) -> int:
    """Return the index of the candidate with the highest compared mean (in a tie: the oldest)."""
    means = compared_means(candidates)
    return means.index(max(means))


def gain(candidates: Sequence[Candidate]) -> tuple[float, float]:
    """Return the best prompt's mean score minus the first prompt's, and the standard error."""
    pairs = zip(candidates[0].scores, candidates[index_of_best(candidates)].scores, strict=True)
    differences = [a - b for b, a in pairs if a is not None and b is not None]
    return average(differences), standard_error([[difference] for difference in differences])


def write_outputs(
    folder: Path, candidates: Sequence[Candidate], validation: Sequence[Task], **summary: Any
) -> None:
    best = index_of_best(candidates)
    rows = []
    for number, one in enumerate(candidates):
        own = {key: value for key, value in vars(one).items() if key != "prompt"}
        own |= {"system_prompt": one.prompt, "prompt": prompt_fingerprint(one.prompt)}
        own["is_best"] = number == best
        rows.append({"example_id": number, "reward": one.mean, "info": own})
    frontier = []
    for place, task in enumerate(validation):
        scores = [one.scores[place] for one in candidates]
        highest = max((score for score in scores if score is not None), default=None)
        winners = [i for i, score in enumerate(scores) if score is not None and score == highest]
        where = {"place": place, "env": task.example.env, "example": task.example.id}
        frontier.append({**where, "score": highest, "candidates": winners})
    mean, error = gain(candidates)
    metadata = {
        "optimizer": "gepa",
        "target": "system_prompt",
        "num_candidates": len(candidates),
        "best": best,
        "start_score": candidates[0].mean,
        "best_score": candidates[best].mean,
        "gain": mean,
        "gain_standard_error": error,
        **summary,
    }
    write_atomically(folder / PROMPT, candidates[best].prompt + "\n")
    write_atomically(folder / "results.jsonl", "".join(map(json_line, rows)))
    write_atomically(folder / "pareto_frontier.jsonl", "".join(map(json_line, frontier)))
    write_atomically(folder / "metadata.json", json.dumps(to_json(metadata), indent=1) + "\n")


def closing_lines(
    candidates: Sequence[Candidate],
    ended: str,
    failures: Counter[str],
    run_folder: RunFolder,
    overrides: Sequence[str],
    choices: Mapping[str, str],
) -> RenderableType:
    best, count = index_of_best(candidates), len(candidates[0].scores)
    before, after = candidates[0].mean, candidates[best].mean
    lines = [Text(), Text(f"ended: {ended}", "dim")]
    if best == 0:
        none = f"none of the {len(candidates) - 1} new prompts that reached the {count} validation"
        lines.append(Text(f"{none} examples scored higher than the first: {before:.3f}"))
    else:
        # The standard error is NaN if fewer than two examples have scores of both prompts.
        gained = replace_nan("{:+.3f} ± {:.3f}".format(*gain(candidates)))
        result = f"validation score {before:.3f} -> {after:.3f} on {count} examples ({gained})"
        advice = "the prompt was chosen by this score, so evaluate it on other examples, too:"
        lines += [
            Text(f"{result}, prompt {best} of {len(candidates)}", "bold"),
            Text(advice, "dim"),
        ]
        lines += [Text(f"  {c}") for c in next_commands(run_folder, overrides, choices, count)]
    lines += error_lines(dict(failures.most_common(3)))
    return Group(*lines, Text(f"{run_folder}/  {PROMPT}, results.jsonl, rollouts.jsonl", "dim"))


def next_commands(
    run_folder: RunFolder, overrides: Sequence[str], choices: Mapping[str, str], num_validation: int
) -> list[str]:
    """Return the commands that evaluate the prompt and, unless client=messages, train with it."""
    remote = choices.get("client") == "messages"  # this client returns no token ids for train.py
    names = {item: key_of(item) for item in overrides}
    kept = [
        item
        for item, key in names.items()
        if key.partition("@")[0].partition(".")[0] in _POLICY_KEYS and key != "env.system_prompt"
    ]
    # `kept` lacks experiment=..., which may have chosen env and model, so add env and model.
    groups = ["env"] if remote else ["env", "model"]
    chosen = [f"{g}={choices[g]}" for g in groups if g in choices and g not in names.values()]
    prompt = f"env.system_prompt={run_folder.path / PROMPT}"
    more = f"num_examples={num_validation * _EVALUATION_FACTOR}"
    lines = [[*program("evaluate").split(), *chosen, *kept, prompt, more]]
    if not remote:
        trained = [item for item in kept if names[item] != "adapter_path"]
        lines.append([*program("train").split(), *chosen, *trained, prompt])
    return [shlex.join(line) for line in lines]
