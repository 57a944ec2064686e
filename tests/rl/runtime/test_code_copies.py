"""The copies of a run's user code, and the files that changed since."""

import pytest

from envs.user_code import ROOT
from rl.runtime.code_copies import changed_code, code_versions, copy_code
from rl.runtime.folder import RunFolder

CISPO = str(ROOT / "losses" / "cispo.py")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A working folder with two modules of the user."""
    lab = tmp_path / "lab"
    (lab / "mine").mkdir(parents=True)
    for name in ("loss", "env"):
        (lab / "mine" / f"{name}.py").write_text(f"{name} = 1\n")
    monkeypatch.chdir(lab)
    return lab


@pytest.fixture
def files(lab):
    own = [str(lab / "mine" / f"{name}.py") for name in ("loss", "env")]
    return [*own, CISPO, str(ROOT / "rl" / "records.py")]


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_copy_of_the_users_files_shows_which_were_edited_or_deleted(lab, files, run):
    assert changed_code(run) == []  # of a run without copies, nothing is known
    copy_code(run, files)
    start = run.code / "step_000000"
    copies = {str(path.relative_to(start)) for path in start.rglob("*.py")}
    assert copies == {"mine/loss.py", "mine/env.py", "losses/cispo.py"}
    assert (start / "mine/loss.py").read_text() == "loss = 1\n"
    assert changed_code(run) == []
    (lab / "mine/loss.py").write_text("loss = 2\n")
    assert changed_code(run) == ["mine/loss.py"]
    (lab / "mine/env.py").unlink()
    assert changed_code(run) == ["mine/env.py", "mine/loss.py"]
    # A start from the first step replaces all copies.
    copy_code(run, files[:1])
    assert code_versions(run).keys() == {"mine/loss.py"}
    assert changed_code(run) == []


def test_a_data_file_has_changed_if_its_size_or_content_has(lab, files, run):
    data = lab / "data.jsonl"
    for before, after in (("abc", "abd"), ("abc", "abcd")):
        data.write_text(before)
        copy_code(run, files, [str(lab / "*.jsonl"), str(lab / "missing")])
        assert changed_code(run) == []
        data.write_text(after)
        assert changed_code(run) == ["data.jsonl"]
    run.checkpoint(5).mkdir(parents=True)
    copy_code(run, files, [str(data)])  # the resume accepts the new file
    assert changed_code(run) == []
    data.unlink()
    assert changed_code(run) == ["data.jsonl"]
    data.touch()
    copy_code(run, files, [str(lab / "*.jsonl"), str(lab / "*.json"), "later.json"])
    (lab / "more.jsonl").touch()
    (lab / "later.json").touch()  # no pattern matched a file like this at the start
    assert changed_code(run) == [f"{lab}/more.jsonl"]
    (run.code / "data.json").write_text("[1]")
    assert changed_code(run) == []


def test_a_resume_adds_copies_only_of_new_and_changed_code(lab, files, run):
    copy_code(run, files[:1])
    run.checkpoint(5).mkdir(parents=True)
    copy_code(run, files)  # env.py is first imported at this resume
    assert (run.code / "step_000005" / "mine/env.py").is_file()
    run.checkpoint(10).mkdir()
    copy_code(run, files)
    copy_code(run, files[:1])  # env.py is no longer imported
    assert not (run.code / "step_000010").exists()
    (lab / "mine/env.py").write_text("env = 2\n")
    assert changed_code(run) == ["mine/env.py"]
    copy_code(run, files)
    assert changed_code(run) == []
    versions = code_versions(run)
    assert [len(versions[f"mine/{name}.py"]) for name in ("loss", "env")] == [1, 2]


def test_a_file_of_the_user_that_is_named_like_one_of_ours_is_another_file(lab, run):
    mine = lab / "losses" / "cispo.py"
    mine.parent.mkdir()
    mine.write_text("mine = 1\n")
    copy_code(run, [str(mine), CISPO])
    assert changed_code(run) == []
    mine.write_text("mine = 2\n")
    assert changed_code(run) == [str(mine)[1:]]
