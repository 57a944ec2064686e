"""A user's functions are called once with made-up values: what they read, what they return."""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import dedent

import pytest

from rl.config.check import check_learned
from rl.config.facts import needs_reference
from rl.config.learned import Learned
from rl.config.schema import ConfigError, Run
from rl.dry_call.child import DryCall, _cache_file, _inputs
from rl.dry_call.examples import POOLS_CACHE, selects_by_rewards
from rl.dry_call.learn import learn, own_files
from rl.dry_call.tensors import RUN_METRICS
from tests.support.composing import REPO, changed, chosen, composed, with_choices

LOSSES = """
import dataclasses
import torch
from losses.cispo import cispo
from losses.gspo import gspo
from losses.tokens import TokenLoss, Tokens, ratio_to
from knobs_helpers import lesson

def alone(tokens):
    '''Reads no tokens.advantages.'''
    return TokenLoss(-tokens.logprobs * 0.9, {})
def at_random(tokens):
    return TokenLoss(-tokens.logprobs * (torch.rand(tokens.turns.shape) > 1e-9), {})
def with_gradients(tokens):
    (gradient,) = torch.autograd.grad(tokens.logprobs.exp().sum(), tokens.logprobs)
    return TokenLoss(-tokens.logprobs * gradient, {})
def by_hand(tokens: Tokens) -> TokenLoss:
    ratio = ratio_to(tokens.anchor, tokens.logprobs)
    return TokenLoss(-ratio * tokens.advantages, {})
def by_a_helper(tokens): return TokenLoss(-lesson(tokens) * tokens.logprobs, {})
def by_replacing(tokens):
    late = dataclasses.replace(tokens, staleness=tokens.staleness + 1)
    return cispo(late, clip_low=0.0, clip_high=5.0)
def by_shape(tokens):
    assert tokens.advantages.shape == tokens.logprobs.shape
    return TokenLoss(-tokens.logprobs * torch.ones_like(tokens.advantages), {})
def whole(tokens): return gspo(tokens, clip_low=3e-4, clip_high=4e-4)
"""
HELPERS = "def lesson(tokens): return tokens.advantages"
FIELDS = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
RATIO = {"rollout_logprobs", "old_logprobs"}
HEAD = "import torch\nfrom losses.tokens import TokenLoss, Tokens\n"


@pytest.fixture
def own(modules, config, monkeypatch):
    """Write a module, and return the configuration with one of its functions in a group."""
    monkeypatch.setattr("rl.dry_call.examples.ENV_TIMEOUT_S", 60.0)  # the machine may be busy
    (modules / "knobs_helpers.py").write_text(HELPERS)
    POOLS_CACHE.clear()

    def put(group, text, name="mine"):
        module = f"rl_own{len(list(modules.iterdir()))}"  # begins with rl, but is not in rl/
        (modules / f"{module}.py").write_text(text)
        return changed(config, {group: {"_target_": f"{module}.{name}"}})

    return put


def the_problem(config):
    with pytest.raises(ConfigError) as caught:
        learn(config)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        ("alone by_shape at_random with_gradients", set()),
        ("by_a_helper", {"advantages"}),
        ("by_hand by_replacing whole", {"advantages"} | RATIO),
    ],
)
def test_a_loss_reads_the_fields_whose_numbers_it_uses_however_it_gets_them(names, fields, own):
    for name in names.split():
        learned = learn(own("loss", LOSSES, name))
        assert {field for field in FIELDS if learned.reads({field})} == fields, name
        assert learned.is_supervised == (not fields)
        assert learned.uses_ratio == (fields >= RATIO)


def test_a_file_may_name_the_fields_that_a_branch_hides(own):
    hidden = HEAD + (
        "READS = ('logprobs', 'advantages')\n"
        "def mine(tokens):\n"
        "    if tokens.num_sequences > 100:\n"
        "        return TokenLoss(-tokens.advantages * tokens.logprobs, {})\n"
        "    return TokenLoss(-tokens.logprobs, {})\n"
    )
    assert learn(own("loss", hidden)).reads_advantages
    assert not learn(own("loss", hidden.replace("READS", "OTHER"))).reads_advantages
    problem = the_problem(own("loss", hidden.replace("'advantages'", "'advantage'")))
    assert "Tokens has no field advantage: name only fields" in problem


