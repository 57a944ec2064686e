"""How the processes of a run answer signals, for example those of a cluster's scheduler.

supervisor       after the first TERM, HUP or USR2 the run saves a checkpoint and ends; a second
                 ends it at once (StopRequest), as does the first before there is anything to save
ranks, rollouts  the first signal only creates the file `stop`, because a scheduler may signal
                 every process of a job, and these must not end before the checkpoint
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl.runtime.folder import RunFolder

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
AT_ONCE = 130  # exit status of a run that had no time to save, as after Ctrl-C


class Stopped(SystemExit):
    """A signal ended the run; exit status 0 if everything is saved."""

    def __init__(self, number: int | None, status: int = 0) -> None:
        """`number` is the signal."""
        super().__init__(status)
        self.number = number

    def __reduce__(self) -> tuple[type["Stopped"], tuple[int | None, object]]:
        """Pickle both arguments."""
        return Stopped, (self.number, self.code)

    def raise_signal_again(self) -> None:
        """Raise the signal again for the earlier handler. That of submitit requeues the job."""
        if self.number is not None and callable(signal.getsignal(self.number)):
            signal.raise_signal(self.number)


class StopRequest:
    """The supervisor's signal handler.

    A signal ends the run as Ctrl-C does. While `waits` is set, the first one only sets `asked`.
    """

    def __init__(self) -> None:
        self.waits = self.asked = False
        self.number: int | None = None  # the first signal

    def __call__(self, number: int, *_: object) -> None:
        """Handle a signal."""
        is_first, self.number = self.number is None, self.number or number
        if not (self.waits and is_first):
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stopped_by_signals() -> Iterator[StopRequest]:
    """Handle signals while the block runs; yield the handler.

    Raises:
        Stopped: a signal ended the block at once.

    """
    stop = StopRequest()
    numbers = [
        number
        for number in _SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores HUP on purpose
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
    """Make the first TERM or USR2 to this process stop the run, and a second end the process."""
    was_asked = False

    def pass_on(number: int, _: object) -> None:
        nonlocal was_asked
        if was_asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        was_asked = True
        with suppress(OSError):  # the folder is deleted or the disk is full
            run_folder.stop_request.touch()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, pass_on)
