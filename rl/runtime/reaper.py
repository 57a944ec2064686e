"""End process groups after the supervisor has died, whatever killed it.

`child.Reaper` starts this file as a script. Standard input carries `+group` and `-group` lines; its
end means that the supervisor has ended. This file imports only the standard library, so that the
process starts at once and stays small.
"""

import os
import signal
import sys
import time


def main() -> None:
    """Read until the pipe closes, then send TERM, wait two seconds, and send KILL."""
    # A scheduler signals every process of a job, and the reaper must end last.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:  # ends when the kernel closes the pipe, also after a KILL
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
