"""Losses on recorded batches repeat the gradients of the run, and others are computed by hand.

The last tests are of step=true, which takes the optimizer step of a loss.
"""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pyarrow import parquet

from lab.losses.arms import _recompute_advantages, arms_of
from lab.losses.command import difference, main
from lab.losses.recorded import recorded_batches, recorded_tokens, source_of
from lab.losses.step import _rank_batch, take_steps
from lab.python_api import load_run
from losses.aggregation import token_mean
from losses.groups import Source
from rl.config.build import build
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.rollouts.plan import plan_batch, weighted_rows
from rl.runtime.metrics import MetricsFile
from rl.runtime.token_files import read_rows
from tests.support.composing import REPO
from tests.support.forked_groups import forked_groups
from tests.support.golden import golden
from tests.support.ranks import on_ranks
from tests.support.recorded_run import STEP, UPDATES, record_run

ALL = sorted(path.stem for path in (REPO / "conf" / "loss").glob("*.yaml"))
LOSSES = [name for name in ALL if not name.endswith("_topk")]  # those compare distributions


@pytest.mark.parametrize("loss", LOSSES)
def test_every_shipped_loss_repeats_its_recorded_gradient(loss, tmp_path):
    extra = {"gspo": [], "sft": ["sampler=demonstrations"]}.get(loss, ["correction=tis_token"])
    folder = record_run(tmp_path, f"loss={loss}", "kl.beta=0.1", *extra)
    (arm,) = arms_of(folder, [])
    for update in range(UPDATES):
        batch = recorded_tokens(tmp_path, STEP, update)
        assert batch.num_untrained > 0  # the third rollout of the first group
        _, gradient = arm.gradient(batch, 0.1)
        assert batch.grads.abs().max() > 0
        torch.testing.assert_close(gradient, batch.grads, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("changed", "words", "problem"),
    [
        ("", ["loss=jsd_topk"], r"compares distributions .*: add step=true"),
        ("reward.normalise_each=true", [], "from a critic, a KL penalty in the reward or"),
        ("loss=ppo", [], "from a critic, a KL penalty in the reward or"),
        ("kl.place=reward kl.beta=0.1", [], "from a critic, a KL penalty in the reward or"),
        ("", ["loss=reinforce_pp"], "cannot compute batch_credit from new advantages"),
    ],
    ids=["distributions", "normalised rewards", "critic", "penalty in the reward", "batch credit"],
)
def test_an_arm_that_the_record_cannot_give_is_refused(changed, words, problem, tmp_path):
    folder = record_run(tmp_path, *changed.split())
    with pytest.raises(ValueError, match=problem):
        arms_of(folder, ["advantage=group_zscore", *words])


def test_another_arm_equals_the_record_of_a_run_with_it(tmp_path):
    choices = ["loss=gspo", "aggregation=prompt_mean", "correction=icepop", "kl.beta=0.3"]
    ours = record_run(tmp_path / "ours", "advantage=group_zscore")
    theirs = record_run(tmp_path / "theirs", *choices)
    own, arm = arms_of(ours, choices)
    assert arm.changed_keys == ["loss", "correction", "kl", "aggregation"]
    assert own.changed_keys == []
    # The advantage is the run's, so batch_credit can stay.
    _, same = arms_of(ours, ["loss=reinforce_pp", "advantage=group_zscore"])
    assert same.changed_keys == ["loss"]
    batch, other = recorded_tokens(ours.path, STEP, 1), recorded_tokens(theirs.path, STEP, 1)
    _, gradient = arm.gradient(replace(batch, tokens=other.tokens), 0.0)
    torch.testing.assert_close(gradient, other.grads, rtol=1e-6, atol=1e-9)
    without = replace(batch, tokens=replace(batch.tokens, ref_logprobs=None))
    with pytest.raises(ValueError, match="the run recorded no reference logprobs: remove kl="):
        arm.gradient(without, 0.0)
    with pytest.raises(ValueError, match="no token record of update 2 of step 5"):
        recorded_tokens(ours.path, STEP, UPDATES)


