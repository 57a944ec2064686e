"""What compare_losses.py prints, writes and computes for a recorded batch, as stored files."""

import re

from lab.losses.arms import arms_of
from lab.losses.command import main
from lab.losses.recorded import recorded_batches
from rl.runtime.metrics import MetricsFile
from tests.support.golden import golden
from tests.support.outcomes import numbers_in
from tests.support.recorded_run import STEP, record_run


def words_of(text):
    return [numbers_in(line.split()) for line in text.splitlines() if line.strip()]


def test_a_comparison_of_several_losses(tmp_path, capsys):
    """The tables, the tokens that differ most, the page, and each arm's objective and gradient."""
    folder = record_run(tmp_path, "kl.beta=0.1", "correction=tis_token")
    metrics = MetricsFile(folder)
    metrics.append(STEP, {"train/kl_beta": 0.1})
    metrics.close()
    words = ["loss=gspo", "aggregation=sequence_mean,turn_mean", "correction=none"]
    assert main([str(tmp_path), *words, "tokens=3"]) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "<folder>")
    body = re.sub(r"<style.*?</style>", "", (tmp_path / "losses.html").read_text(), flags=re.S)
    golden("losses/printed", words_of(printed))
    golden("losses/page", words_of(re.sub(r"<[^>]*>", "\n", body))[:160])
    found = {}
    for arm in arms_of(folder, ["loss=dapo", "advantage=group_zscore", "kl=k2"]):
        for batch in recorded_batches(folder, STEP):
            value, gradient = arm.gradient(batch, 0.1)
            sums = [value, gradient.sum().item(), gradient.abs().max().item()]
            found[f"{arm.name}, update {batch.update}"] = [*sums, arm.changes, arm.ignored]
    golden("losses/arms", found)
