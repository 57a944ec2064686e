"""The files, the texts and the questions of a prompt search, as stored files."""

import json

from tests.lab.prompts.test_optimize import PROPOSALS, flaky, search
from tests.support.golden import golden
from tests.support.outcomes import without
from tests.support.prompted_endpoint import PromptedEndpoint

CHANGING = ("time", "generation_time", "seconds")
FILES = ("system_prompt.txt", "results.jsonl", "pareto_frontier.jsonl", "reflections.jsonl")


def read(path):
    lines = path.read_text().splitlines()
    return [json.loads(line) if path.suffix == ".jsonl" else line for line in lines]


def test_a_whole_search(tmp_path, capsys, monkeypatch):
    """Every file, every printed line, and the questions of a search with unscored rollouts."""
    monkeypatch.setenv("COLUMNS", "300")
    more = {**flaky("aeioubcdf"), "max_calls": 200, "num_val": 20, "perfect_score": 1.0}
    more["state_columns"] = "[stop_reason,turns,rewards]"
    with PromptedEndpoint(("", *PROPOSALS)).listening() as endpoint:
        folder = search(endpoint, tmp_path, **more)
    lines = read(folder / "rollouts.jsonl")
    kept = [{k: v for k, v in line.items() if k not in CHANGING} for line in lines]
    rollouts = sorted(json.dumps(line, sort_keys=True) for line in kept)
    found = [{path: read(folder / path) for path in FILES}, endpoint.teacher_asked[:2]]
    found += [
        json.loads((folder / "metadata.json").read_text()),
        capsys.readouterr().out.splitlines(),
    ]
    found += [len(rollouts), *rollouts[::7]]
    found = json.loads(json.dumps(found).replace(endpoint.url, "<url>"))
    golden("prompts/search", without(tmp_path, found))
