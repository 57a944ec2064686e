"""Which runs belong to one arm, and how arms are named."""

import pytest

from lab.report.arms import arms_of
from lab.report.run import Run


def run(name, *overrides, commit="", **config) -> Run:
    return Run(name=name, overrides=overrides, config=config, commit=commit)


@pytest.mark.parametrize(
    ("arms", "names"),
    [
        ([["loss=grpo"], ["loss=cispo"]], ["grpo", "cispo"]),
        ([["optim.learning_rate=0.1"], ["optim.learning_rate=0.2"]],
         ["learning_rate=0.1", "learning_rate=0.2"]),
        ([["trainer.compile=true"], ["trainer.compile=false"]], ["compile=true", "compile=false"]),
        ([["kl=null"], ["kl=k3"]], ["kl=null", "kl=k3"]),
        ([["optim.rate=0.1"], ["optim.rate=auto"]], ["rate=0.1", "rate=auto"]),
        ([["loss=grpo"], ["env=wiki"]], ["loss=grpo", "env=wiki"]),
        ([["loss=grpo", "kl=k3"], ["loss=cispo", "kl=k3"]], ["grpo", "cispo"]),
        ([["kl=k3", "loss.clip=1"], ["kl=k2", "loss.clip=1"], ["kl=k2", "loss.clip=2"]],
         ["k3 clip=1", "k2 clip=1", "k2 clip=2"]),
        ([["loss=grpo"], []], ["loss=grpo", "(defaults)"]),
        ([["a.x=1", "b.x=1"], ["a.x=2", "b.x=2"]], ["a.x=1 b.x=1", "a.x=2 b.x=2"]),
        ([["loss=grpo"]], ["(defaults)"]),
    ],
)  # fmt: skip
def test_the_name_of_an_arm_is_as_short_as_the_others_allow(arms, names):
    assert [arm.name for arm in arms_of([run("r", *overrides) for overrides in arms])] == names


def test_long_names_are_cut_in_the_middle_and_stay_different():
    paths = [f"prompts/{'long' * 9}/{name}.txt" for name in ("brief", "wordy")]
    paths.append(f"prompts/{'long' * 9}x/brief.txt")
    arms = arms_of([run("r", f"env.system_prompt={path}") for path in paths])
    names = [arm.name for arm in arms]
    assert all(len(name) <= 44 for name in names)
    assert len(set(names)) == 3
    assert names[0].startswith("prompts/long")
    assert [arm.choices for arm in arms] == [{"system_prompt": path} for path in paths]


def test_a_setting_that_a_later_commit_added_makes_no_new_arm():
    """A sweep was resumed after an update of this code."""
    runs = []
    for commit, added in (("old", {}), ("new", {"listen": "unix"})):
        for loss in ("grpo", "cispo"):
            runs.append(run(f"{loss} {commit}", f"loss={loss}", commit=commit, loss=loss, **added))
    runs.append(run("tcp", "loss=grpo", "listen=tcp", commit="new", loss="grpo", listen="tcp"))
    names = sorted([one.name for one in arm.runs] for arm in arms_of(runs))
    assert names == [["cispo old", "cispo new"], ["grpo old", "grpo new"], ["tcp"]]


@pytest.mark.parametrize("order", [1, -1])
def test_a_setting_that_two_later_commits_do_not_share_separates_them(order):
    added = [("a", {}), ("b", {"clip": 1}), ("c", {"clip": 2}), ("d", {"clip.high": 2})]
    runs = [run(commit, "loss=mine", commit=commit, x=1, **more) for commit, more in added[::order]]
    together = [{one.name for one in arm.runs} for arm in arms_of(runs)]
    assert sum(map(len, together)) == 4
    assert all(len(names & {"b", "c", "d"}) <= 1 for names in together)


def test_arms_are_named_by_differing_settings_and_no_two_arms_share_a_name():
    runs = []
    for index, last in enumerate((1, 2, 3, 3)):
        first = min(index + 1, 3) // 3  # 0, 0, 1, 1
        runs.append(run(f"r{index}", a=first, b=first, c=first, d=last, e=index))
    runs += [run(f"grpo{f}", "loss=grpo", a=0, b=0, c=0, d=5, e=6, f=f) for f in (7, 8)]
    labels = [arm.label for arm in arms_of(runs)]
    assert len(set(labels)) == 6
    assert {"loss=grpo f=7", "loss=grpo f=8"} <= set(labels)
