"""The files, the texts and the questions of a prompt search, as stored files."""

import json
import re
from collections import Counter

from rich.console import Console

from envs.episode import Example
from lab.prompts.describe import Task
from lab.prompts.outputs import Candidate, closing_lines, next_commands, write_outputs
from lab.prompts.teacher import Reflection
from rl.runtime.folder import RunFolder
from tests.lab.prompts.test_optimize import PROPOSALS, flaky, search
from tests.support.golden import golden
from tests.support.outcomes import without
from tests.support.prompted_endpoint import PromptedEndpoint
from tests.support.scripted import SAMPLER

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
    log = re.sub(r"0x[0-9a-f]+", "", (folder / "logs" / "gepa.log").read_text()).splitlines()
    found = [{path: read(folder / path) for path in FILES}, log, endpoint.teacher_asked[:2]]
    found += [
        json.loads((folder / "metadata.json").read_text()),
        capsys.readouterr().out.splitlines(),
    ]
    found += [len(rollouts), *rollouts[::7]]
    found = json.loads(json.dumps(found).replace(endpoint.url, "<url>"))
    golden("prompts/search", without(tmp_path, found))


FOUND = {
    "better": [[0.0, 0.5, None, 0.2], [1.0, 0.25, 0.0, 0.7], [0.5, 0.5, 0.5, None]],
    "not better": [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.0]],
}
GIVEN = {
    "temperature": 0.5, "max_tokens": 77, "timeout": 8.0, "max_retries": 4, "template": None,
    "api_key_variable": "KEY", "revision": "r", "renderer": "auto", "dtype": "float32",
    "max_seq_len": 256, "base_url": "http://h/v1", "model": "m", "path": None,
}  # fmt: skip


def test_the_files_and_the_last_lines_of_a_search(tmp_path, capsys, monkeypatch):
    """The files of two results, the printed lines and commands, and the reflection's sampler."""
    monkeypatch.setenv("COLUMNS", "400")
    tasks = [Task("eval", Example(id=i, env="e", messages=[])) for i in (7, 3, 5, 9)]
    whole = {"sampler": Reflection(**GIVEN).sampler(SAMPLER)}
    whole["client"] = vars(Reflection(**GIVEN).client)
    overrides = ["env=arithmetic", "seed=3", "model.path=a b", "adapter_path=x", "max_calls=9",
                 "env.system_prompt=Hm.", "+env.x=1", "sampler.temperature=1"]  # fmt: skip
    for name, scores in FOUND.items():
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        found = [Candidate(f"p{i}", [0] * (i > 0), 10 * i, own) for i, own in enumerate(scores)]
        write_outputs(folder.path, found, tasks, num_calls=9, ended_by="x")
        errors = Counter({"a" * 200: 3, "b": 2, "c": 1, "d": 1})
        Console().print(closing_lines(found, "max_calls", errors, folder, overrides, {"env": "e"}))
        whole[name] = [read(folder.path / path) for path in (*FILES[:3], "metadata.json")]
        whole[name].append(capsys.readouterr().out.splitlines())
    for choices in ({"env": "a", "model": "b"}, {"env": "a", "model": "b", "client": "messages"}):
        whole[str(choices)] = [next_commands(folder, o, choices, 4) for o in ([], overrides)]
    golden("prompts/files", without(tmp_path, whole))
