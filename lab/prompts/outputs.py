"""Writes the result files of a prompt search.

system_prompt.txt       the best prompt; env.system_prompt accepts the path of this file
results.jsonl           one candidate per line, first the prompt at the start of the search
pareto_frontier.jsonl   one validation example per line, with its best candidates
metadata.json           the configuration and the summary
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.prompts.prompt_player import Task, prompt_fingerprint
from rl.evaluation.summary import average
from rl.runtime.files import json_line, plain, write_whole

PROMPT = "system_prompt.txt"


@dataclass(frozen=True)
class Candidates:
    """The C prompts that were scored on all V validation examples."""

    prompts: list[str]  # [C]
    parents: list[list[int]]  # [C] indices of the prompts from which each prompt was made
    scores: list[list[float | None]]  # [C][V] reward; None: the rollout has no reward
    discovered: list[int]  # [C] number of rollouts that were played before the prompt was found
    num_calls: int  # number of rollouts, including those of earlier starts of the search

    @property
    def means(self) -> list[float]:
        """The mean validation score of each candidate [C]."""
        return [average([s for s in scores if s is not None]) for scores in self.scores]

    @property
    def best(self) -> int:
        """The index of the candidate with the highest mean score; ties: the oldest one."""
        return max(range(len(self.prompts)), key=lambda i: self.means[i])

    def gain(self) -> tuple[float, float]:
        """Return mean and standard error of (best prompt's score - first prompt's score)."""
        pairs = zip(self.scores[0], self.scores[self.best], strict=True)
        differences = [a - b for b, a in pairs if a is not None and b is not None]
        mean, count = average(differences), len(differences)
        if count < 2:
            return mean, math.nan
        variance = sum((d - mean) ** 2 for d in differences) / (count - 1)
        return mean, math.sqrt(variance / count)


def write_outputs(
    folder: Path, candidates: Candidates, validation: Sequence[Task], summary: dict[str, Any]
) -> None:
    """Write the four result files. `summary`: further content of metadata.json."""
    rows = [
        {
            "example_id": i,
            "reward": candidates.means[i],
            "info": {
                "system_prompt": prompt,
                "prompt": prompt_fingerprint(prompt),  # also in rollouts.jsonl
                "is_best": i == candidates.best,
                "parents": candidates.parents[i],
                "calls_before": candidates.discovered[i],
                "scores": candidates.scores[i],
            },
        }
        for i, prompt in enumerate(candidates.prompts)
    ]
    frontier = []
    for place, task in enumerate(validation):
        scores = [own[place] for own in candidates.scores]
        highest = max((score for score in scores if score is not None), default=None)
        best = [i for i, score in enumerate(scores) if score is not None and score == highest]
        where = {"place": place, "env": task.example.env, "example": task.example.id}
        frontier.append({**where, "score": highest, "candidates": best})
    gain, error = candidates.gain()
    metadata = {
        "optimizer": "gepa",
        "target": "system_prompt",
        "num_candidates": len(candidates.prompts),
        "best": candidates.best,
        "start_score": candidates.means[0],
        "best_score": candidates.means[candidates.best],
        "gain": gain,
        "gain_standard_error": error,
        "num_calls": candidates.num_calls,
        **summary,
    }
    write_whole(folder / PROMPT, candidates.prompts[candidates.best] + "\n")
    write_whole(folder / "results.jsonl", "".join(map(json_line, rows)))
    write_whole(folder / "pareto_frontier.jsonl", "".join(map(json_line, frontier)))
    write_whole(folder / "metadata.json", json.dumps(plain(metadata), indent=1) + "\n")
