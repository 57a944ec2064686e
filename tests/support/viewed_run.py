"""Copy a recorded run (tests/support/viewed): tools, thinking, a fork and a rejected group.

It has three steps of three groups of four rollouts, a token record of two ranks, and evaluations of
versions 0 and 2. In its record the grad of a token is -weight * advantage * ratio, and 0 where the
ratio is beyond 1 +- 0.2 on the advantage's side. Rollout 000001.0 contains HOSTILE, rollout
000001.1 has a fork, and the last group of step 1 was rejected.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rl.runtime.folder import step_of

RECORDED = Path(__file__).with_name("viewed")
TOKENIZER = Path(__file__).parents[2] / "models" / "tiny-wiki"
HOSTILE = '<img src=x onerror="window.broken = true"><script>window.broken = true</script>'
NUM_STEPS, NUM_GROUPS = 3, 3


def copy_run(path: Path, *, steps: int = 3, evaluated: bool = True, record: bool = True) -> Path:
    """Copy the first steps of the run into a folder and return it."""
    shutil.copytree(RECORDED, path, dirs_exist_ok=True)
    (path / "model.txt").write_text(f"{TOKENIZER}\nfingerprint\n")
    for file in path.glob("*/step_*"):
        if step_of(file) >= steps:
            file.unlink()
    if not evaluated:
        shutil.rmtree(path / "evaluations")
    if not record:
        shutil.rmtree(path / "tokens")
    return path


def add_step(path: Path, step: int, *, is_trained: bool = True) -> None:
    """Repeat a recorded step under another number; the ranks may not have written their files."""
    source = step % NUM_STEPS
    shift = NUM_GROUPS * (step - source)

    def renamed(identity: str) -> str:
        return f"{int(identity[:6]) + shift:06d}{identity[6:]}"

    for file in RECORDED.glob(f"*/step_{source:06d}*"):
        target = path / file.parent.name / file.name.replace(f"{source:06d}", f"{step:06d}")
        if file.suffix == ".jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            for line in lines:
                line |= {"group": line["group"] + shift, "id": renamed(line["id"])}
            target.write_text("".join(json.dumps(line) + "\n" for line in lines))
        elif is_trained or "rank" not in file.name:
            table = pq.read_table(file)
            ids = pa.array([renamed(identity) for identity in table["id"].to_pylist()])
            pq.write_table(table.set_column(0, "id", ids), target)
