"""One rank of the trainer: python -m rl.trainer <run folder>; RANK, LOCAL_RANK, WORLD_SIZE set.

If ranks are on several hosts, the supervisor sets MASTER_ADDR and MASTER_PORT, too.
"""

import os
import sys
from pathlib import Path

from rl.runtime.failure import reporting
from rl.runtime.folder import RunFolder
from rl.runtime.stop_request import pass_on_signals
from rl.runtime.warning_lines import noting_warnings
from rl.trainer.loop import TrainingRun

if __name__ == "__main__":
    run_folder = RunFolder(Path(sys.argv[1]))
    name = f"trainer.rank{os.environ['RANK']}"
    pass_on_signals(run_folder)
    with reporting(run_folder, name), noting_warnings(run_folder, name):
        TrainingRun(run_folder).train()
