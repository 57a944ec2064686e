"""The prompt search with the real GEPA, a policy in the real vLLM, and a scripted teacher.

The policy has learned to write a word as it is and backwards, as the system prompt says. The
environment wants it backwards, and begins with the prompt that says the opposite.
"""

import json
import sys

import pytest

from tests.support.launching import COLD, ROOT, begin, ended
from tests.support.prompted_endpoint import PromptedEndpoint
from tests.support.word_either_way import BACKWARDS, FORWARDS

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

ENV = ["env._target_=tests.support.word_either_way.WordEitherWay", "env.min_length=3"]
ENV += ["env.max_length=3", "env.num_train=4000"]
TAUGHT = ["loss=sft", "sampler=demonstrations", "sampler.corruption_rate=0", "group_size=1"]
TAUGHT += ["batch_size=64", "max_steps=120", "optim.learning_rate=3e-3", "model.dtype=float32"]
PROPOSALS = ("```\nsideways\n```", "```\nforwards!\n```", f"```\n{BACKWARDS}\n```")


def test_the_search_improves_a_poor_prompt(launcher, tmp_path):
    result = launcher.succeed("taught", *ENV, *TAUGHT, warm=COLD)
    model = result.folder / "checkpoints" / "step_000120" / "hf"
    with PromptedEndpoint(PROPOSALS).listening() as teacher:
        command = [sys.executable, "optimize_prompt.py", *ENV, f"model.path={model}"]
        command += ["model.max_seq_len=256", "model.max_tokens=8", "model.dtype=float32"]
        command += ["model.renderer=qwen3", f"reflection.base_url={teacher.url}"]
        command += ["reflection.model=teacher", "num_train=30", "num_val=30", "max_calls=100"]
        command += ["num_rounds=6", f"output_dir={tmp_path}", "run_name=found"]
        done = ended(begin(command, ROOT, {}), tmp_path / "found")
    assert done.status == 0, done.screen
    found = json.loads((tmp_path / "found" / "metadata.json").read_text())
    assert found["start_score"] < 0.3  # right by chance for palindromes
    assert found["best_score"] > 0.6
    assert found["gain"] > 4 * found["gain_standard_error"]
    assert (tmp_path / "found" / "system_prompt.txt").read_text() == f"{BACKWARDS}\n"
    assert found["num_calls"] <= 100
    assert FORWARDS in teacher.teacher_asked[0]
