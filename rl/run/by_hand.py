"""What a part does that somebody started by hand: it looks for the end of the run by itself."""

import os
import sys
import threading
import time

from rl.run.folder import RunFolder

_TICK_S = 0.5
_OWN_END_S = 10.0  # a rank that is done ends by itself, and the supervisor may be quicker


def require_prepared(run_folder: RunFolder) -> None:
    """Leave with one sentence where no run was prepared."""
    if not run_folder.config.exists():
        sys.exit(f"{run_folder} holds no config.yaml: start python train.py cluster=manual first")


def end_with_run(run_folder: RunFolder) -> None:
    """End this process, with status 0, some time after the supervisor has ended the run."""

    def watch() -> None:
        while not run_folder.over.exists():
            time.sleep(_TICK_S)
        time.sleep(_OWN_END_S)
        os._exit(0)  # whatever it waits for: nobody will answer any more

    threading.Thread(target=watch, daemon=True).start()
