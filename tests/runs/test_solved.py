"""A run whose buffer rejects all groups ends with status 0 if the task is solved, else with 1."""

import json

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

# A scripted server, because the end of a run does not depend on vLLM.
SCRIPTED = [
    "inference._target_=tests.support.scripted_vllm.ScriptedVLLM",
    "sync.max_mismatch=1e9",
    "model.warm_start=null",
    *("batch_size=8", "group_size=4", "max_steps=50", "buffer=difficulty", "sampler=sync"),
    "env=teachable",
]


@pytest.mark.parametrize(
    ("later", "status", "sentence"),
    [
        (1.0, 0, "ended before max_steps=50: the task is solved: the buffer rejected the last 64"),
        (0.0, 1, "the task is too easy or too hard for this policy"),
    ],
)
def test_the_run_says_the_reason_saves_and_exits_with_the_right_status(
    later, status, sentence, launcher, tmp_path
):
    groups = tmp_path / "conf" / "env"
    groups.mkdir(parents=True)
    node = {"_target_": "tests.support.teachable.Teachable", "later": later}
    choice = json.dumps({**node, "reward_weights": {"right": 1.0}})
    (groups / "teachable.yaml").write_text(choice)
    mine = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    result = launcher.run(f"later-{later}", mine, *SCRIPTED, warm=[])
    assert (result.status, sentence in result.screen) == (status, True), result.screen
    (saved,) = (result.folder / "checkpoints").iterdir()  # checkpoint_every is 50
    assert saved.name == "step_000003"
    rollouts = json.loads((saved / "state.json").read_text())["rollouts"]
    assert list(rollouts["reward_ranges"].values()) == [[0.0, 1.0]]
    assert rollouts["buffer"]["rejected"]["zero_spread"] >= 64
