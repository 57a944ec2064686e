"""Somebody wants the run to end: what a signal of a cluster's scheduler does to each process.

supervisor       the first TERM, HUP or USR2 lets the run save what it has, a second ends it at
                 once (StopRequest); before there is anything to save, the first does
ranks, rollouts  the first is passed on to the run by its file `stop`: a scheduler may signal
                 every task of a job, and they must not die before the checkpoint
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl.run.folder import RunFolder

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
AT_ONCE = 130  # exit status of a run that was given no time to save, as after Ctrl-C


class Stopped(SystemExit):
    """The run ended because a signal asked for it; exit status 0 if all is saved."""

    def __init__(self, number: int | None, status: int = 0) -> None:
        """`number`: of the signal that asked."""
        super().__init__(status)
        self.number = number

    def __reduce__(self) -> tuple[type["Stopped"], tuple[int | None, object]]:
        """Cross to another process whole."""
        return Stopped, (self.number, self.code)

    def hand_on(self) -> None:
        """Give the signal to whoever took it before us: submitit then queues the job once more."""
        if self.number is not None and callable(signal.getsignal(self.number)):
            signal.raise_signal(self.number)


class StopRequest:
    """What signals ask of the supervisor.

    They stop a run as Ctrl-C does, unless it `waits`: then the first of them only sets `asked`.
    """

    def __init__(self) -> None:
        self.waits = self.asked = False
        self.number: int | None = None  # of the first signal

    def __call__(self, number: int, *_: object) -> None:
        """Handle a signal."""
        is_first, self.number = self.number is None, self.number or number
        if not (self.waits and is_first):
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stopped_by_signals() -> Iterator[StopRequest]:
    """Handle signals for as long as the block lasts; yield what they asked for.

    Raises:
        Stopped: one of them ended the block at once.

    """
    stop = StopRequest()
    numbers = [
        number
        for number in _SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup: the terminal may go
    ]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stop
    except KeyboardInterrupt as interrupt:
        if stop.number is None:
            raise
        raise Stopped(stop.number, AT_ONCE) from interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on_signals(run_folder: RunFolder) -> None:
    """Let the first TERM or USR2 to this part of a run stop the run, and a second end this part."""
    was_asked = False

    def pass_on(number: int, _: object) -> None:
        nonlocal was_asked
        if was_asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        was_asked = True
        with suppress(OSError):  # the folder is gone, or its disk is full: then others must say it
            run_folder.stop_request.touch()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, pass_on)
