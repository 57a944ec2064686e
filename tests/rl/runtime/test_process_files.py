"""Files by which the processes of a run report: addresses, restarts, statuses and failures."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from losses.tokens import TokenLoss
from rl.runtime.endpoint import Endpoint, read_restart_request, request_restart
from rl.runtime.failure import RunFailed, first_failure, message_of, reporting_failures
from rl.runtime.folder import RunFolder
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


def test_each_start_of_a_server_is_published_until_the_next_run(folder):
    assert Endpoint.read(folder, "inference1") is None
    folder.endpoints.mkdir()
    request_restart(folder, "inference1", 2, "it hangs")
    requests = [("inference1", 2), ("inference1", 1), ("inference0", 2)]
    answers = [read_restart_request(folder, *request) for request in requests]
    assert answers == ["it hangs", None, None]
    for incarnation in (0, 1):
        started = Endpoint(Address(host="::1", port=7), incarnation, pid=12)
        started.write(folder, "inference1")
        assert Endpoint.read(folder, "inference1") == started
    Endpoint(started.address).write(folder, "rollouts")
    assert Endpoint.read(folder, "rollouts") == Endpoint(started.address, 0, os.getpid())
    folder.clear_process_files()
    assert Endpoint.read(folder, "inference1") is None


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
ESCAPES = "it said \x1b[31mred\x1b]0;title\x07\x00 and\ttab\nline \x9b2J."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RunFailed("none could be scored"), "none could be scored"),
        (ValueError("raise max_seq_len"), "raise max_seq_len"),
        (KeyError("x"), f"KeyError: 'x' (test_process_files.py:{RAISED_AT})"),
        (ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("no")])]), "OSError: no"),
        (RunFailed(ESCAPES), "it said red and\ttab\nline 2J."),
    ],
)
def test_the_message_is_for_the_user_and_the_traceback_for_the_log(error, message, folder, capsys):
    failing(folder, error)
    assert (first_failure(folder) or {})["message"] == message
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("call", [lambda: json.loads(3), lambda: TokenLoss(torch.zeros(()), {})])
def test_the_place_of_an_error_is_in_no_library_and_does_not_check_results(call):
    with pytest.raises(TypeError) as caught:
        call()
    assert re.search(r"^TypeError: .* \(test_process_files\.py:\d+\)$", message_of(caught.value))


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
