"""Execute the notebook of examples/ in an event loop, as Jupyter does, with a scripted server."""

import os
import sys

import pytest

from rl.runtime.folder import RunFolder
from tests.support.launching import ROOT, begin, ended

NOTEBOOK = ROOT / "examples" / "a-run-from-python.ipynb"
SCRIPTED = '"inference._target_=tests.support.scripted_vllm.ScriptedVLLM"'
SHORT = f'"max_steps=3", "batch_size=16", "group_size=8", "sampler=sync", {SCRIPTED}'
NO_WARMTH = '"sync.max_mismatch=1e9", "model.warm_start=null"'


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
def test_the_notebook_trains_draws_and_samples(tmp_path):
    changes = [
        f'"max_steps=60"=>{SHORT}, {NO_WARMTH}',
        f'"num_examples=20"=>"num_examples=2", "model.max_tokens=32", {SCRIPTED}',
    ]
    command = [sys.executable, "-m", "tests.support.notebooks", str(NOTEBOOK), *changes]
    result = ended(begin(command, tmp_path, {"PYTHONPATH": str(ROOT)}), tmp_path, 500)
    assert result.status == 0, result.screen
    assert result.screen.count("displayed image/png") == 3
    assert "displayed text/plain text/html <Config loss=cispo env=reverse-text" in result.screen
    assert "displayed text/plain text/html <Run " in result.screen
    assert "3 steps, last reward" in result.screen
    evaluation, run = sorted((tmp_path / "outputs").iterdir())
    assert len(RunFolder(evaluation).evaluated.read_text().splitlines()) == 4
    assert os.listdir(RunFolder(run).checkpoints) == ["step_000003"]
    # The command that resumes the run is that of a terminal.
    assert "offbyone\n- train" in RunFolder(run).overrides.read_text()
