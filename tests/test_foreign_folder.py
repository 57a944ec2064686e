"""Commands on the run folder of another person: each ends with a message and shows nothing else.

The folder tries to run code, to show a file from outside of it, to write to one, to keep a command
waiting for ever, to fill the memory, and to send escape codes to the terminal.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
LONGEST_S = 300  # only a command that waits for ever takes so long
ESCAPE, SECRET = "\x1b]0;owned\x07\x1b[2J", "the content of a file outside"
DEEP, DIGITS = "[" * 200_000 + "]" * 200_000, "9" * 200
ALIASES = "\n".join(
    f"k{i}: &a{i} [{','.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(30)
)


@dataclass
class Foreign:
    """A hostile run folder, and the file outside of it that its links name."""

    path: Path
    outside: Path

    def command(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program, and check what every program must do with this folder."""
        before = self.outside.read_bytes()
        python = [sys.executable, str(REPO / program), *arguments]
        cache = {"OFFBYONE_CACHE": str(self.outside.parent / "cache")}
        output = {"capture_output": True, "text": True, "timeout": LONGEST_S, "check": False}
        done = subprocess.run(python, cwd=self.path.parent, env={**os.environ, **cache}, **output)
        screen = done.stdout + done.stderr
        assert screen.strip()
        assert done.returncode in (0, 1, 2), screen
        assert "Traceback" not in screen
        assert not {"\x1b", "\x07"} & set(screen)
        assert SECRET not in screen
        assert self.outside.read_bytes() == before
        assert not (self.outside.parent / "code ran").exists()
        return done


@pytest.fixture
def foreign(tmp_path):
    """Return a folder whose files are hostile, wherever a command reads or writes one."""
    outside = tmp_path / "outside.jsonl"
    rollout = {"messages": [{"role": "user", "content": SECRET}], "env": "e", "reward": 1.0}
    outside.write_text(json.dumps(rollout) + "\n")
    run = tmp_path / "runs" / f"run{ESCAPE}name"
    for name in ("rollouts", "evaluations", "tokens", "failures", "status", "viewer"):
        (run / name).mkdir(parents=True)
    said = {**rollout, "messages": [{"role": "user", "content": f"a question{ESCAPE}"}]}
    said |= {"example": ESCAPE, "env": f"env{ESCAPE}", "id": "000000.0", "error": ESCAPE}
    huge = json.dumps({**said, "reward": -1, "tokens": -2}).replace("-1", DIGITS)
    deep = json.dumps(said).replace('"env', f'"deep": {DEEP}, "env', 1)
    lines = [json.dumps(said), DEEP, huge.replace("-2", "9" * 4000), deep, "\\ud800"]
    for name in ("rollouts/step_000000", f"rollouts/step_{DIGITS}", "evaluations/version_000001"):
        (run / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    links = ("rollouts/step_000002.jsonl", "evaluations/version_000002.jsonl")
    for name in (*links, "metrics.dropped", "lock"):  # the supervisor empties its lock file
        (run / name).symlink_to(outside)
    row = json.dumps(
        {"step": 0, "train/reward": 0.5, f"eval/reward{ESCAPE}": 1, "time/step": 1e300}
    )
    (run / "metrics.jsonl").write_text(f'{row}\n{DEEP}\n{{"step": {DIGITS}}}\n')
    changed = {"overrides": [f"loss={ESCAPE}grpo"], "command": [ESCAPE], "run_name": [ESCAPE]}
    values = (f"{name}: {json.dumps(value)}" for name, value in changed.items())
    (run / "overrides.yaml").write_text("\n".join(values))
    (run / "config.yaml").write_text(ALIASES)
    doing = f'{{"doing": "{DIGITS}", "since": {"9" * 4000}}}'
    (run / "status/trainer.rank0.json").write_text(doing)
    (run / "tokens/step_000000.rollouts.parquet").write_bytes(b"PAR1" * 99)
    (run / "viewer/index.duckdb").write_text("not ours")
    fifos = ("rollouts/step_000001.jsonl", "evaluations/version_000003.jsonl", "failures/a.json")
    fifos += ("status/rollouts.json", "tokens/step_000000.trainer.rank0.parquet", "model.txt")
    for name in fifos:
        os.mkfifo(run / name)
    return Foreign(run, outside)


def test_report_and_view_show_what_they_can_read(foreign):
    place = foreign.path.parent
    done = foreign.command("report.py", str(foreign.path), f"out={place}/report.html")
    assert "1 run" in done.stdout
    done = foreign.command("view.py", str(foreign.path), "step=0", f"export={place}/page.html")
    assert done.returncode == 0, done.stderr
    assert (place / "page.html").is_file()


def test_a_run_does_not_go_on_in_a_folder_with_foreign_files(foreign):
    plain = foreign.path = foreign.path.rename(foreign.path.parent / "plain")
    run = ["train.py", f"output_dir={plain.parent}", "run_name=plain", "model.warm_start=null"]
    done = foreign.command(*run, "resume=true")
    assert done.returncode == 2, done.stdout
    for path in [*plain.rglob("*step*"), plain / "metrics.jsonl"]:
        path.unlink()  # a folder without steps may be used again, if all of it is the user's
    done = foreign.command(*run)
    assert done.returncode == 2, done.stdout
    assert "is a link that leads out of" in done.stderr
