"""Copy the files and commands of docs/a-new-idea.md and run them, with a script for vLLM."""

import json
import sys
from pathlib import Path

import pytest

from envs.episode import Episode
from envs.messages import assistant
from losses.groups import ScoredGroup
from tests.support import printed
from tests.support.launching import ROOT, SCRIPTED, Result, begin, ended, nightly

PAGE = ROOT / "docs" / "a-new-idea.md"
FILES, (_, TABLE, FIRST_LOOK, SWEEP) = printed.files(PAGE), printed.commands(PAGE)


@pytest.fixture(scope="module")
def relay(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("relay")
    printed.write(PAGE, folder)
    return folder


def do(command: str, folder: Path) -> Result:
    """Run a command as printed, with this interpreter and this checkout."""
    typed = command.replace("/path/to/offbyone", str(ROOT)).replace("python", sys.executable, 1)
    environment = {"PYTHONPATH": str(ROOT), "OFFBYONE_CACHE": str(folder / "cache")}
    return ended(begin(typed, folder, environment), folder / "outputs" / "first-look", 400)


def test_each_idea_is_one_file_and_one_yaml_and_the_table_of_the_loss_holds(relay):
    parts = {"env": "relay", "loss": "patient", "advantage": "turn_median"}
    code = {f"{name}.py" for name in parts.values()}
    settings = {f"conf/{group}/{name}.yaml" for group, name in parts.items()}
    sweep = "conf/does_patience_help.yaml"
    assert set(FILES) == {*code, *settings, "test_patient.py", sweep}
    assert "override evaluation: default" in FILES[sweep]  # arms are judged on the same examples
    done = do(TABLE, relay)
    assert done.status == 0, done.screen
    assert "1 passed" in done.screen


@pytest.mark.parametrize(
    ("said", "right"),
    [(["{word}", "{back}"], [1, 1]), (["{back}", "{back}"], [0, 1]), (["{word}"], [1]), ([], [])],
)
async def test_the_environment_scores_each_turn_by_itself(said, right, relay, monkeypatch):
    monkeypatch.syspath_prepend(str(relay))
    from relay import AGAIN, Relay  # pyright: ignore[reportMissingImports]

    env = Relay(shortest=3, longest=3, reward_weights={"right": 1.0})
    example = env.examples("train")[0]
    word = example.info["word"]
    messages = list(example.messages)
    for text in said:
        messages += [assistant(text.format(word=word, back=word[::-1])), AGAIN]
    assert await env.score(Episode(example, messages)) == {"right": right}


def test_the_advantage_subtracts_the_median_of_each_turn(relay, monkeypatch):
    monkeypatch.syspath_prepend(str(relay))
    from turn_median import turn_median  # pyright: ignore[reportMissingImports]

    rewards = [[1, 1], [1], [0, 0], None]  # medians 1 and, of two, 1/2
    group = ScoredGroup.by_hand([None] * len(rewards), turn_rewards=rewards)
    assert turn_median(group) == [[0, 0.5], [0], [-1, -0.5], []]
    assert turn_median(ScoredGroup.by_hand([], turn_rewards=[])) == []


@pytest.mark.parametrize(
    ("command", "wrong", "said"),
    [
        (FIRST_LOOK, "loss.patience=0", "loss.patience=0, but it must be > 0"),
        (FIRST_LOOK, "loss.patienc=1", "loss.patienc"),
        (FIRST_LOOK, "env.longest=1", "1 <= shortest <= longest"),
        (FIRST_LOOK, "group_size=1", "group_size"),
        (SWEEP, "batch_size=17", "batch_size=17 is not a multiple"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(command, wrong, said, relay):
    done = do(f"{command} {wrong}", relay)
    assert done.status == 2, done.screen
    assert said in done.screen


@nightly
def test_the_first_look_shows_what_the_page_says(relay):
    done = do(f"{FIRST_LOOK} {' '.join(SCRIPTED)}", relay)
    assert done.status == 0, done.screen[-6000:]
    steps = [line for line in done.metrics if "train/trust" in line]
    assert len(steps) == 3
    assert steps[0]["train/trust"] == 1.0  # nothing is stale in the first step
    assert all("reward/right/turn_0" in step for step in steps)
    (first, *_) = (done.folder / "rollouts" / "step_000000.jsonl").read_text().splitlines()
    rollout = json.loads(first)
    turns = max(1, rollout["turns"])
    assert len(rollout["turn_rewards"]["right"]) == rollout["turns"]
    assert turns == (1 if isinstance(rollout["advantage"], float) else len(rollout["advantage"]))