STATISTICS = f"""{HEAD}
class Mine:
    stays_near_reference = True
    whole_groups = True
    def statistics(self, tokens):
        %s
    def __call__(self, tokens, statistics):
        kept = (tokens.entropies > statistics[1] / statistics[0]).float()
        rollouts = tokens.rollout_ids.unique(return_inverse=True)[1]
        gap = tokens.logprobs - tokens.ref_logprobs
        loss = -kept * tokens.advantages * gap.new_zeros(2).index_add(0, rollouts, gap)[rollouts]
        return TokenLoss(loss, {{}})
"""
SUMS = "return torch.stack([torch.ones_like(tokens.entropies), tokens.entropies]).sum(1)"


def test_a_loss_with_statistics_and_whole_groups_may_learn_near_the_initial_policy(own):
    whole = "whole_groups = True\ndef mine(tokens): return TokenLoss(-tokens.logprobs / %s, {})\n"
    assert learn(own("loss", HEAD + whole % "tokens.entropies.mean()")).reads({"entropies"})
    config = own("loss", STATISTICS % SUMS, "Mine")
    learned = learn(config)
    fields = {"entropies", "rollout_ids", "logprobs", "ref_logprobs", "advantages"}
    assert set(learned.loss_reads) == fields
    check_learned(config, learned)
    assert needs_reference(config)
    config = own("loss", (STATISTICS % SUMS).replace("stays_near", "runs_from"), "Mine")
    assert not needs_reference(config)
    with pytest.raises(ConfigError, match="reference=initial is the policy before training"):
        check_learned(config, learn(config))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (SUMS.replace("sum", "mean"), "do not add up to the result for all tokens: return"),
        (SUMS.replace("(1)", "()"), "has statistics() that return a Tensor of shape []: return"),
        ("return 3.0", "has statistics() that return float 3.0: return finite sums over the"),
        (SUMS + " / 0 * 0", "has statistics() that return a Tensor of shape [2]: return finite"),
        ("return tokens.entropy", "no attribute 'entropy': did you mean entropies?"),
    ],
)
def test_statistics_that_are_no_sums_over_tokens_are_refused(body, said, own):
    assert said in the_problem(own("loss", STATISTICS % body, "Mine"))


def test_every_name_that_the_run_logs_is_taken():
    text = "".join(path.read_text() for path in (REPO / "rl").rglob("*.py"))
    logged = {*re.findall(r'"train/(\w+)"', text), *re.findall(r' metrics\["(\w+)"\]', text)}
    assert logged - {"clip_fraction"} <= RUN_METRICS  # a loss computes clip_fraction itself


@pytest.mark.parametrize("name", ["correction_truncated", "value_clip_fraction"])
def test_two_components_must_not_return_metrics_of_the_same_name(name, own):
    """The dry calls are in this order: loss, correction, critic."""
    loss = f"-tokens.advantages * tokens.logprobs * tokens.anchor.exp(), {{{name!r}: tokens.turns}}"
    config = own("loss", f"{HEAD}def mine(tokens):\n    return TokenLoss({loss})\n")
    others = {"updates_per_batch": 2, "correction": "=tis_token", "critic": "=value"}
    config = with_choices(config, {**others, "critic.loss.clip": 0.2})
    assert f"named '{name}', which another component uses" in the_problem(config)


