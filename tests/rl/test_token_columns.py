"""A new quantity per token is two edits, and a third if a loss is to see it."""

import shutil
import subprocess
import sys

from tests.support.launching import ROOT

EDITS = {  # a column with the position in a turn, put before a line that begins so
    "rl/records.py": "    within: Annotated[Ints, Column(np.int32, -1, 'within')]\n    turns: Ann",
    "rl/sampling/row_builder.py": "        values['within'] = range(count)\n        self._kept +=",
    "losses/tokens.py": "    within: Tensor | None = None\n    candidate_logprobs:",
}
FOLLOWED = """
from pathlib import Path
import torch
from losses.aggregation import token_mean
from rl.inference.completion import Completion
from rl.learner.objective import Batch
from rl.records import Credit, RankBatch
from rl.rollouts.plan import plan_batch
from rl.rollouts.sampled_tokens import TokenRecord
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from rl.sampling.row_builder import RowBuilder
from rl.wire import pack, unpack
from tests.support.rollouts import group, rollout
rows, folder = RowBuilder(), RunFolder(Path("run"))
rows.add_turn(Completion([3, 4], [-0.5, -0.5], [0, 0], False, [1, 2]))
groups = [group([rollout(1.0, *rows.freeze())], [Credit(1.0, (1.0,))])]
(share,) = plan_batch(groups, token_mean, step=0, metrics={}, ranks=1, tokens_per_micro_batch=64)
(micro,) = unpack(pack(share), RankBatch).micro_batches
assert Batch.of(micro, torch.device("cpu"), 0).within.tolist() == [0, 1]
TokenRecord(num_groups=None).write(folder, 0, groups)
assert read_rows(folder, 0)[0].columns["within"].tolist() == [-1, -1, 0, 1]
"""


def test_a_new_column_reaches_the_loss_and_the_record_after_three_edits(tmp_path):
    for folder in ("rl", "losses", "envs", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file, text in EDITS.items():
        path, line = tmp_path / file, text.rpartition("\n")[2]
        path.write_text(path.read_text().replace(line, text))
    subprocess.run([sys.executable, "-c", FOLLOWED], cwd=tmp_path, check=True)
