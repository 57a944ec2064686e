"""A part that cannot go on says why in one message, and the supervisor finds the first."""

import json
import re

import pytest

from rl.run.failure import RunFailed, first_failure, reporting
from rl.run.folder import RunFolder


def failing(folder, error: BaseException, part: str = "rollouts") -> None:
    with pytest.raises(SystemExit) as ended, reporting(RunFolder(folder), part):
        raise error
    assert ended.value.code == 1


RAISED_AT = failing.__code__.co_firstlineno + 2


def reported(folder) -> str:
    report = first_failure(RunFolder(folder))
    assert report is not None
    return f"{report['part']}: {report['message']}"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RunFailed("none could be scored"), "none could be scored"),
        (ValueError("raise max_seq_len"), "raise max_seq_len"),
        (KeyError("x"), f"KeyError: 'x' (test_failure.py:{RAISED_AT})"),
        (ExceptionGroup("tasks", [RunFailed("first"), RunFailed("other")]), "first"),
        (ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("gone")])]), "OSError: gone"),
    ],
    ids=["ours", "the user's", "a bug", "of a task", "of a task in a task"],
)
def test_the_message_is_for_the_user_and_the_traceback_for_the_log(
    tmp_path, capsys, error, message
):
    failing(tmp_path / "new", error)

    assert reported(tmp_path / "new") == f"rollouts: {message}"
    assert "Traceback" in capsys.readouterr().err


def test_the_place_of_an_error_is_the_last_line_that_is_not_a_librarys(tmp_path):
    try:
        json.loads(3)
    except TypeError as error:
        failing(tmp_path, error)
    assert re.search(r"^rollouts: TypeError: .* \(test_failure\.py:\d+\)$", reported(tmp_path))


def test_the_first_failure_is_the_oldest_not_the_first_by_name(tmp_path):
    for part, time in (("a", 20.0), ("trainer.rank0", 10.0), ("trainer.rank1", 30.0)):
        failing(tmp_path, RunFailed(part), part)
        path = tmp_path / "failures" / f"{part}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": time}))

    assert reported(tmp_path) == "trainer.rank0: trainer.rank0"


def test_a_report_that_is_being_written_is_not_there_yet(tmp_path):
    failing(tmp_path, RunFailed("whole"))
    (tmp_path / "failures" / "half.new").write_text('{"part": "ha')

    assert reported(tmp_path) == "rollouts: whole"
    assert len(list((tmp_path / "failures").iterdir())) == 2


def test_a_run_without_failures_has_no_report(tmp_path):
    with reporting(RunFolder(tmp_path), "rollouts"):
        pass

    assert first_failure(RunFolder(tmp_path)) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_being_told_to_stop_is_no_failure(tmp_path, error):
    with pytest.raises(error), reporting(RunFolder(tmp_path), "rollouts"):
        raise error

    assert first_failure(RunFolder(tmp_path)) is None


def test_control_characters_of_a_servers_text_do_not_reach_the_terminal(tmp_path):
    failing(tmp_path, RunFailed("it said \x1b[31mred\x1b]0;title\x07\x00 and\ttab\nline \x9b2J."))

    assert reported(tmp_path) == "rollouts: it said red and\ttab\nline 2J."