# The group, the message, and the function or class that a run cannot use.
UNUSABLE = """
loss: returned a Tensor of shape [8]: return TokenLoss(
    def mine(tokens): return -tokens.logprobs
loss: neither summed nor averaged
    def mine(tokens): return TokenLoss(-tokens.logprobs.sum(), {})
loss: a loss without a gradient
    def mine(tokens): return TokenLoss(-tokens.logprobs.detach(), {})
loss: is NaN or inf
    def mine(tokens): return TokenLoss(-tokens.logprobs * tokens.advantages.log(), {})
loss: the metric 'x' is a Tensor of shape [2]: give a tensor with one number per token
    def mine(tokens): return TokenLoss(-tokens.logprobs, {'x': tokens.logprobs[:2]})
loss: metrics named 'reward' and 'tokens', which the run itself uses: choose other names
    def mine(tokens):
        return TokenLoss(-tokens.logprobs, {'tokens': tokens.turns, 'reward': tokens.turns})
loss: called with eight made-up tokens, raised KeyError: 'x'
    def mine(tokens):
        raise KeyError('x')
loss: called with no tokens, as a rank without rollouts calls it, raised RuntimeError: max()
    def mine(tokens):
        assert tokens.logprobs.max() <= 0
        return TokenLoss(-tokens.logprobs, {})
loss: returned losses that depend on the other sequences of the call
    def mine(tokens): return TokenLoss(-tokens.logprobs / tokens.entropies.mean(), {})
loss: raised TypeError: unsupported operand
    def mine(tokens):  # it works only with several updates for each batch
        return TokenLoss(-tokens.logprobs * (tokens.old_logprobs - 1).exp(), {})
advantage: raised TypeError: mine.__init__() missing 1 required positional argument
    class mine:
        def __init__(self, rewards): ...
advantage: returned 15 numbers instead of 16
    def mine(group): return group.rewards[:-1]
advantage: returned 2 numbers instead of 1 numbers: return one per turn of a rollout
    def mine(group): return [[0.0] * (len(t or ()) + 1) for t in group.turn_rewards]
advantage: ZeroDivisionError
    def mine(group): return [1 / (max(r or 0 for r in group.rewards) - 1) for _ in group.rewards]
advantage: as JSON ({1: 0.5} becomes {'1': 0.5}): return only numbers, texts, lists, and dicts
    class mine:
        def __call__(self, group): return [0.0] * 16
        def state(self): return {1: 0.5}
        def load(self, state): ...
correction: returned a Tensor of shape [1]: return Correction(weights,
    def mine(tokens): return Correction(tokens.anchor[:1], {})
batch_credit: called with groups with the rewards [], raised ZeroDivisionError: division by
    def mine(groups):
        count = 1 / sum(len(g.credits) for g in groups)
        return [g.credits for g in groups]
batch_credit: returned nan instead of a finite number
    def mine(groups):
        nan = (float('nan'),)
        return [[replace(c, advantages=nan) for c in g.credits] for g in groups]
kl.estimator: without a gradient
    def mine(a, b): return (a - b).detach()
buffer: draw 16 new groups that add() accepted
    class mine(FifoBuffer):
        def draw(self, step, count, max_staleness, running): return self._groups[:count - 1]
buffer: drew the group 0 in two batches: as MixedBuffer does, use rl.rollouts.buffer.replayed
    class mine(Repeating):
        def state(self): return {}
        def load(self, state): ...
        def undo_draw(self): ...
buffer: drew the group 0 in two batches: as MixedBuffer does, use rl.rollouts.buffer.replayed
    class mine(Repeating):
        def again(self, group): return replayed(group, 1)
env: cannot be called (too many positional arguments): its parameters must be the episode
    class mine(Environment):
        def examples(self, split): return []
        async def score(self): return {}
strategy: reads rewards: set reads_rewards = True
    class mine(Independent):
        async def play(self, group, play_one, size):
            rollouts = await super().play(group, play_one, size)
            return sorted(rollouts, key=lambda rollout: -(rollout.reward or 0))
strategy: remembers groups, but not after a resume: define state() and load()
    class mine(Independent):
        reads_rewards = True
        def __init__(self): self.sums = {}
        async def play(self, group, play_one, size):
            rollouts = await super().play(group, play_one, size)
            self.sums[group.example.id] = sum(r.reward or 0 for r in rollouts)
            return rollouts
logger: cannot be imported: Module
    import a_package_of_nobodys
    def mine(): ...
"""
IMPORTS = """
from dataclasses import replace
from envs.protocol import Environment
from losses.correction import Correction
from losses.tokens import TokenLoss
from rl.rollouts.buffer import FifoBuffer, replayed
from rl.sampling.strategy import Independent, Strategy

class Repeating(FifoBuffer):
    def again(self, group): return group
    def num_new(self, count): return count - 1
    def draw(self, step, count, max_staleness, running):
        if not step: self.first = self.again(self._groups[0])
        new = super().draw(step, count - 1, max_staleness, running)
        return new and [*new, self.first] if step else new
"""


@pytest.mark.parametrize(
    ("group", "said", "text"), re.findall(r"(?m)^([\w.]+): (.+)\n((?: {4}.+\n)+)", UNUSABLE)
)
def test_what_a_run_cannot_use_is_refused_with_its_file(group, said, text, own, modules):
    with pytest.raises(ConfigError) as caught:
        learn(own(group, IMPORTS + dedent(text)))
    problem = caught.value.problems[0]
    assert said in problem, caught.value.problems
    assert problem.startswith((f"{group}: rl_own", f"{group.partition('.')[0]}: rl_own"))
    assert f" ({modules / 'rl_own1.py'}" in problem, problem  # not a file of ours
    if group == "loss":
        line = 1 + IMPORTS.count("\n") + ("raised" in said)
        assert problem.endswith(f", line {line})")
        assert len(caught.value.problems) == 1


