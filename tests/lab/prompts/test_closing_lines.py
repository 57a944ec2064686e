"""The commands that a search prints can be run."""

import shlex
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from lab.evaluation.settings import check_evaluation
from lab.prompts.outputs import Candidate, closing_lines, next_commands
from rl.config.check import check
from rl.runtime.folder import RunFolder
from tests.support.composing import composed

LOCAL = {"env": "reverse-text", "model": "hf", "client": "renderer"}
REMOTE = ["client=messages", "client.url=http://localhost:1/v1", "client.model=name"]
HARD = ["+env@env.envs.hard=arithmetic", "+env.weights.hard=1"]
SEARCH = ["max_calls=9", "reflection.base_url=http://x/v1", "run_name=a", "env.system_prompt=Hm."]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "system_prompt.txt").write_text("Better.\n")
    return RunFolder(tmp_path / "mine")


def composed_by(line: str, tmp_path: Path) -> dict:
    python, program, *overrides = shlex.split(line)
    assert python == "python"
    primary = Path(program).stem
    return composed(*overrides, f"output_dir={tmp_path}", primary=primary)


@pytest.mark.parametrize(
    ("overrides", "choices"),
    [
        (["model.path=Qwen/Qwen3-0.6B"], LOCAL),
        (["env=arithmetic", "model.path=Qwen/Qwen3-0.6B"], LOCAL | {"env": "arithmetic"}),
        (["experiment=optimize-gsm8k"], LOCAL | {"env": "gsm8k", "model": "qwen3-0.6b"}),
        (["env=mixture", *HARD, "model.path=Qwen/Qwen3-0.6B"], LOCAL | {"env": "mixture"}),
    ],
)
def test_the_printed_commands_evaluate_and_train_the_same_policy_with_the_found_prompt(
    overrides, choices, folder, tmp_path
):
    search = composed(*overrides, *SEARCH, primary="optimize_prompt")
    evaluate, train = next_commands(folder, [*overrides, *SEARCH], choices, 50)
    evaluation, run = composed_by(evaluate, tmp_path), composed_by(train, tmp_path)

    check_evaluation(evaluation)
    check(run)
    assert evaluation["num_examples"] == 500
    adapted = next_commands(folder, [*overrides, "adapter_path=mine"], choices, 50)
    assert ["adapter_path=mine" in line for line in adapted] == [True, False]
    for config in (evaluation, run):
        assert config["model"] == search["model"]
        prompt = str(folder.path / "system_prompt.txt")
        assert config["env"] == search["env"] | {"system_prompt": prompt}


def test_one_example_has_no_standard_error_and_none_is_printed(folder, capsys):
    found = [Candidate("Hm.", [], 0, [0.0]), Candidate("Better.", [0], 3, [1.0])]
    Console().print(closing_lines(found, "max_calls=9", Counter(), folder, [], LOCAL))
    screen = " ".join(capsys.readouterr().out.split())
    assert "(+1.000)" in screen
    assert "±" not in screen
    assert "evaluate it on other examples" in screen


def test_a_remote_policy_gets_no_command_that_trains_it(folder, tmp_path):
    choices = LOCAL | {"client": "messages"}
    (evaluate,) = next_commands(folder, [*REMOTE, *SEARCH], choices, 50)
    assert check_evaluation(composed_by(evaluate, tmp_path)).client["model"] == "name"
