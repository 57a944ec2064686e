"""A new quantity per token is two edits, and a third if a loss is to see it."""

import json
import shutil
import subprocess
import sys

from tests.test_architecture import REPO

# A column with the position of a token in its turn: the table, its producer, what a loss sees.
TURNS = '    turns: Annotated[Ints, Column(np.int32, fill=-1, recorded_as="turns")]\n'
COUNT = "        count = len(token_ids)\n"
SEEN = "    candidate_logprobs: Tensor | None"
EDITS = [  # file, old text, new text
    ("rl/records.py", TURNS, TURNS + TURNS.replace("turns", "in_turn")),
    ("rl/sampling/row_builder.py", COUNT, COUNT + "        values |= {'in_turn': range(count)}\n"),
    ("losses/tokens.py", SEEN, f"    in_turn: Tensor | None = None\n{SEEN}"),
]
FOLLOWED = """
import json, sys
from pathlib import Path
import torch
from envs.episode import Example, StopReason
from losses.aggregation import token_mean
from rl.inference.completion import Completion
from rl.learner.objective import Batch
from rl.records import Credit, Group, RankBatch, Rollout
from rl.rollouts.plan import plan_batch
from rl.rollouts.sampled_tokens import TokenRecord
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from rl.sampling.row_builder import RowBuilder
from rl.wire import pack, unpack

rows = RowBuilder()
for prompt, sampled in (([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7, 8])):
    count = len(sampled)
    rows.add_turn(Completion(sampled, [-0.5] * count, [0] * count, False, prompt))
rollout = Rollout(rows.freeze(), [], 1.0, {}, StopReason.STOP, 2, 0.0)
group = Group(0, Example(0, "e", []), 0, (rollout,), (Credit(1.0, (1.0,)),))
sizes = {"ranks": 1, "tokens_per_micro_batch": 64}
(share,) = plan_batch([group], token_mean, step=0, metrics={}, **sizes)
(micro,) = unpack(pack(share), RankBatch).micro_batches
folder = RunFolder(Path(sys.argv[1]))
TokenRecord(num_groups=None).write(folder, 0, [group])
(recorded,) = read_rows(folder, 0)
tokens = Batch.of(micro, torch.device("cpu"), 0)
print(json.dumps([tokens.in_turn.tolist(), recorded.columns["in_turn"].tolist()]))
"""


def test_a_new_column_reaches_the_loss_and_the_record_after_three_edits(tmp_path):
    for folder in ("rl", "losses", "envs"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    for file, old, new in EDITS:
        text = (tmp_path / file).read_text()
        assert text.count(old) == 1, file
        (tmp_path / file).write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", FOLLOWED, tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen, recorded = json.loads(done.stdout.splitlines()[-1])
    assert (seen, recorded) == ([0, 1, 0, 1, 2], [-1, -1, 0, 1, -1, 0, 1, 2])
