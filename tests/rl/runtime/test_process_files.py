"""Files by which the processes of a run report, lines of JSON, and files of other people's runs."""

import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from rl.runtime.commit import commit_of
from rl.runtime.failure import RunFailed, first_failure, reporting_failures
from rl.runtime.files import json_line
from rl.runtime.folder import RunFolder
from rl.runtime.given_files import load_json, load_yaml, regular_file, why_unsafe_to_write
from rl.runtime.network import Address, bind_collectives, own_address
from rl.runtime.status import PROGRESS_INTERVAL_S, Status, Stopwatch, read_statuses


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_an_address_is_parsed_and_formatted_and_a_wrong_one_refused_with_the_right_form():
    for text, address, url in (
        ("unix:/run/a b.sock", Address(path=Path("/run/a b.sock")), "http://vllm"),
        ("tcp://node-3:65535", Address(host="node-3", port=65535), "http://node-3:65535"),
        ("tcp://[::1]:8000", Address(host="::1", port=8000), "http://[::1]:8000"),
    ):
        assert Address.parse(text) == address
        assert (str(address), address.url) == (text, url)
    wrong = "unix: unix:a.sock tcp://host tcp://:80 tcp://h:0 tcp://h:99999 tcp://h:x http://h:80"
    for text in ("", *wrong.split(), "tcp://h:80/v1", "/run/a.sock"):
        with pytest.raises(ValueError, match=r"write unix:/path or tcp://host:port"):
            Address.parse(text)


def test_a_host_has_an_address_on_an_interface_that_collectives_use(monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "before")
    for interface, expected in ((None, "before"), ("lo", "lo")):
        bind_collectives(interface)
        assert [os.environ[name] for name in names] == [expected] * 2
    assert own_address("lo") == "127.0.0.1"
    with pytest.raises(RunFailed, match=r"=none9 has no IPv4 address: use one of .*\blo\b"):
        own_address("none9")


def test_a_phase_is_written_at_once_and_progress_at_most_five_times_a_second(folder):
    status = Status(folder, "trainer")

    def on_disk():
        return read_statuses(folder)["trainer"]

    before = time.time()
    status.set("training")
    since = on_disk().since
    assert before <= since <= time.time()
    seen, start = set(), time.monotonic()
    for number in range(1000):
        status.set(f"sampling: {number} of 1000")
        seen.add(on_disk().doing)
    assert "sampling: 0 of 1000" in seen
    assert len(seen) <= 2 + (time.monotonic() - start) / PROGRESS_INTERVAL_S
    began = on_disk().since
    assert began > since
    time.sleep(PROGRESS_INTERVAL_S + 0.05)
    status.set("sampling: 999 of 1000")  # it came too soon before
    assert on_disk().doing == "sampling: 999 of 1000"
    assert on_disk().since == began  # progress does not restart the clock of its phase
    watch = Stopwatch(status)
    with watch.phase("push", "pushing version 3"):
        assert on_disk().doing == "pushing version 3"
        time.sleep(0.01)
    assert watch.times.keys() == {"time/push"}
    assert 0.01 <= watch.times["time/push"] < 60


def test_damaged_statuses_are_left_out_and_an_unwritable_folder_is_ignored(tmp_path, folder):
    Status(folder, "rollouts").set("sampling")
    for name, content in (("torn", '{"doing": "samp'), ("list", "[1]"), ("poor", '{"doing": "x"}')):
        (folder.statuses / f"{name}.json").write_text(content)
    assert list(read_statuses(folder)) == ["rollouts"]
    assert read_statuses(RunFolder(tmp_path / "nowhere")) == {}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "status").write_text("a file where the folder should be")
    Status(RunFolder(tmp_path / "other"), "trainer").set("loading the model")


def failing(folder, error: BaseException, process: str = "rollouts") -> None:
    with pytest.raises(SystemExit) as ended, reporting_failures(folder, process):
        raise error
    assert ended.value.code == 1


RAISED_AT = failing.__code__.co_firstlineno + 2
IN_LIBRARY = ThreadPoolExecutor().submit(json.loads, 3).exception()  # in no frame of ours
ESCAPES = "it said \x1b[31mred\x1b]0;title\x07\x00 and\ttab\nline \x9b2J."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RunFailed("none could be scored"), "none could be scored"),
        (ValueError("raise max_seq_len"), "raise max_seq_len"),
        (KeyError("x"), f"KeyError: 'x' (test_process_files.py:{RAISED_AT})"),
        (IN_LIBRARY, f"TypeError: {IN_LIBRARY} (test_process_files.py:{RAISED_AT})"),
        (ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("no")])]), "OSError: no"),
        (RunFailed(ESCAPES), "it said red and\ttab\nline 2J."),
    ],
)
def test_the_message_is_for_the_user_and_the_traceback_for_the_log(error, message, folder, capsys):
    failing(folder, error)
    assert (first_failure(folder) or {})["message"] == message
    assert "Traceback" in capsys.readouterr().err


def test_the_first_failure_is_the_oldest_complete_report(folder):
    for process, time_ in (("a", 20.0), ("trainer.rank0", 10.0), ("trainer.rank1", 30.0)):
        failing(folder, RunFailed(process), process)
        path = folder.failures / f"{process}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": time_}))
    (folder.failures / "half.json").write_text('{"part": "ha')
    failing(folder, RunFailed("a consequence"), "trainer.rank0")
    for prefix, first in (("", "trainer.rank0"), ("trainer.rank1", "trainer.rank1"), ("a", "a")):
        assert first_failure(folder, prefix) == {"part": first, "message": first}


def test_neither_success_nor_an_interrupt_is_a_failure(folder):
    with reporting_failures(folder, "rollouts"):
        pass
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), reporting_failures(folder, "rollouts"):
            raise error
    assert first_failure(folder) is None


def test_an_object_that_json_does_not_know_becomes_text():
    for value, read in (
        ({"a": [1, 2.5, None, True, "ü"]}, {"a": [1, 2.5, None, True, "ü"]}),
        ([float("inf"), float("nan"), 1.0], [None, None, 1.0]),
        ({("a", 1): object}, {"('a', 1)": "<class 'object'>"}),
        ("\ud800", "\ud800"),
        ([10**5000], ["(int, which cannot be shown: ValueError)"]),
    ):
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
