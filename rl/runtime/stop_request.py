"""Handle signals to a run's processes, for example from a cluster's scheduler.

supervisor       The first TERM, HUP or USR2 requests a checkpoint and the end of the run. A second
                 signal, or a signal before the first batch, ends the run at once (StopRequest).
ranks, rollouts  The first TERM or USR2 only creates the file `stop`, because a scheduler may signal
                 every process of a job, and these must not end before the checkpoint.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl.runtime.folder import RunFolder

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
EXIT_UNSAVED = 130  # exit status of a run that ended without a new checkpoint, as after Ctrl-C


class Stopped(SystemExit):
    """The exception that ends the program after a signal, with status 0 if all steps are saved."""

    def __init__(self, number: int | None, status: int = 0) -> None:
        super().__init__(status)
        self.number = number

    def __reduce__(self) -> tuple[type["Stopped"], tuple[int | None, object]]:
        """Make pickle keep the signal number and the exit status."""
        return Stopped, (self.number, self.code)

    def raise_signal_again(self) -> None:
        """Call the handler that was set before the run. Submitit's handler requeues the job."""
        if self.number is not None and callable(signal.getsignal(self.number)):
            signal.raise_signal(self.number)


class StopRequest:
    """Signal handler: set `asked` at the first signal if `waits`, else raise KeyboardInterrupt."""

    def __init__(self) -> None:
        self.waits = self.asked = False  # waits: whether the supervisor acts on `asked`
        self.number: int | None = None  # the number of the first signal

    def __call__(self, number: int, *_: object) -> None:
        is_first, self.number = self.number is None, self.number or number
        if not (self.waits and is_first):
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stopped_by_signals() -> Iterator[StopRequest]:
    """Handle signals while the block runs. Raise Stopped if a signal interrupted the block."""
    stop = StopRequest()
    before = {
        number: signal.signal(number, stop)
        for number in _SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # HUP stays ignored under nohup
    }
    try:
        yield stop
    except KeyboardInterrupt as interrupt:
        if stop.number is None:
            raise
        raise Stopped(stop.number, EXIT_UNSAVED) from interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on_signals(run_folder: RunFolder) -> None:
    """Install a handler: the first TERM or USR2 requests a stop, the second ends this process."""
    was_asked = False

    def pass_on(number: int, _: object) -> None:
        nonlocal was_asked
        if was_asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        was_asked = True
        with suppress(OSError):  # the run folder may be missing, or the disk full
            run_folder.stop_request.touch()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, pass_on)