RANKED = """
from envs.episode import Example
from envs.protocol import Environment
class mine(Environment):
    name = 'ranked'
    def examples(self, split): return [Example(0, 'ranked', [{'role': 'user', 'content': 'hi'}])]
    async def score(self, episode): return {}
    async def score_group(self, episodes): return [{} for _ in episodes]
"""


def test_a_strategy_that_cannot_play_the_environment_is_refused(own):
    for strategy, said in (
        ("hint_when_all_fail", "example 0 of env 'ranked' has no hint"),
        ("extremes", "reads rewards, but score_group of env 'ranked' computes them later"),
    ):
        config = {**own("env", RANKED), "strategy": chosen("strategy", strategy)}
        assert said in the_problem(config)


ADVANTAGES = """
def by_turn(group): return [t or () for t in group.turn_rewards]
def by_token(group): return [[r or 0.0] * n for r, n in zip(group.rewards, group.lengths)]
def spread(group): return [r * (r - 1) if r else 0.0 for r in group.rewards]  # 0 for 0 and 1
def reads_names(group):
    return [named["exact"] if named else 0.0 for named in group.named_rewards]
class Stateful:
    def __init__(self): self.count = 0
    def __call__(self, group):
        self.count += 1
        return [0.0] * len(group.rewards)
    def state(self): return {'count': self.count}
    def load(self, state): self.count = state['count']
"""


@pytest.mark.parametrize("name", ["by_turn", "by_token", "reads_names", "spread", "Stateful"])
def test_the_unit_of_an_advantage_is_found_by_calling_it(name, own):
    facts = learn(own("advantage", ADVANTAGES, name))
    assert facts.advantage_by_turn == (name == "by_turn")
    assert facts.advantage_by_token == (name == "by_token")
    assert not facts.advantage_compares or name != "spread"


EXAMPLES = """
import time
from envs.protocol import Environment
class mine(Environment):
    def examples(self, split): """


@pytest.mark.parametrize("body", ["raise ConnectionError('no network')\n", "time.sleep(3)\n"])
def test_an_environment_whose_examples_were_not_read_is_neither_refused_nor_cached(
    body, own, cache, monkeypatch
):
    monkeypatch.setattr("rl.dry_call.examples.ENV_TIMEOUT_S", 1.0)
    assert starts(own("env", EXAMPLES + body))
    assert not cache.exists()


def test_a_module_that_demonstrations_import_late_is_a_file_of_the_run(own, modules):
    (modules / "knobs_late.py").touch()  # a change of it needs another warm start
    late = "def demonstrations(self, rng):\n        import knobs_late\n        yield\n"
    config = own("env", f"{EXAMPLES}return []\n    {late}")
    learn(config)
    assert str(modules / "knobs_late.py") in own_files([config])


# What each shipped function does, which a rule or the planner must know.
FACTS = {
    "advantage": {
        "advantage_by_turn": {"turn_group_mean"},
        "advantage_by_token": set(),
        "advantage_is_reward": {"none"},
        "advantage_refuses_negative": {"max_rl"},
        "advantage_compares": {"group_mean", "group_zscore", "rloo", "max_rl", "turn_group_mean"},
    },
    "aggregation": {
        "aggregation_takes_turns": {"turn_mean"},
        "aggregation_weighs_sequences": {"sequence_mean"},
    },
    "correction": {"correction_is_neutral": {"none"}},
    "batch_credit": {"batch_credit_is_neutral": {"none"}},
    "truncation": {"truncation_lowers_rewards": {"penalty"}},
    "loss": {"loss_weighs_sequences": {"gspo", "sapo"}, "loss_corrects": {"decoupled_ppo"}},
}


@pytest.mark.parametrize("group", FACTS)
def test_the_facts_of_the_shipped_functions_are_found_by_calling_them(group, config):
    for path in sorted((REPO / "conf" / group).glob("*.yaml")):
        options = chosen(group, path.stem)
        options = {k: 100 if str(v).startswith(("?", "$")) else v for k, v in options.items()}
        learned = learn(changed(config, {group: options}))
        for fact, choices in FACTS[group].items():
            assert getattr(learned, fact) == (path.stem in choices), f"{fact} of {path.stem}"


# The child process, and what is kept of it.


