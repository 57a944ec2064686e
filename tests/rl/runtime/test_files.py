"""Lines of JSON, the commit of a run, and files of a run folder that another person made."""

import json
import os
import socket
import subprocess

import pytest
import yaml

from rl.runtime.commit import commit_of
from rl.runtime.files import json_line
from rl.runtime.given_files import load_json, load_yaml, regular_file, why_unsafe_to_write


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": [1, 2.5, None, True, "ü"]}, {"a": [1, 2.5, None, True, "ü"]}),
        ([float("inf"), float("nan"), 1.0], [None, None, 1.0]),
        ({("a", 1): object}, {"('a', 1)": "<class 'object'>"}),
        ("\ud800", "\ud800"),
        ([10**5000], ["(int, which cannot be shown: ValueError)"]),
    ],
)
def test_an_object_that_json_does_not_know_becomes_text(value, read):
    line = json_line({"message": value})
    assert line.endswith("}\n")
    assert line.isascii()
    assert json.loads(line) == {"message": read}
    value = [value]
    value.append(value)  # a circle is cut
    assert json.loads(json_line({"message": value}))["message"][0] == read


def test_the_commit_of_a_checkout_shows_uncommitted_changes(tmp_path):
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


BOMB = "\n".join(f"k{i}: &a{i} [{','.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(9))
HOSTILE = (
    *(BOMB, "[" * 200_000, "a: &a [*a]", "a: !!timestamp x", "a: " + "9" * 5000),
    *("a: !!python/object/apply:os.getpid []", "{"),
)


def test_yaml_and_json_that_would_stop_the_reader_are_an_error():
    for text in HOSTILE:
        with pytest.raises(yaml.YAMLError):
            load_yaml(text.encode())
    with pytest.raises(ValueError, match="nested too deep"):
        load_json("[" * 100_000)
    text = b"a: &x {b: 1e-5, c: [1, null]}\nd: *x\ne: *x\nf: &y text\ng: *y\n"
    assert load_yaml(text) == yaml.safe_load(text)


def test_only_a_regular_file_in_the_folder_is_read(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    for file in (folder / "logs/file", outside / "file"):
        file.parent.mkdir(parents=True)
        file.touch()
    os.mkfifo(folder / "fifo")
    (folder / "own").symlink_to(folder / "logs" / "file")
    (folder / "other").symlink_to(outside / "file")
    (folder / "others").symlink_to(outside)
    for name in ("logs/file", "own"):
        assert regular_file(folder / name, folder) == folder / name
    for name in ("fifo", "other", "others/file", "logs", "missing", "../outside/file", "a\0"):
        with pytest.raises(FileNotFoundError):
            regular_file(folder / name, folder)


def test_a_run_may_write_where_all_paths_are_its_own(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert not why_unsafe_to_write(folder)
    (folder / "wandb" / "run-1").mkdir(parents=True)
    (folder / "wandb" / "latest").symlink_to("run-1")
    (folder / "wandb" / "run-1" / "debug-core.log").symlink_to(tmp_path / "cache.log")
    (folder / "warm-start").mkdir()
    for parent in (folder, folder / "warm-start"):
        (parent / "sockets").symlink_to(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(folder)  # the path of a socket must be short
        listener.bind("left.sock")
    assert not why_unsafe_to_write(folder)
    for name, make in (("link", lambda path: path.symlink_to(tmp_path)), ("fifo", os.mkfifo)):
        path = folder / "warm-start" / name
        make(path)
        assert name in why_unsafe_to_write(folder)
        path.unlink()
    assert not why_unsafe_to_write(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused_but_root_may_resume_the_run_of_another_user(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.chown(path, 12345, -1)
    assert f"{path} belongs to another user (id 12345)" in why_unsafe_to_write(tmp_path)
    os.chown(tmp_path, 12345, -1)
    assert not why_unsafe_to_write(tmp_path)
