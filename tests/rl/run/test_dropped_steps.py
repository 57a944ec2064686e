"""Files of steps that are about to be done again."""

from rl.run.dropped_steps import drop_steps_from
from rl.run.folder import RunFolder


def test_later_steps_leave_their_rollouts_elsewhere_and_their_tokens_nowhere(tmp_path):
    folder = RunFolder(tmp_path)
    folder.tokens.mkdir()
    for step in (3, 4, 12):
        folder.rollouts_of(step).write_text(f"{step}\n")
        for part in ("rollouts", "trainer.rank0", "trainer.rank1"):
            folder.tokens_of(step, part).touch()
        folder.evaluation_of(step).touch()
    (folder.rollouts / "step_of_mine.jsonl").touch()
    (folder.tokens / ".step_000012.rollouts.parquet.incomplete").touch()
    drop_steps_from(folder, 4)
    assert {path.name for path in folder.rollouts.iterdir()} == {
        "step_000003.jsonl",
        "step_of_mine.jsonl",
    }
    assert [path.name for path in folder.evaluations.iterdir()] == ["version_000003.jsonl"]
    assert {path.name[:11] for path in folder.tokens.iterdir()} == {"step_000003"}
    assert sorted(path.name for path in folder.dropped_rollouts.iterdir()) == [
        "step_000004.jsonl",
        "step_000012.jsonl",
    ]


def test_a_step_that_is_lost_twice_is_kept_twice(tmp_path):
    folder = RunFolder(tmp_path)
    for text in ("first\n", "second\n"):
        folder.rollouts_of(5).write_text(text)
        drop_steps_from(folder, 5)
    assert (folder.dropped_rollouts / "step_000005.jsonl").read_text() == "first\nsecond\n"


def test_a_run_without_any_step_has_nothing_to_drop(tmp_path):
    drop_steps_from(RunFolder(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []
