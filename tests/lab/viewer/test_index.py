"""The index of a run, its token record, the answers of the server, and view.py."""

import gzip
import json
import math
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from base64 import b64decode
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from starlette.testclient import TestClient

from lab.viewer import answers
from lab.viewer.command import _runs_of, main
from lab.viewer.export import page
from lab.viewer.index import RunIndex
from lab.viewer.server import application
from lab.viewer.token_record import pieces, tokens_of, zero_reason
from rl.runtime.files import json_line
from rl.runtime.folder import RunFolder
from rl.runtime.lock import locked
from rl.runtime.token_files import read_rows
from tests.support.composing import REPO
from tests.support.golden import golden, without
from tests.support.launching import begin
from tests.support.viewed_run import add_step, copy_run


def add_update(path: Path) -> None:
    """Add a second update of each batch to the token record, in which pi is larger by 0.5."""
    for file in path.glob("tokens/*.trainer.rank*"):
        first = pq.read_table(file)
        if "pi" in first.column_names:
            larger = [[x + 0.5 for x in line] for line in first["pi"].to_pylist()]
            second = first.set_column(first.column_names.index("pi"), "pi", [larger])
            tables = [first, second.cast(first.schema)]
            updates = [[0] * len(first) + [1] * len(first)]
            pq.write_table(pa.concat_tables(tables).append_column("update", updates), file)


@pytest.fixture
def run(tmp_path):
    return copy_run(tmp_path / "run")


def indexed(run) -> RunIndex:
    index = RunIndex(RunFolder(run))
    index.refresh()
    return index


def test_every_rollout_has_a_row_and_every_row_finds_its_line(run):
    index = indexed(run)
    columns = answers.table(index)["columns"]
    assert len(columns["step"]) == 3 * 3 * 4 + 2 * 4 * 4
    assert columns["source"].count("evaluation") == 32
    lines = answers.rollouts(index, range(len(columns["step"])))
    for n, line in enumerate(lines):
        assert line["n"] == n
        assert line["reward"] == columns["reward"][n]
        assert line["tokens"] == columns["length"][n]
        assert line.get("used", True) == columns["used"][n]
        assert (line["step"], line["source"]) == (columns["step"][n], columns["source"][n])
    assert [line["id"] for line in lines[:4]] == [f"000000.{k}" for k in range(4)]


def test_replayed_rollouts_and_demonstrations_are_not_new(run):
    path = run / "rollouts" / "step_000002.jsonl"
    text = path.read_text().replace('"id": "000006.0"', '"id": "000006.0@2"')
    path.write_text(text.replace('"id": "000007.', '"id": "-000007.'))
    columns = answers.table(indexed(run))["columns"]
    of_step = [new for new, step in zip(columns["new"], columns["step"], strict=True) if step == 2]
    assert of_step[:12] == [False, True, True, True, *[False] * 4, *[True] * 4]


def test_staleness_counts_from_the_oldest_token_and_a_push_adds_up_gradients(run):
    path = run / "rollouts" / "step_000002.jsonl"
    path.write_text(path.read_text().replace('"versions": [1]', '"versions": [0, 1]', 1))
    index = indexed(run)
    columns = answers.table(index)["columns"]
    found = set(zip(columns["step"], columns["staleness"], strict=True))
    assert found >= {(2, 1), (2, 2)}
    (n,) = answers.row_numbers_with(index, {"id": "000004.1"})  # a fork: its rows lie on both ranks
    rows = answers.tokens(index, [n])[0]["rows"]
    grads = [abs(x) for row in rows for x in row["grad"] if x is not None]
    assert len(rows) == len(answers.rollouts(index, [n])[0]["messages"]) // 2
    assert columns["push"][n] == pytest.approx(sum(grads), abs=2e-5)
    (rejected, *_) = answers.row_numbers_with(index, {"used": "False"})
    assert columns["push"][rejected] is None
    add_update(run)  # a second update with the same gradients
    index.refresh()
    twice = [x if x is None else pytest.approx(2 * x) for x in columns["push"]]
    assert answers.table(index)["columns"]["push"] == twice


