"""The copies of a run's user code, and the files that changed since."""

import pytest

from envs.user_code import ROOT
from rl.runtime.code_copies import changed_code, code_versions, copy_code
from rl.runtime.folder import RunFolder


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A working folder with two modules of the user."""
    lab = tmp_path / "lab"
    (lab / "mine").mkdir(parents=True)
    for name in ("loss", "env"):
        (lab / "mine" / f"{name}.py").write_text(f"{name} = 1\n")
    monkeypatch.chdir(lab)
    return lab


def files_of(lab):
    own = [str(lab / "mine" / f"{name}.py") for name in ("loss", "env")]
    return [*own, str(ROOT / "losses" / "cispo.py"), str(ROOT / "rl" / "records.py")]


def saved(run_folder, step):
    run_folder.checkpoint(step).mkdir(parents=True)


def test_a_run_keeps_a_copy_of_the_users_files_and_of_no_file_of_rl(lab, tmp_path):
    run_folder = RunFolder(tmp_path / "run")
    copy_code(run_folder, files_of(lab))
    start = run_folder.code / "step_000000"
    copies = {str(path.relative_to(start)) for path in start.rglob("*.py")}
    assert copies == {"mine/loss.py", "mine/env.py", "losses/cispo.py"}
    assert (start / "mine/loss.py").read_text() == "loss = 1\n"
    assert changed_code(run_folder) == []


def test_a_file_that_was_edited_or_deleted_has_changed(lab, tmp_path):
    run_folder = RunFolder(tmp_path / "run")
    assert changed_code(run_folder) == []  # of a run without copies, nothing is known
    copy_code(run_folder, files_of(lab))
    (lab / "mine/loss.py").write_text("loss = 2\n")
    assert changed_code(run_folder) == ["mine/loss.py"]
    (lab / "mine/env.py").unlink()
    assert changed_code(run_folder) == ["mine/env.py", "mine/loss.py"]


def test_a_data_file_has_changed_if_its_size_or_content_has(lab, tmp_path):
    run_folder, data = RunFolder(tmp_path / "run"), lab / "data.jsonl"
    for before, after in (("abc", "abd"), ("abc", "abcd")):
        data.write_text(before)
        copy_code(run_folder, files_of(lab), [str(lab / "*.jsonl"), str(lab / "missing")])
        assert changed_code(run_folder) == []
        data.write_text(after)
        assert changed_code(run_folder) == ["data.jsonl"]
    saved(run_folder, 5)
    copy_code(run_folder, files_of(lab), [str(data)])  # the resume accepts the new file
    assert changed_code(run_folder) == []
    data.unlink()
    assert changed_code(run_folder) == ["data.jsonl"]
    (run_folder.code / "data.json").write_text("[1]")
    assert changed_code(run_folder) == []


def test_a_resume_adds_copies_only_if_the_code_changed(lab, tmp_path):
    run_folder, files = RunFolder(tmp_path / "run"), files_of(lab)
    copy_code(run_folder, files)
    saved(run_folder, 5)
    copy_code(run_folder, files)
    copy_code(run_folder, files[:1])  # a file that is no longer imported
    assert [path.name for path in run_folder.code.glob("step_*")] == ["step_000000"]
    (lab / "mine/loss.py").write_text("loss = 2\n")
    copy_code(run_folder, files)
    assert changed_code(run_folder) == []
    versions = code_versions(run_folder)
    assert [len(versions[f"mine/{name}.py"]) for name in ("loss", "env")] == [2, 1]


def test_a_file_that_is_first_imported_at_a_resume_is_copied(lab, tmp_path):
    run_folder, files = RunFolder(tmp_path / "run"), files_of(lab)
    copy_code(run_folder, files[:1])
    saved(run_folder, 5)
    copy_code(run_folder, files)
    assert (run_folder.code / "step_000005" / "mine/env.py").is_file()
    saved(run_folder, 10)
    copy_code(run_folder, files)
    assert not (run_folder.code / "step_000010").exists()
    (lab / "mine/env.py").write_text("env = 2\n")
    assert changed_code(run_folder) == ["mine/env.py"]


def test_a_start_from_the_first_step_replaces_all_copies(lab, tmp_path):
    run_folder, files = RunFolder(tmp_path / "run"), files_of(lab)
    copy_code(run_folder, files)
    (lab / "mine/loss.py").write_text("loss = 2\n")
    copy_code(run_folder, files[:1])
    assert code_versions(run_folder).keys() == {"mine/loss.py"}
    assert changed_code(run_folder) == []


def test_a_file_of_the_user_that_is_named_like_one_of_ours_is_another_file(lab, tmp_path):
    run_folder, mine = RunFolder(tmp_path / "run"), lab / "losses" / "cispo.py"
    mine.parent.mkdir()
    mine.write_text("mine = 1\n")
    copy_code(run_folder, [str(mine), str(ROOT / "losses" / "cispo.py")])
    assert changed_code(run_folder) == []
    mine.write_text("mine = 2\n")
    assert changed_code(run_folder) == [str(mine)[1:]]