def test_another_advantage_is_that_of_the_recorded_rewards(tmp_path):
    folder = record_run(tmp_path)
    _, arm = arms_of(folder, ["advantage=none"])
    path = folder.rollouts_of(STEP)
    lines = {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}
    for line in lines.values():  # as if every rollout was penalised for its length
        line["shaped_reward"] = line["shaped_reward"] and line["shaped_reward"] - line["tokens"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    batch = recorded_tokens(tmp_path, STEP)
    rewards = [lines[id]["shaped_reward"] for id in batch.rollout_ids]
    expected = torch.tensor([r or 0.0 for r in rewards])[batch.tokens.sequence_ids]
    given = replace(batch, tokens=replace(batch.tokens, advantages=expected))
    own, _ = arms_of(folder, ["advantage=none"])
    torch.testing.assert_close(arm.gradient(batch, 0.0)[1], own.gradient(given, 0.0)[1])
    lines["000001.0"]["turn_rewards"] = [1.0]
    with pytest.raises(ValueError, match="rewards per turn: remove advantage="):
        arm.gradient(replace(batch, lines=lines), 0.0)


def test_the_id_of_a_rollout_says_where_it_comes_from():
    found = [source_of(id) for id in ("000001.2", "000001.2@4", "-000001.0")]
    assert found == [Source.POLICY, Source.REPLAY, Source.DEMONSTRATION]


def test_a_difference_by_hand():
    base, arm = torch.tensor([3.0, 0.0, 1.0, 0.0, -2.0]), torch.tensor([3.0, 4.0, -1.0, 0.0, 0.0])
    cosine, norm, *shares = difference(base, arm)
    assert cosine == f"{8 / (14 * 26) ** 0.5:.4f}"
    assert norm == f"{(26 / 14) ** 0.5:.4g}"
    assert shares == ["25.0 %"] * 4
    base[0] = float("nan")
    assert difference(base, arm) == ["not finite", *"-----"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=wiki-search"], "env cannot be compared: choose from loss, correction"),
        (["loss=cspo"], "did you mean cispo?"),
        (["loss=gspo", "steps=1..4"], "steps=1..4: choose from the recorded steps 5 to 5"),
        (["loss=[gspo"], "loss=[gspo cannot be read: write key=value"),
    ],
)
def test_a_mistake_is_one_sentence(words, said, tmp_path, capsys):
    record_run(tmp_path)
    assert main([str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_only_a_whole_batch_has_another_aggregation_or_an_optimizer_step(tmp_path):
    folder = record_run(tmp_path)
    text = folder.config.read_text().replace("num_groups: null", "num_groups: 0")
    folder.config.write_text(text)  # the whole batch of a skipped step is recorded nevertheless
    path = folder.rollouts_of(STEP)  # one more rollout, which has no token and so no recorded row
    line = {**json.loads(path.read_text().splitlines()[0]), "id": "000001.9", "tokens": 0}
    path.write_text(f"{path.read_text()}{json.dumps({**line, 'used': True})}\n")
    arms = [arms_of(folder, [word])[1] for word in ("aggregation=turn_mean", "loss=m2po")]
    arms += arms_of(folder, [], has_model=True)
    for one in arms:
        one.with_credit(recorded_tokens(tmp_path, STEP))
    for path in folder.tokens.iterdir():
        parquet.write_table(parquet.read_table(path, filters=[("id", "<", "000002")]), path)
    batch = recorded_tokens(tmp_path, STEP)
    for one in arms:
        with pytest.raises(ValueError, match="batch of step 5, but the run recorded only some of"):
            one.with_credit(batch)
    (own,) = arms_of(folder, [])
    torch.testing.assert_close(own.gradient(batch, 0.0)[1], batch.grads)


@pytest.mark.parametrize("key", ["loss.clip_high", "reward.length_penalty", "kl.beta"])
def test_a_run_with_a_schedule_is_compared_at_the_value_of_the_step(key, tmp_path):
    schedule = "{_target_:rl.schedule.linear,start:0,end:4,steps:10}"
    ours = record_run(tmp_path / "ours", f"{key}={schedule}")
    if not key.startswith("reward"):
        _, other = arms_of(ours, [f"{key}.start=1"])
        assert other.changed_keys == [key.partition(".")[0]]
    theirs = record_run(tmp_path / "theirs", f"{key}=2.0")  # its value at step 5 of 10
    beta = 2.0 if key == "kl.beta" else 0.0
    (expected,) = arms_of(theirs, [])
    batch = recorded_tokens(ours.path, STEP)
    for arm in arms_of(ours, ["correction=none"]):
        gradient = arm.gradient(batch, beta)[1]
        assert torch.equal(gradient, expected.gradient(batch, beta)[1])


def test_rollouts_of_different_roles_are_in_different_groups(tmp_path):
    folder = record_run(tmp_path)
    lines = [json.loads(line) for line in folder.rollouts_of(STEP).open()]
    for line in lines:
        line["role"] = "judge" if line["id"].endswith(".2") else "player"
    folder.rollouts_of(STEP).write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = recorded_tokens(tmp_path, STEP)
    groups = {}
    for id, place in zip(batch.rollout_ids, batch.tokens.sequence_ids.unique(), strict=True):
        where = batch.tokens.sequence_ids == place
        groups[id] = batch.tokens.group_ids[where].unique().item()
    assert groups["000001.0"] == groups["000001.1"] != groups["000001.2"]
    _, arm = arms_of(folder, ["advantage=group_mean", "aggregation=token_mean"])
    alone = [line["id"] for line in lines if line["role"] == "judge"]
    seen = _recompute_advantages(batch, arm)
    for id, row in zip(batch.rollout_ids, range(len(batch.rows)), strict=True):
        if id in alone:
            assert not seen.advantages[batch.tokens.sequence_ids == row].any()


def test_a_table_of_tokens_also_has_the_rows_that_were_not_trained(tmp_path):
    record_run(tmp_path)
    run = load_run(tmp_path)
    table = run.tokens(STEP)
    recorded = read_rows(run.folder, STEP)
    assert len(table) == sum(len(row.sampled["mask"]) for row in recorded)
    assert set(table.id[table.groupby("id").pi.transform("count") == 0]) == {"000000.2"}
    assert list(run.tokens(STEP + 1).columns) == []


def words_of(text):
    """Return words by line, and floats in place of numbers: CPUs round the last digit."""
    number = r"[-+]?\d+\.\d+(?:e[-+]?\d+)?"
    return [
        [float(word) if re.fullmatch(number, word) else word for word in line.split()]
        for line in text.splitlines()
        if line.strip()
    ]


def test_a_comparison_of_several_losses(tmp_path, capsys):
    """The tables, the tokens that differ most, the page, and each arm's objective and gradient."""
    folder = record_run(tmp_path, "kl.beta=0.1", "correction=tis_token")
    metrics = MetricsFile(folder)
    metrics.append(STEP, {"train/kl_beta": 0.1})
    words = ["loss=gspo", "steps=5..", "aggregation=sequence_mean,turn_mean", "correction=none"]
    assert main([str(tmp_path), *words, "tokens=3"]) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "<folder>")
    body = re.sub(r"<style.*?</style>", "", (tmp_path / "losses.html").read_text(), flags=re.S)
    assert body.count("<figure>") == 10
    golden("losses/printed", words_of(printed))
    golden("losses/page", words_of(re.sub(r"<[^>]*>", "\n", body))[:160])
    found = {}
    for arm in arms_of(folder, ["loss=dapo", "advantage=group_zscore", "kl=k2"]):
        for batch in recorded_batches(folder, STEP):
            value, gradient = arm.gradient(batch, 0.1)
            sums = [value, gradient.sum().item(), gradient.abs().max().item()]
            found[f"{arm.name}, update {batch.update}"] = [*sums, arm.changed_keys, arm.ignored]
    golden("losses/arms", found)


FAST = ("model.dtype=float32", "optim.learning_rate=0.01", "optim.warmup_steps=0")


def answers(learner, batch):
    """Return log pi of each rollout."""
    sums = torch.zeros(18)
    for micro in batch.micro_batches:
        tokens = Batch.of(micro, torch.device("cpu"), STEP)
        sums.index_add_(0, tokens.rollout_ids, learner.policy.score(tokens))
    return sums


@pytest.mark.parametrize("world", [1])
@on_ranks
def test_the_step_of_a_loss_is_that_of_a_run_with_it(setup):
    folder = record_run(setup.new_folder(), *FAST)
    record_run(folder.path, *FAST, step=STEP + 1)  # the same answers, held out here
    path = folder.rollouts_of(STEP + 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:  # the recorded advantages are 0 or above
        if line["id"].endswith(".1"):
            line["advantage"] = -1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.set_model(setup.sources["float32"])
    run = Run.load(folder.config)
    learner, checkpoint = Learner(run, folder, setup.ranks), folder.checkpoint(STEP)
    checkpoint.mkdir(parents=True)
    learner.save(checkpoint)
    groups = forked_groups(num_groups=6)
    all_train = [[replace(one, trains=True) for one in group.credits] for group in groups]
    trains = [replace(g, credits=tuple(c)) for g, c in zip(groups, all_train, strict=True)]
    options = {"step": STEP, "ranks": 1, "tokens_per_micro_batch": 99, "metrics": {}}
    batch, everything = (
        plan_batch(some, build(run.aggregation), **options)[0] for some in (groups, trains)
    )
    before = answers(learner, everything)
    learner.update(batch)
    change = answers(learner, everything) - before
    worse = torch.arange(len(change)) % 3 == 1
    better = torch.tensor([c.advantages[0] > 0 for group in groups for c in group.credits]) & ~worse
    arms = arms_of(folder, ["loss=gspo"], has_model=True)
    own, other = take_steps(folder, arms, checkpoint)
    expected = (change[better].mean(), change[worse].mean(), change.abs().mean())
    for found, value in zip(own[1:], expected, strict=True):
        assert abs(float(found) - float(value)) < 2e-4
    assert abs(float(own[3])) > 0.01
    assert other[0] == "loss=gspo"
    assert other[1:] != own[1:]


@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_that_compares_rollouts_gets_each_group_whole(whole, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"step_whole_{whole}".lower()
    (tmp_path / f"{name}.py").write_text(f"whole_groups = {whole}\ndef mine(tokens): ...\n")
    rows = weighted_rows(forked_groups(num_groups=6), token_mean)
    run, learner = SimpleNamespace(loss={"_target_": f"{name}.mine"}), SimpleNamespace()
    learner.shares_prefixes = False
    batch = _rank_batch(run, learner, rows, STEP)  # advantages of 0 are apart, except in a group
    places = [{*micro.group_ids.tolist()} for micro in batch.micro_batches]
    assert (sum(map(len, places)) == len(set().union(*places))) is whole


@pytest.mark.parametrize(
    ("choice", "step"),
    [
        pytest.param("", STEP + 1, id="no next step"),
        *((one, STEP) for one in ("sampler.top_k=20", "kl=k1", "loss=ppo")),
        ("deepspeed=zero1 trainer.ranks=2", STEP),
    ],
)
def test_a_run_without_a_usable_checkpoint_or_record_is_refused(choice, step, tmp_path, capsys):
    folder = record_run(tmp_path, *choice.split())
    record_run(tmp_path, *choice.split(), step=STEP + 1)
    folder.checkpoint(step).mkdir(parents=True)  # nothing was recorded after STEP + 1
    assert main([str(tmp_path), "step=true"]) == 2
    assert "step=true needs a run with" in capsys.readouterr().err
