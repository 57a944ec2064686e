"""A run whose processes are started by hand, one command each: two ranks connect over TCP."""

import os
import subprocess
import sys
from pathlib import Path

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics
from tests.support.families import wait_until

REPO = Path(__file__).parents[2]
STARTS_S = 120.0


def start(command: list[str], log: Path, **env: str) -> subprocess.Popen:
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=REPO, env={**os.environ, **env}, stdout=file, stderr=subprocess.STDOUT
        )


def test_processes_that_are_started_by_hand_train_together_and_end_with_the_run(tmp_path):
    overrides = [
        *("cluster=manual", "cluster.gpus=false", "cluster.interface=lo", "trainer.ranks=2"),
        *("loss=sft", "sampler=demonstrations", "model.warm_start=null", "max_steps=2"),
        *("batch_size=16", "group_size=1", f"output_dir={tmp_path}", "run_name=run"),
    ]
    folder = RunFolder(tmp_path / "run")
    processes = [start([sys.executable, "train.py", *overrides], tmp_path / "train.log")]
    try:
        assert wait_until(folder.commands.exists, STARTS_S)
        assert wait_until(lambda: len(folder.commands.read_text().splitlines()) == 3, 10.0)
        for number, line in enumerate(folder.commands.read_text().splitlines()):
            assert "TMPDIR" not in line  # each host has its own
            assert "TORCHINDUCTOR" not in line  # each host compiles by its own settings
            command = ["env", *line.split()]
            processes.append(start(command, tmp_path / f"part{number}.log"))
        statuses = [process.wait(STARTS_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert statuses == [0, 0, 0, 0], logs
    assert [line["step"] for line in read_metrics(folder)] == [0, 1]
    assert folder.num_saved_steps() == 2
    assert not folder.private.key.exists()  # the run deletes its key
    said = " ".join((tmp_path / "train.log").read_text().split())
    assert str(folder) in said
    assert "OMP_NUM_THREADS where there is no GPU; LOCAL_RANK counts the ranks of one host:" in said


def test_a_process_without_a_prepared_run_says_what_to_do(tmp_path):
    command = [sys.executable, "-m", "rl.rollouts", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "start python train.py cluster=manual first" in done.stderr
