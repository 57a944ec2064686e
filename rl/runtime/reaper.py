"""The reaper process, which ends the process groups of a run after the supervisor has died.

`child.Reaper` starts this file as a script. On standard input, `+group` registers a process group
and `-group` unregisters it. End of input means that the supervisor has ended. The file imports only
the standard library, so that the process starts fast and stays small.
"""

import os
import signal
import sys
import time


def main() -> None:
    """Register groups until standard input ends. Then send them TERM and, 2 s later, KILL."""
    # Ignore the signals that a scheduler sends to all processes, because the reaper must end last.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:  # the input ends when the supervisor ends
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
