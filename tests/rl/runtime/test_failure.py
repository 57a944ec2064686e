"""The error of a process becomes one message, and the supervisor finds the first."""

import json
import re
from contextlib import nullcontext

import pytest
import torch

from losses.tokens import TokenLoss
from rl.runtime.failure import RunFailed, first_failure, message_of, reporting_failures
from rl.runtime.folder import RunFolder


def failing(folder, error: BaseException, process: str = "rollouts") -> None:
    with pytest.raises(SystemExit) as ended, reporting_failures(RunFolder(folder), process):
        raise error
    assert ended.value.code == 1


RAISED_AT = failing.__code__.co_firstlineno + 2
ESCAPES = "it said \x1b[31mred\x1b]0;title\x07\x00 and\ttab\nline \x9b2J."


def reported(folder) -> str:
    report = first_failure(RunFolder(folder))
    assert report is not None
    return f"{report['part']}: {report['message']}"


def test_the_message_is_for_the_user_and_the_traceback_for_the_log(tmp_path, capsys):
    for number, (error, message) in enumerate(
        (
            (RunFailed("none could be scored"), "none could be scored"),
            (ValueError("raise max_seq_len"), "raise max_seq_len"),
            (KeyError("x"), f"KeyError: 'x' (test_failure.py:{RAISED_AT})"),
            (ExceptionGroup("tasks", [RunFailed("first"), RunFailed("other")]), "first"),
            (ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("no")])]), "OSError: no"),
            (RunFailed(ESCAPES), "it said red and\ttab\nline 2J."),
        )
    ):
        failing(tmp_path / str(number), error)
        assert reported(tmp_path / str(number)) == f"rollouts: {message}"
        assert "Traceback" in capsys.readouterr().err
    # The place is the last line that is in no library and does not check results.
    for number, call in enumerate((lambda: json.loads(3), lambda: TokenLoss(torch.zeros(()), {}))):
        folder = tmp_path / f"called{number}"
        try:
            call()
        except TypeError as error:
            failing(folder, error)
        assert re.search(r"^rollouts: TypeError: .* \(test_failure\.py:\d+\)$", reported(folder))


def test_the_first_failure_is_the_oldest_complete_report(tmp_path):
    for process, time in (("a", 20.0), ("trainer.rank0", 10.0), ("trainer.rank1", 30.0)):
        failing(tmp_path, RunFailed(process), process)
        path = tmp_path / "failures" / f"{process}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": time}))
    (tmp_path / "failures" / "half.new").write_text('{"part": "ha')
    failing(tmp_path, RunFailed("a consequence"), "trainer.rank0")
    assert message_of(ValueError("a lone \ud800 and \x7f\r")) == "a lone ? and "
    assert reported(tmp_path) == "trainer.rank0: trainer.rank0"
    for of, first in (("trainer.rank1", "trainer.rank1"), ("tr", "trainer.rank0")):
        assert (first_failure(RunFolder(tmp_path), of) or {})["part"] == first


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit])
def test_neither_success_nor_an_interrupt_is_a_failure(tmp_path, error):
    ended = pytest.raises(error) if error else nullcontext()
    with ended, reporting_failures(RunFolder(tmp_path), "rollouts"):
        if error:
            raise error
    assert first_failure(RunFolder(tmp_path)) is None