def test_new_lines_are_added_and_an_incomplete_line_is_read_later(run):
    index = indexed(run)
    before = answers.table(index)
    size = len(before["columns"]["step"])
    path = run / "rollouts" / "step_000002.jsonl"
    line = path.read_text().splitlines()[-1]
    with path.open("a") as file:
        file.write(line[:40])
        file.flush()
        index.refresh()
        assert len(answers.table(index)["columns"]["step"]) == size
        file.write(line[40:] + "\n")
    index.refresh()
    after = answers.table(index, size, before["generation"])
    assert after["generation"] == before["generation"]
    assert after["problems"] == []
    assert (after["start"], len(after["columns"]["step"])) == (size, 1)
    assert after["columns"]["place"][-1] == 4  # it joins the group that was there


def test_rewritten_and_deleted_steps_are_read_again_under_another_generation(run):
    index = indexed(run)
    before = answers.table(index)
    for path in [*run.glob("rollouts/step_000002*"), *run.glob("tokens/step_000002*")]:
        path.unlink()
    index.refresh()
    after = answers.table(index, 30, before["generation"])
    assert (after["start"], after["generation"] == before["generation"]) == (0, False)
    assert after["columns"]["push"][:24] == before["columns"]["push"][:24]
    assert "2" not in after["scales"]
    path = run / "rollouts" / "step_000001.jsonl"
    path.write_text(path.read_text().replace('"reward": ', '"reward": 7'))
    index.refresh()
    again = answers.table(index, 30, after["generation"])
    assert (again["start"], again["generation"] == after["generation"]) == (0, False)
    assert min(again["columns"]["reward"][12:24]) >= 70


def test_a_broken_line_is_reported_and_the_others_are_read(run):
    path = run / "rollouts" / "step_000000.jsonl"
    lines = path.read_text().splitlines()
    odd = ["{broken", '{"messages": 3}', "[1, 2]", '{"reward": 1.0}', ""]
    path.write_text("\n".join([lines[0], *odd, *lines[1:]]) + '\n{"group": 99, "env": "wi')
    index = indexed(run)
    table = answers.table(index)
    assert len(table["columns"]["step"]) == 68
    *broken, incomplete = table["problems"]
    assert len(broken) == 4
    assert broken[0].startswith("rollouts/step_000000.jsonl line 2 is not a rollout: ")
    assert answers.rollouts(index, [1])[0]["messages"] == json.loads(lines[1])["messages"]
    assert incomplete == "rollouts/step_000000.jsonl ends with an incomplete line"
    with locked(RunFolder(run)):  # a run that goes on may still write the line
        assert answers.run_summary(index)["problems"] == broken


def test_messages_of_any_shape_are_read(tmp_path):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Größe? \ud83d"}]},
        "a bare text",
        {"role": "assistant", "content": None, "tool_calls": [{"function": "f"}, "x", 3]},
    ]
    line = {"messages": messages, "reward": None, "group": 3}
    lines = [json.dumps(line | {"advantage": one}) + "\n" for one in ([1.0, -0.5], [])]
    (run / "rollouts" / "step_000000.jsonl").write_text("".join(lines))
    index = indexed(run)
    columns = answers.table(index)["columns"]
    assert columns["reward"] == [None, None]
    assert columns["advantage"] == [0.25, None]
    assert answers.search(index, "GRÖßE") == [0, 1]


def test_a_broken_token_record_is_reported_and_the_rollouts_are_read(run):
    whole = answers.table(indexed(run))["columns"]["push"]
    (run / "tokens" / "step_000001.trainer.rank0.parquet").write_bytes(b"PAR1 no more")
    index = indexed(run)
    (problem,) = answers.table(index)["problems"]
    assert problem.startswith("the token record of step 1 cannot be read: ")
    assert answers.table(index)["columns"]["push"] == [*whole[:12], *[None] * 12, *whole[24:]]
    (n, *_) = answers.row_numbers_with(index, {"step": "1", "used": "True"})
    assert "step 1 cannot be read" in answers.tokens(index, [n])[0]["why"]


