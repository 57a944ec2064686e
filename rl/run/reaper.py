"""Ends process groups when the process that started us is gone, however it went.

Run as a script by `child.Reaper`. Standard input carries `+group` and `-group` lines; its end
means that the supervisor has died or is done. Imports only what Python starts with, to be small.
"""

import os
import signal
import sys
import time


def main() -> None:
    """Read until the pipe closes, then TERM, wait two seconds, KILL."""
    # A scheduler signals every process of a job; this one must be the last to go.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:  # until the kernel closes the pipe, which it does after a KILL too
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for sig, pause in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 0.0)):
        for group in list(groups):
            try:
                os.killpg(group, sig)
            except (ProcessLookupError, PermissionError):
                groups.discard(group)
        if groups:
            time.sleep(pause)


if __name__ == "__main__":
    main()
