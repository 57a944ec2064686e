"""The commit of a run's code."""

import subprocess

from rl.run.commit import commit_of


def test_a_checkout_has_a_commit_and_a_mark_for_what_is_not_in_it(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    assert commit_of(tmp_path) == ""
    git("init", "-q")
    assert commit_of(tmp_path) == ""
    git("commit", "-q", "--allow-empty", "-m", "x")
    clean = commit_of(tmp_path)
    assert len(clean) == 40
    (tmp_path / "new.py").write_text("")
    assert commit_of(tmp_path) == f"{clean}+uncommitted"
