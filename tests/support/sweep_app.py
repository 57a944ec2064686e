"""Define a Hydra program with real sweeps, whose runs only write metrics: no vLLM.

    python app.py --multirun "seed=range(3)" crash=error

`crash` names how the run of seed 1 fails. A file `mended` beside the program prevents it.
"""

import sys
from pathlib import Path

from tests.support.launching import ROOT, Process, begin

PROGRAM = r"""
import os
import signal
import sys
import time
from pathlib import Path

import hydra
from omegaconf import OmegaConf

from lab.cli.launch import Job, launch, as_hydra_task
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile, read_metrics
from rl.runtime.stop_request import Stopped, stopped_by_signals


@hydra.main(version_base=None, config_path=".", config_name="app")
@as_hydra_task
def main(job: Job):
    config = job.config
    run_folder = RunFolder(Path(config["output_dir"], config["run_name"]))
    first = len(read_metrics(run_folder))
    assert config["resume"] == (first > 0), "would begin anew what was begun"
    broken = config["seed"] == 1 and not Path("mended").exists()
    if broken and config["crash"] == "exit":
        raise SystemExit(3)
    metrics = MetricsFile(run_folder)
    OmegaConf.save(OmegaConf.create(config), run_folder.config)
    cores = "".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    with open("calls.txt", "a") as file:
        file.write(f"rate={config['rate']} seed={config['seed']} from {first} on {cores}\n")
    print("printed by a job", *job.command[1:])
    seed, noise = config["seed"], config["noise"]
    reward = config["rate"] + (seed if noise is None else noise * (seed * 5 % 7 - 3) / 3)
    # A test finds the process of a job by its open files.
    with stopped_by_signals() as stop, run_folder.metrics.open("a"):
        stop.waits = True
        for step in range(first, config["max_steps"]):
            if broken and config["crash"] == "error" and step == 2:
                raise RunFailed("vLLM is gone\nand more")
            metrics.append(step, {"train/reward": reward, "time/step": 6.0})
            time.sleep(config["pause"])
            if stop.asked:
                raise Stopped(stop.number)
    return config["rate"]


if __name__ == "__main__":
    launch(main)
"""
CONFIG = """# Does a higher rate help?
seed: 0
rate: 0.5
max_steps: 10
pause: 0.0
noise: null
crash: ""
resume: false
output_dir: outputs
run_name: s${seed}-${now:%H%M%S%f}
hydra:
  run: {dir: "${output_dir}"}
  sweep: {dir: "${output_dir}/sweeps/${now:%Y%m%d-%H%M%S}", subdir: "."}
  output_subdir: null
  job_logging: {root: null}
  hydra_logging: {root: null}
  callbacks:
    start: {_target_: lab.cli.sweep.SweepStart}
"""


class SweepApp:
    """Write the program into a folder and start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "app.py").write_text(PROGRAM)
        (folder / "app.yaml").write_text(CONFIG)

    def start(self, *arguments: str) -> Process:
        """Start it in a new process group, as a shell does, because Ctrl-C goes to a group."""
        environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "TMPDIR": str(self.folder)}
        return begin([sys.executable, "app.py", *arguments], self.folder, environment)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return its status and output."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def calls(self) -> list[str]:
        """Return the jobs that ran since the last call."""
        path = self.folder / "calls.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines
