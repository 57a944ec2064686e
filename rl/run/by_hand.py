"""What a part does that somebody started by hand: it looks for the end of the run by itself."""

import os
import sys
import threading
import time

from rl.run.folder import RunFolder

_TICK_S = 0.5


def require_prepared(run_folder: RunFolder) -> None:
    """Leave with one sentence where no run was prepared."""
    if not run_folder.config.exists():
        sys.exit(f"{run_folder} holds no config.yaml: start python train.py cluster=manual first")


def end_with_run(run_folder: RunFolder, *, after_s: float = 0.0) -> None:
    """End this process, with status 0, some time after the supervisor has ended the run."""

    def watch() -> None:
        while not run_folder.over.exists():
            time.sleep(_TICK_S)
        time.sleep(after_s)
        os._exit(0)  # whatever it waits for: nobody will answer any more

    threading.Thread(target=watch, daemon=True).start()