@pytest.fixture
def cache(tmp_path, monkeypatch, modules):
    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(modules))
    return tmp_path / "cache" / "dry_calls"


def starts(config):
    """Do a dry call, and return whether it started a child."""
    with DryCall([config]) as dry_call:
        dry_call.learned()
        return dry_call._child is not None


def test_a_dry_call_is_done_once_until_a_file_that_it_imported_changes(own, cache, modules):
    config = own("loss", LOSSES + "print('not an answer')\n", "by_a_helper")
    config["env"]["num_train"] = 8  # a busy machine makes more in over 2 s, and caches nothing
    assert starts(config)
    assert not starts({**config, "seed": 5, "run_name": "other"})
    (modules / "knobs_helpers.py").write_text(HELPERS + "\n# changed\n")
    assert starts(config)
    next(cache.iterdir()).write_text("{")
    list(map(Path.unlink, list(cache.iterdir())[1:]))
    assert starts(config)
    kept = _cache_file(_inputs(config))
    of_another_version = json.loads(kept.read_text())
    of_another_version["learned"]["loss_is_new"] = True
    kept.write_text(json.dumps(of_another_version))
    assert starts(config)


def test_another_target_torch_or_folder_of_modules_needs_another_dry_call(own, cache, monkeypatch):
    config = own("loss", LOSSES, "by_hand")
    kept = _cache_file(_inputs(config))
    assert _cache_file(_inputs({**config, "seed": 5})) == kept
    assert _cache_file(_inputs({**config, "group_size": 8})) != kept
    assert _cache_file(_inputs(changed(config, {"loss._target_": "rl_own.other"}))) != kept
    with monkeypatch.context() as patch:
        patch.setattr("rl.dry_call.child.version", lambda name: f"another {name}")
        assert _cache_file(_inputs(config)) != kept
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert _cache_file(_inputs(config)) != kept


def test_the_child_and_this_process_learn_the_same_and_config_yaml_holds_it(own, cache):
    configs = [own("loss", LOSSES, "by_hand"), composed("loss=gspo")]
    with DryCall(configs) as dry_call:
        facts = [dry_call.learned(number) for number in (0, 1)]
    assert facts == [learn(config) for config in configs]
    path, run = cache.parents[1] / "config.yaml", Run.of(configs[1])
    replace(run, learned=asdict(facts[1])).save(path)
    assert Learned.of(Run.load(path)) == facts[1]
    check_learned(configs[1], facts[1])


def test_a_mistake_is_not_kept_and_a_child_that_dies_is_explained(own, cache):
    dies = "import os, sys\nprint('the reason', file=sys.stderr, flush=True)\nos._exit(3)\n"
    said_at_the_end = r"ended with status 3\. The end of its output:\nthe reason"
    for source, said in ((dies, said_at_the_end), ("x = 1 / 0\n", "ZeroDivi")):
        config = own("loss", f"{source}def mine(tokens): ...\n")
        with DryCall([config]) as dry_call, pytest.raises(ConfigError, match=said):
            dry_call.learned()
    assert not cache.exists()


def test_a_child_without_answers_is_ended_after_one_limit_and_its_answers_count(
    own, cache, monkeypatch
):
    monkeypatch.setattr("rl.dry_call.child.LIMIT_S", 3.0)
    # Instead of the child, which first imports torch.
    text = "import sys, time; open(sys.argv[1], 'w').write(sys.argv[2]); time.sleep(99)"
    reply = json.dumps([[{"problems": ["the first is wrong"]}], []])
    command = [sys.executable, "-c", text]
    monkeypatch.setattr("rl.dry_call.child.python_module", lambda _, to: [*command, to, reply])
    config = own("loss", LOSSES, "by_hand")
    with DryCall([config] * 3) as dry_call:
        for number, said in enumerate(["first is wrong", "ended after 3 s: make", "not checked"]):
            with pytest.raises(ConfigError, match=said):
                dry_call.learned(number)


@pytest.mark.parametrize("selects", [True, False])
def test_what_may_select_examples_or_rollouts_by_rewards_is_known(selects):
    choices = ["order=shuffled", "buffer=replay", "strategy=branch"]
    if selects:
        choices = [f"{group}=difficulty" for group in ("order", "buffer")]
        choices += ["strategy=adaptive_size", "strategy=extremes"]
    for choice in choices:
        config = composed(choice)
        assert selects_by_rewards(config) == selects, choice
        assert learn(config).selects_examples == selects, choice