def test_examples_with_equal_questions_are_separate_groups_of_an_evaluation(tmp_path):
    run = tmp_path / "run"
    (run / "evaluations").mkdir(parents=True)
    talk = [{"role": "user", "content": "open it"}, {"role": "assistant", "content": "3"}]
    lines = [{"example": i // 2, "env": "lockers", "messages": talk} for i in range(6)]
    # The system prompt may differ between versions and runs.
    lines[-1] = lines[-1] | {"messages": [{"role": "system", "content": "Be brief."}, *talk]}
    path = run / "evaluations" / "version_000000.jsonl"
    path.write_text("".join(map(json_line, lines)))
    columns = answers.table(indexed(run))["columns"]
    assert columns["place"] == [0, 1] * 3
    assert len(set(columns["group_id"])) == 3
    assert len(set(columns["question"])) == 1


def test_an_export_has_whole_groups_and_only_those_of_the_chosen_rollouts(run):
    other, index = indexed(copy_run(run.parent / "other", steps=1)), indexed(run)
    chosen = answers.row_numbers_with(index, {"id": "000003.1"})
    text = page([(other, "first", []), (index, "second", chosen)])
    content = json.loads(gzip.decompress(b64decode(re.search(r'id="embedded">([^<]+)<', text)[1])))
    second = content["runs"][-1]
    assert second["table"]["columns"]["step"] == [1] * 4
    assert second["table"]["columns"]["place"] == [0, 1, 2, 3]
    assert len(second["rollouts"]) == len(second["tokens"]) == 4


def test_runs_of_equal_names_are_told_apart_by_their_paths(run):
    other = copy_run(run.parent / "there" / "run", steps=1)
    assert list(_runs_of([run, run])) == ["run"]
    assert list(_runs_of([run, other])) == [str(run), str(other)]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = copy_run(tmp_path_factory.mktemp("golden") / "run")
    add_update(path)
    add_step(path, 3, is_trained=False)
    broken = path / "rollouts" / "step_000002.jsonl"
    broken.write_text(broken.read_text() + "{broken\n" * 7 + "{half")
    return indexed(path)


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
    some = [{"id": identity} for identity in ("000001.1", "000004.1", "000005.0", "000009.0")]
    chosen = [n for one in some for n in answers.row_numbers_with(index, one)]
    chosen += answers.row_numbers_with(index, {"source": "evaluation"})[:1]
    first, *others = answers.tokens(index, chosen)
    sums = [[[name, len(values), sum(x for x in values if isinstance(x, int | float))]
             for name, values in row.items() if isinstance(values, list)]
            for answer in others for row in answer["rows"]]  # fmt: skip
    reasons = {r for answer in others for row in answer["rows"] for r in row["reason"] if r}
    golden("viewer/tokens", [first, sums, [one["why"] for one in others], sorted(reasons)])


PATHS = (
    "/key/", "/key/runs", "/key/static/style.css", "/key/rollouts?run=0&n=3,1", "/", "/wrong/runs",
    "/key/table?run=0&start=71&generation=1", "/key/tokens?run=0&n=0", "/key/tokens?run=0",
    "/key/search?run=0&q=ring", "/key/rollouts?run=1&n=0", "/key/rollouts?run=0&n=x", "/key/x",
    "/key/rollouts?run=0&n=999", "/key/rollouts?run=0&n=",
)  # fmt: skip


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


def test_what_cannot_be_shown_or_exported_is_refused(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    for words, problem in (
        (["run", "export=run"], "Is a directory: 'run': choose another path or port"),
        (["run", "export=page.html", "step=99"], "no rollout is selected"),
        (["run", "port=65536"], "port=65536 is not a port: give a number"),
    ):
        assert main(words) == 2
        assert problem in capsys.readouterr().out
        assert not Path("page.html").exists()


def test_the_server_requires_the_key_and_ends_on_ctrl_c(run):
    environment = {"PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    with begin([sys.executable, "view.py", str(run)], REPO, environment) as viewer:
        address = next(line for line in viewer.stdout if line.startswith("http")).strip()
        with urllib.request.urlopen(f"{address}table?run=0&start=0&generation=0") as table:
            assert json.load(table)["name"] == "run"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address[:-2]}/")  # a wrong key
        viewer.send_signal(signal.SIGINT)
        screen, _ = viewer.communicate(timeout=30)
        assert "Traceback" not in screen
        assert viewer.returncode in (0, 130)


TOKEN = {"grad": 0.0, "advantage": 0.5, "ratio": 1.3125, "weight": 0.1, "correction": 1.0}
PPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "epsilon": 1e-8}


def read(run: RunFolder, identity: str, step: int = 0, *, used: bool = True):
    def recorded(step: int) -> dict:
        return {identity: read_rows(run, step, identity)}

    return tokens_of(run, step, identity, recorded, used=used, options={"clip_low": 0.2})


UP, DOWN = "ratio 1.31 and advantage > 0: clipped", "ratio 0.50 and advantage < 0: clipped"
BOUNDS = "loss: clip_low=0.2, clip_high=0.28, dual_clip=3"
DROPPED = "the correction for vLLM's logprobs dropped the token (correction 0)"
MEAN = "advantage 0: the reward equals its baseline, such as the mean of the group"
CLIPS = ["clip_fraction", "mask_fraction"]


def test_why_a_token_has_no_gradient():
    for changes, flagged, reason in (
        ({"grad": -0.01}, ["clip_fraction"], None),
        ({"grad": math.nan}, [], None),
        ({"weight": 0.0}, ["clip_fraction"], "the token's weight in the objective is 0"),
        ({"correction": 0.0}, [], DROPPED),
        ({"advantage": 0.0}, [], MEAN),
        ({"advantage": -1.0, "ratio": 0.5}, CLIPS[:1], f"{DOWN} (clip_fraction; {BOUNDS})"),
        ({}, [*CLIPS, "dropped"], f"{UP} (clip_fraction, mask_fraction, dropped; {BOUNDS})"),
        ({}, ["trust"], "the objective does not change with the token's probability"),
    ):
        assert zero_reason({**TOKEN, **changes}, flagged, PPO) == reason


def test_only_sampled_tokens_have_numbers(tmp_path: Path):
    run = RunFolder(copy_run(tmp_path / "run"))
    (row,) = read(run, "000003.2", 1)["rows"]
    sampled = [i for i, m in enumerate(row["mask"]) if m]
    for name in ("pi", "mu", "ratio", "mismatch", "grad", "entropy"):
        assert [i for i, x in enumerate(row[name]) if x is not None] == sampled
    for i in sampled:
        ratio = math.exp(row["pi"][i] - row["mu"][i])
        assert row["ratio"][i] == pytest.approx(ratio, rel=1e-4)
        clipped = bool(row["metrics"]["clip_fraction"][i])
        assert clipped == (row["grad"][i] == 0) == (row["reason"][i] is not None)
        if not clipped:
            expected = -row["weight"][i] * row["advantage"][i] * row["ratio"][i]
            assert row["grad"][i] == pytest.approx(expected, rel=1e-4)
    text = "".join(row["pieces"])
    assert text.startswith("<|im_start|>system\nAnswer from the pages")
    assert text.count("<|im_end|>") in (3, 5)


@pytest.mark.parametrize(("change", "limited"), [(0.5, 0.5), (30.0, 20.0), (-30.0, -20.0)])
def test_old_logprobs_replace_mu_in_the_ratio_and_pi_in_the_mismatch(change, limited, tmp_path):
    moved = RunFolder(copy_run(tmp_path / "run", steps=1))
    for path in (tmp_path / "run" / "tokens").glob("*.trainer.rank*"):
        table = pq.read_table(path)
        old = [[x - change for x in line] for line in table["pi"].to_pylist()]
        pq.write_table(table.append_column("old", [old]), path)
    (row,) = read(moved, "000000.2")["rows"]
    i = row["mask"].index(True)
    assert row["ratio"][i] == pytest.approx(math.exp(limited), rel=1e-4)
    assert row["mismatch"][i] == pytest.approx(row["pi"][i] - change - row["mu"][i], abs=1e-4)


def test_a_record_of_other_tokens_is_reported_and_not_shown(tmp_path: Path):
    run = RunFolder(copy_run(tmp_path / "run", steps=1))
    for path in (tmp_path / "run" / "tokens").glob("*.trainer.rank*"):
        table = pq.read_table(path)
        shorter = table.set_column(2, "pi", [[line[1:] for line in table["pi"].to_pylist()]])
        pq.write_table(shorter, path)
    answer = read(run, "000000.0")
    assert answer["rows"] == []
    assert "the files come from different runs" in answer["why"]


def test_the_last_token_of_a_character_shows_it_and_invalid_bytes_hide_no_later_ones():
    words = {"<unk>": 0, "a": 1, **{f"<0x{i:02X}>": 2 + i for i in range(256)}}
    model = tokenizers.models.BPE(words, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    whole = [2 + byte for byte in "日".encode()]
    ids = [1, *whole, *whole[:2], 1, *whole, 1]
    shown = pieces(tokenizer, ids)
    assert shown == ["a", "", "", "日", "", "", "a", "", "", "日", "a"]
