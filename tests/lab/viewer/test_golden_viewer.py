"""Every answer of the viewer about a recorded run, as stored files."""

import json
import os

import pytest
from starlette.testclient import TestClient

from lab.viewer import answers
from lab.viewer.command import main
from lab.viewer.index import RunIndex
from lab.viewer.server import application
from rl.runtime.folder import RunFolder
from tests.support.golden import golden
from tests.support.outcomes import without
from tests.support.viewed_run import add_step, add_update, copy_run


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = copy_run(tmp_path_factory.mktemp("golden") / "run")
    add_update(path)
    add_step(path, 3, is_trained=False)
    broken = path / "rollouts" / "step_000002.jsonl"
    broken.write_text(broken.read_text() + "{broken\n" * 7 + "{half")
    index = RunIndex(RunFolder(path))
    index.refresh()
    return index


def numbers_of(index, *identities):
    return [n for one in identities for n in answers.row_numbers_with(index, {"id": one})]


def test_the_table_of_all_rollouts(index):
    """Every column of every row, titles, scales, problems; a part of the table; searches."""
    table = answers.table(index)
    searches = [answers.search(index, text) for text in ("CAPITAL", "no such word")]
    filters = ({"step": "1", "used": "False"}, {"source": "evaluation", "step": "2"}, {"env": "x"})
    part = answers.table(index, 70, table["generation"])
    found = [table, searches, [answers.row_numbers_with(index, one) for one in filters]]
    found += [part["start"], len(part["columns"]["step"]), sorted(part["titles"].values())]
    golden("viewer/table", without(index.run_folder.path.parent, found))


def test_the_tokens_of_some_rollouts(index):
    """All values per token of one rollout, the sums of others, and why tokens are missing."""
    chosen = numbers_of(index, "000001.1", "000004.1", "000005.0", "000009.0")
    chosen += answers.row_numbers_with(index, {"source": "evaluation"})[:1]
    first, *others = answers.tokens(index, chosen)
    sums = [[[name, len(values), sum(x for x in values if isinstance(x, int | float))]
             for name, values in row.items() if isinstance(values, list)]
            for answer in others for row in answer["rows"]]  # fmt: skip
    reasons = {r for answer in others for row in answer["rows"] for r in row["reason"] if r}
    golden("viewer/tokens", [first, sums, [one["why"] for one in others], sorted(reasons)])


PATHS = (
    *(
        "/key/",
        "/key/runs",
        "/key/static/style.css",
        "/key/rollouts?run=0&n=3,1",
        "/",
        "/wrong/runs",
    ),
    *("/key/table?run=0&start=71&generation=1", "/key/tokens?run=0&n=0", "/key/tokens?run=0"),
    *("/key/search?run=0&q=ring", "/key/rollouts?run=1&n=0", "/key/rollouts?run=0&n=x", "/key/x"),
    *("/key/rollouts?run=0&n=999", "/key/rollouts?run=0&n="),
)


def test_the_answers_of_the_server_and_the_usage(index, tmp_path, monkeypatch, capsys):
    """Status, type and size of each answer, the security headers, and the list of 22 runs."""
    client, found = TestClient(application([index], ["mine"], "key")), {}
    bodies = [json.dumps({"run": run, "n": n}) for run, n in ((0, [1]), (5, [1]), (0, []))]
    asked = [(path, client.get(path)) for path in PATHS]
    asked += [(body, client.post("/key/export", content=body)) for body in (*bodies, "{}")]
    for name, answer in asked:
        kind, text = answer.headers["content-type"], answer.text
        is_long, is_json = len(text) > 300, kind == "application/json"
        found[name] = [answer.status_code, kind, sorted(json.loads(text)) if is_json and "rollouts"
                       not in name else "long" if is_long else text]  # fmt: skip
    names = ("content-security-policy", "x-content-type-options", "referrer-policy")
    found["headers"] = [client.get("/").headers[name] for name in (*names, "cache-control")]
    monkeypatch.chdir(tmp_path)
    for number in range(22):
        folder = tmp_path / "outputs" / f"run{number}"
        (folder / "rollouts").mkdir(parents=True)
        os.utime(folder, (number, number))
    assert main([]) == 0
    found["usage"] = capsys.readouterr().out.splitlines()
    golden("viewer/server", without(index.run_folder.path.parent, found))
