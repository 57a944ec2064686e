"""Draw damaged inputs, read each within limits of time and memory, and return the problems."""

import faulthandler
import gc
import resource
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

SECONDS = 1.0  # processor time of a case; the tests allow more, because machines differ
HANGS_S = 1800  # seconds after which a case that hangs ends the process
MORE_MIB = 200  # growth of the largest memory in a case
ADDRESS_GIB = 4  # address space beyond that of the start


@dataclass(frozen=True)
class Reader:
    make: Callable[[Random], Any]  # returns a case, drawn with a random generator
    read: Callable[[Any], object]  # reads a case; it may return anything
    documented: tuple[type[Exception], ...] = ()  # the errors that the reader documents


class TooSlow(BaseException):
    """The error raised in a case that needs too much processor time."""


def input_of(reader: Reader, name: str, seed: int, number: int) -> Any:
    """Return the input of a case, which depends on nothing else."""
    return reader.make(Random(f"{name}:{seed}:{number}"))


def findings(
    reader: Reader,
    name: str,
    seed: int,
    numbers: Iterable[int],
    seconds: float = SECONDS,
    running: Callable[[int], object] = lambda _: None,
) -> Iterator[tuple[int, str]]:
    """Read these cases; yield the number and the problem of each that is a finding.

    `running` is called with the number of each case before it is read.
    """

    def raise_too_slow(*_: object) -> None:
        raise TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    most = pages * resource.getpagesize() + (ADDRESS_GIB << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.signal(signal.SIGPROF, raise_too_slow)
    try:
        for number in numbers:
            made = input_of(reader, name, seed, number)
            running(number)
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            # A collection could run a `__del__` of another case, which would swallow TooSlow.
            gc.disable()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                problem = problem_of(reader, made)
            except TooSlow:
                problem = f"took more than {seconds:g} s"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                gc.enable()
            if problem:
                yield number, problem
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def problem_of(reader: Reader, made: Any) -> str:
    """Read an input; return what is wrong, or "" if the outcome is documented."""
    before = _most_mib()
    try:
        reader.read(made)
    except reader.documented:
        pass
    except Exception as error:  # noqa: BLE001 any other error is a finding
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
        return f"{type(error).__name__}: {str(error)[:200]} ({where})"
    more = _most_mib() - before
    return f"needed {more:.0f} MiB more" if more > MORE_MIB else ""


def _most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
