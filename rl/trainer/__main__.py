"""One rank of the trainer: python -m rl.trainer <run folder>; RANK, LOCAL_RANK, WORLD_SIZE set.

Where ranks are on several hosts MASTER_ADDR and MASTER_PORT, too, all as srun and torchrun do.
"""

import os
import sys
from pathlib import Path

from rl.run.by_hand import require_prepared
from rl.run.failure import reporting
from rl.run.folder import RunFolder
from rl.run.stop_request import pass_on_signals
from rl.run.warning_lines import noting_warnings
from rl.trainer.loop import TrainingRun

if __name__ == "__main__":
    run_folder = RunFolder(Path(sys.argv[1]))
    require_prepared(run_folder)
    part = f"trainer.rank{os.environ['RANK']}"
    pass_on_signals(run_folder)
    with reporting(run_folder, part), noting_warnings(run_folder, part):
        TrainingRun(run_folder).train()
