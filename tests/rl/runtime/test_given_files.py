"""Files of a run folder that another person may have made."""

import os
import socket

import pytest
import yaml

from rl.runtime.given_files import load_json, load_yaml, regular_file, why_unsafe_to_write

BOMB = "\n".join(f"k{i}: &a{i} [{','.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(9))


@pytest.mark.parametrize(
    "text",
    [
        *(BOMB, "[" * 200_000, "- " * 200_000, "a: &a [*a]", "a: &a {<<: *a}"),
        *("a: !!int ''", "a: !!bool maybe", "a: !!timestamp x", "a: " + "9" * 5000, "a: \x01"),
        *("? [1]\n: 2", "a: !!python/object/apply:os.getpid []", "{", "a: 2026-99-99"),
    ],
    ids=range(14),
)
def test_yaml_that_would_stop_the_reader_is_an_error(text):
    with pytest.raises(yaml.YAMLError):
        load_yaml(text.encode())


def test_other_yaml_is_read_as_before():
    text = b"a: &x {b: 1e-5, c: [1, null]}\nd: *x\ne: *x\nf: &y text\ng: *y\n"
    assert load_yaml(text) == yaml.safe_load(text)


def test_deep_json_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deep"):
        load_json("[" * 100_000)


def test_only_a_regular_file_in_the_folder_is_read(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    (folder / "logs").mkdir(parents=True)
    outside.mkdir()
    for file in (folder / "logs/file", outside / "file"):
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
def test_a_file_of_another_user_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.chown(path, 12345, -1)
    assert f"{path} belongs to another user (id 12345)" in why_unsafe_to_write(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_may_resume_the_run_of_another_user(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        os.chown(path, 12345, -1)
    assert not why_unsafe_to_write(tmp_path)
