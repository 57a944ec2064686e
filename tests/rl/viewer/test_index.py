"""The index says of every complete line what the file says, whatever was written meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rl.run.folder import RunFolder
from rl.run.json_lines import json_line
from rl.run.lock import locked
from rl.run.token_files import Lines, write_lines
from rl.viewer import answers
from rl.viewer.index import RunIndex
from rl.viewer.token_record import NOT_TRAINED
from tests.support.viewed_run import Viewed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Viewed().write(tmp_path / "run")


def indexed(run: Path) -> RunIndex:
    index = RunIndex(RunFolder(run))
    index.refresh()
    return index


def test_every_rollout_has_a_row_and_every_row_finds_its_line(run: Path):
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
    assert [line["id"] for line in lines[:4]] == [f"000000.{k}" for k in range(4)]


def test_staleness_counts_from_the_oldest_token_and_a_push_adds_up_slopes(run: Path):
    index = indexed(run)
    columns = answers.table(index)["columns"]
    assert {(s, k) for s, k in zip(columns["step"], columns["staleness"], strict=True)} >= {(2, 1)}
    (n,) = answers.where(index, "id = '000004.1'")  # a fork: its rows lie on both ranks
    rows = answers.tokens(index, n)["rows"]
    slopes = [abs(x) for row in rows for x in row["slope"] if x is not None]
    assert len(rows) == len(answers.rollouts(index, [n])[0]["messages"]) // 2
    assert columns["push"][n] == pytest.approx(sum(slopes), abs=2e-5)
    (rejected, *_) = answers.where(index, "NOT used")
    assert columns["push"][rejected] is None


def test_what_is_appended_is_added_and_half_a_line_waits_for_its_end(run: Path):
    index = indexed(run)
    before = answers.table(index)
    size = len(before["columns"]["step"])
    path = run / "rollouts" / "step_000002.jsonl"
    line = path.read_text().splitlines()[-1]
    with path.open("a") as file:
        file.write(line[:40])
        file.flush()
        index.refresh()
        again = answers.table(index, size, before["generation"])
        assert again["start"] + len(again["columns"]["step"]) == size
        file.write(line[40:] + "\n")
    index.refresh()
    after = answers.table(index, size, before["generation"])
    assert after["generation"] == before["generation"]
    assert after["start"] + len(after["columns"]["step"]) == size + 1
    assert after["columns"]["place"][-1] == 4  # it joins the group that was there


def test_a_record_that_is_written_after_its_rollouts_is_added_up_then(tmp_path: Path):
    run = Viewed(evaluations=()).write(tmp_path / "run")
    aside = {path: path.read_bytes() for path in (run / "tokens").glob("step_000002.trainer*")}
    for path in aside:
        path.unlink()
    index = indexed(run)
    before = answers.table(index)
    assert before["columns"]["push"][-12:] == [None] * 12
    for path, content in aside.items():
        path.write_bytes(content)
    index.refresh()
    after = answers.table(index, 24, before["generation"])
    assert None not in after["columns"]["push"]


def test_a_step_that_is_done_again_is_read_again_under_another_generation(run: Path):
    index = indexed(run)
    before = answers.table(index)
    path = run / "rollouts" / "step_000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "reward": 7.0}) + "\n" for line in lines[:5]))
    index.refresh()
    after = answers.table(index, len(before["columns"]["step"]), before["generation"])
    assert after["generation"] != before["generation"]
    assert after["start"] == 0
    assert after["columns"]["reward"].count(7.0) == 5
    assert after["columns"]["step"].count(1) == 5


def test_steps_that_a_resumed_run_dropped_are_forgotten_with_their_tokens(run: Path):
    index = indexed(run)
    before = answers.table(index)
    for path in [*run.glob("rollouts/step_000002*"), *run.glob("tokens/step_000002*")]:
        path.unlink()
    index.refresh()
    after = answers.table(index, 30, before["generation"])
    assert (after["start"], after["generation"] == before["generation"]) == (0, False)
    assert 2 not in after["columns"]["step"][: after["columns"]["source"].index("evaluation")]
    assert after["columns"]["push"][:24] == before["columns"]["push"][:24]
    assert "2" not in after["scales"]
    assert answers.rollouts(index, [30])[0]["source"] == "evaluation"


def test_a_broken_line_is_named_and_the_others_are_there(run: Path):
    path = run / "rollouts" / "step_000000.jsonl"
    lines = path.read_text().splitlines()
    odd = ["{broken", '{"messages": 3}', "[1, 2]", '{"reward": 1.0}', ""]
    path.write_text("\n".join([lines[0], *odd, *lines[1:]]) + "\n")
    index = indexed(run)
    table = answers.table(index)
    assert len(table["columns"]["step"]) == 68
    assert len(table["problems"]) == 4
    assert table["problems"][0].startswith("rollouts/step_000000.jsonl line 2 is no rollout: ")
    assert answers.rollouts(index, [1])[0]["messages"] == json.loads(lines[1])["messages"]


def test_half_a_line_is_a_problem_only_when_nobody_writes_any_more(tmp_path: Path):
    run = Viewed(going=True).write(tmp_path / "run")
    with locked(RunFolder(run)):
        table = answers.table(indexed(run))
        assert table["going"]
        assert table["problems"] == []
    index = indexed(run)
    assert answers.facts(index)["problems"] == ["rollouts/step_000002.jsonl ends in half a line"]


def test_whether_a_run_goes_on_is_known_at_once(run: Path, monkeypatch):
    def sleep(_: float) -> None:
        raise AssertionError("a page asks every second, and waits for the answer")

    with locked(RunFolder(run)):
        monkeypatch.setattr("rl.run.lock.time.sleep", sleep)
        assert answers.is_going(RunFolder(run))
    assert not answers.is_going(RunFolder(run))


def test_messages_of_any_shape_are_read(tmp_path: Path):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Größe?"}]},
        "a bare text",
        {"role": "assistant", "content": None, "tool_calls": [{"function": "f"}, "x", 3]},
        {"role": "assistant", "tool_calls": {"not": "a list"}},
    ]
    line = {"messages": messages, "reward": None, "advantage": [1.0, -0.5], "group": 3}
    (run / "rollouts" / "step_000000.jsonl").write_text(json.dumps(line) + "\n")
    index = indexed(run)
    columns = answers.table(index)["columns"]
    assert columns["reward"] == [None]
    assert columns["advantage"] == [0.25]
    assert answers.search(index, "GRÖSSE") == []
    assert answers.search(index, "GRÖßE") == [0]


def test_half_a_character_in_the_arguments_of_a_call_is_read(tmp_path: Path):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    call = {"function": {"name": "f", "arguments": {"text": "\ud83d"}}}
    messages = [{"role": "assistant", "content": "日😀", "tool_calls": [call]}]
    line = json_line({"messages": messages, "reward": 1.0, "group": 3})
    (run / "rollouts" / "step_000000.jsonl").write_text(line)
    index = indexed(run)
    assert answers.table(index)["problems"] == []
    assert answers.search(index, "日😀") == [0]
    assert '"text":"\ufffd"' in msgspec.json.encode(answers.rollouts(index, [0])).decode()


def test_a_question_is_the_same_in_every_version_and_run_whatever_the_system_says(tmp_path: Path):
    runs = [Viewed(seed=seed).write(tmp_path / str(seed)) for seed in range(2)]
    path = runs[1] / "evaluations" / "version_000002.jsonl"
    path.write_text(path.read_text().replace("Be brief.", "Take your time."))
    asked = [
        {
            index["columns"]["question"][i]
            for i, source in enumerate(index["columns"]["source"])
            if source == "evaluation"
        }
        for index in (answers.table(indexed(run)) for run in runs)
    ]
    assert asked[0] == asked[1]
    assert len(asked[0]) == 4


def test_reading_a_run_writes_nothing_but_its_index_and_remembers_it(run: Path):
    def listing() -> dict[str, tuple[int, int]]:
        return {
            str(path.relative_to(run)): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in run.rglob("*")
            if path.is_file()
        }

    before = listing()
    index = indexed(run)
    answers.table(index)
    answers.tokens(index, 0)
    index.close()
    after = listing()
    assert {name: after[name] for name in before} == before
    assert {name.partition(os.sep)[0] for name in after.keys() - before.keys()} == {"viewer"}
    again = RunIndex(RunFolder(run))
    assert again.rows("SELECT count(*) FROM rollouts") == [(68,)]  # without reading a file


def test_an_index_that_cannot_be_kept_lives_in_memory(run: Path):
    path = RunFolder(run).viewer_index
    path.parent.mkdir()
    code = f"import duckdb, sys; db = duckdb.connect({str(path)!r}); print(1); input()"
    with subprocess.Popen(
        [sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        index = indexed(run)
        assert index.not_kept == "another viewer has it"
        assert answers.table(index)["columns"]["step"]
        other.communicate(b"\n")
    path.write_bytes(b"something else altogether" * 400)
    third = indexed(run)
    assert not third.not_kept
    assert answers.table(third)["columns"]["step"]


def test_an_index_with_a_broken_block_is_made_anew(run: Path):
    indexed(run).close()
    path = RunFolder(run).viewer_index
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"x" * 64)
    index = indexed(run)
    assert not index.not_kept
    assert answers.table(index)["columns"]["step"]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(run: Path):
    (run / "viewer").write_text("in the way")
    index = indexed(run)
    assert "File exists" in index.not_kept
    assert answers.table(index)["columns"]["step"]


def test_a_broken_token_record_is_said_and_the_rollouts_are_there(run: Path):
    (run / "tokens" / "step_000001.trainer.rank0.parquet").write_bytes(b"PAR1 no more")
    index = indexed(run)
    (problem,) = answers.table(index)["problems"]
    assert problem.startswith("the token record cannot be read: ")
    (n, *_) = answers.where(index, "step = 1 AND used")
    assert "step 1 cannot be read" in answers.tokens(index, n)["why"]


def test_a_condition_that_is_none_is_refused_with_the_columns(run: Path):
    index = indexed(run)
    assert len(answers.where(index, "step = 1")) == 12
    with pytest.raises(ValueError, match=r"where='rewrd > 1' is no condition .* reward, advantage"):
        answers.where(index, "rewrd > 1")


def test_a_condition_asks_and_does_nothing_else(run: Path, tmp_path: Path):
    index, written = indexed(run), tmp_path / "written.csv"
    for condition in (
        f"true); COPY (SELECT 1) TO '{written}'; SELECT n FROM viewed WHERE (true",
        "true); DELETE FROM rollouts; SELECT n FROM viewed WHERE (true",
    ):
        with pytest.raises(ValueError, match="more than a condition"):
            answers.where(index, condition)
    assert not written.exists()
    assert index.rows("SELECT count(*) FROM rollouts") == [(68,)]
    assert answers.where(index, "stop != ';'")


def test_an_evaluation_that_is_a_run_of_its_own_is_read(run: Path, tmp_path: Path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "rollouts.jsonl").write_bytes(
        (run / "evaluations" / "version_000000.jsonl").read_bytes()
    )
    columns = answers.table(indexed(alone))["columns"]
    assert columns["source"] == ["evaluation"] * 16
    assert columns["step"] == [0] * 16


def test_examples_that_ask_the_same_are_groups_of_their_own_in_an_evaluation(tmp_path: Path):
    run = tmp_path / "run"
    (run / "evaluations").mkdir(parents=True)
    talk = [{"role": "user", "content": "open it"}, {"role": "assistant", "content": "3"}]
    lines = [{"example": i // 2, "env": "lockers", "messages": talk} for i in range(6)]
    path = run / "evaluations" / "version_000000.jsonl"
    path.write_text("".join(map(json_line, lines)))
    columns = answers.table(indexed(run))["columns"]
    assert columns["place"] == [0, 1] * 3
    assert len(set(columns["group_id"])) == 3
    assert len(set(columns["question"])) == 1  # which other versions and runs know, too


def test_a_step_of_which_nothing_was_trained_is_no_broken_record(tmp_path: Path):
    run = RunFolder(Viewed(steps=1, evaluations=()).write(tmp_path / "run"))
    for path in run.tokens.glob("step_000000.trainer*"):
        write_lines(path, Lines([], [], [], {}))
    index = indexed(run.path)
    table = answers.table(index)
    assert table["problems"] == []
    assert table["columns"]["push"] == [None] * 12
    assert answers.tokens(index, 0)["why"] == NOT_TRAINED
