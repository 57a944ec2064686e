"""Run one trainer rank: `python -m rl.trainer <run folder>`, started by the supervisor."""

import os
import sys
from pathlib import Path

from rl.runtime.failure import reporting_failures
from rl.runtime.folder import RunFolder
from rl.runtime.stop_request import pass_on_signals
from rl.runtime.warning_lines import noting_warnings
from rl.trainer.loop import TrainingRun

if __name__ == "__main__":
    sys.path.append(os.getcwd())  # the current folder may contain the user's modules
    run_folder = RunFolder(Path(sys.argv[1]))
    name = f"trainer.rank{os.environ['RANK']}"
    pass_on_signals(run_folder)
    with reporting_failures(run_folder, name), noting_warnings(run_folder, name):
        TrainingRun(run_folder).train()
