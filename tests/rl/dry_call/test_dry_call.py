"""A user's functions are called once with made-up values: what they read, what they return."""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from envs.user_code import is_library
from rl.config.check import check_learned
from rl.config.facts import is_imitator, needs_reference
from rl.config.learned import Learned
from rl.config.schema import ConfigError
from rl.dry_call.child import DryCall, _cache_file, _inputs
from rl.dry_call.examples import POOLS_CACHE, selects_by_rewards
from rl.dry_call.learn import learn
from rl.dry_call.report import Report, source_of
from rl.dry_call.tensors import RUN_METRICS
from rl.rollouts.batch_credit import whiten
from tests.support.composing import REPO, changed, chosen, composed

LOSSES = """
import dataclasses
import operator
from types import SimpleNamespace

import torch
from losses.cispo import cispo
from losses.gspo import gspo
from losses.tokens import TokenLoss, Tokens, ratio_to
from knobs_helpers import Gate, lesson

_gate = Gate()


def alone(tokens):
    '''Reads no tokens.advantages.'''
    return TokenLoss(-tokens.logprobs * 0.9, {})

def by_hand(tokens: Tokens) -> TokenLoss:
    ratio = ratio_to(tokens.anchor, tokens.logprobs)
    return TokenLoss(-ratio * tokens.advantages, {})

def by_a_helper(tokens):
    return TokenLoss(-lesson(tokens) * tokens.logprobs, {})

def by_a_class(tokens):
    return TokenLoss(_gate(tokens), {})

def by_an_import(tokens):
    from losses.cispo import cispo as inner
    return inner(tokens, clip_low=0.0, clip_high=5.0)

def by_a_name(tokens):
    total = 0
    for name in ("advantages", "logprobs"):
        total = total - getattr(tokens, name)
    return TokenLoss(total, {})

def by_attrgetter(tokens):
    advantages, logprobs = operator.attrgetter("advantages", "logprobs")(tokens)
    return TokenLoss(-advantages * logprobs, {})

def by_vars(tokens):
    fields = vars(tokens)
    return TokenLoss(-fields["advantages"] * fields["logprobs"], {})

def by_unpacking(tokens):
    one = SimpleNamespace(**vars(tokens))
    return TokenLoss(-one.advantages * one.logprobs, {})

def by_replacing(tokens):
    late = dataclasses.replace(tokens, staleness=tokens.staleness + 1)
    return cispo(late, clip_low=0.0, clip_high=5.0)

def by_shape(tokens):
    assert tokens.advantages.shape == tokens.logprobs.shape
    return TokenLoss(-tokens.logprobs * torch.ones_like(tokens.advantages), {})

def whole(tokens):
    return gspo(tokens, clip_low=3e-4, clip_high=4e-4)
"""
HELPERS = """
class Gate:
    def __call__(self, tokens):
        return -self._strength(tokens) * tokens.logprobs

    def _strength(self, tokens):
        return tokens.ref_logprobs - tokens.logprobs


def lesson(tokens):
    return tokens.advantages
"""
FIELDS = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
RATIO = {"rollout_logprobs", "old_logprobs"}
HEAD = "import torch\nfrom losses.tokens import TokenLoss, Tokens\n"


@pytest.fixture
def own(modules: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module, and return the configuration with one of its functions in a group."""
    monkeypatch.setattr("rl.dry_call.examples.ENV_TIMEOUT_S", 60.0)  # the machine may be busy
    (modules / "knobs_helpers.py").write_text(HELPERS)
    POOLS_CACHE.clear()

    def put(group: str, text: str, name: str = "mine", **options: Any) -> dict[str, Any]:
        module = f"rl_own{len(list(modules.iterdir()))}"  # begins with rl, but is not in rl/
        (modules / f"{module}.py").write_text(text)
        return changed(config, {group: {"_target_": f"{module}.{name}", **options}})

    return put


def the_problem(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        learn(config)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("alone", set()),
        ("by_hand", {"advantages"} | RATIO),
        ("by_a_helper", {"advantages"}),
        ("by_a_class", {"ref_logprobs"}),
        ("by_an_import", {"advantages"} | RATIO),
        ("by_a_name", {"advantages"}),
        ("by_attrgetter", {"advantages"}),
        ("by_vars", {"advantages"}),
        ("by_unpacking", {"advantages"}),
        ("by_replacing", {"advantages"} | RATIO),
        ("by_shape", set()),
        ("whole", {"advantages"} | RATIO),
    ],
)
def test_a_loss_reads_the_fields_whose_numbers_it_uses_however_it_gets_them(
    name: str, fields: set[str], own: Any
) -> None:
    learned = learn(own("loss", LOSSES, name))
    assert {field for field in FIELDS if learned.reads({field})} == fields
    assert learned.is_supervised == (not fields)
    assert learned.uses_ratio == (fields >= RATIO)


def test_a_file_may_name_the_fields_that_a_branch_hides(own: Any) -> None:
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


@pytest.mark.parametrize(
    ("body", "said", "line"),
    [
        ("return -tokens.logprobs", "returned a Tensor of shape [8]: return TokenLoss(", 3),
        ("return TokenLoss(-tokens.logprobs.sum(), {})", "neither summed nor averaged", 3),
        ("return TokenLoss(-tokens.logprobs.detach(), {})", "a loss without a gradient", 3),
        ("return TokenLoss(-tokens.logprobs * tokens.advantages.log(), {})", "is NaN or inf", 3),
        ("return TokenLoss(-tokens.logprobs, {'x': 0.5})", "the metric 'x' as float 0.5", 3),
        (
            "return TokenLoss(-tokens.logprobs, {'x': tokens.logprobs[:2]})",
            "the metric 'x' as a Tensor of shape [2]: return a tensor with one number per token",
            3,
        ),
        (
            "return TokenLoss(-tokens.logprobs, {'tokens': tokens.turns, 'reward': tokens.turns})",
            "metrics named 'reward' and 'tokens', which the run itself uses: choose other names",
            3,
        ),
        ("return TokenLoss(-tokens.logprobs, None)", "returned metrics that are a NoneType", 3),
        (
            "return TokenLoss(-tokens.logprobs, {}, tokens.logprobs[1:])",
            "returned ratio_clamped as a Tensor of shape [7]: return a tensor with one number per",
            3,
        ),
        ("return TokenLoss(-tokens.logprob, {})", "raised AttributeError", 4),
        ("raise KeyError('x')", "called with eight made-up tokens, raised KeyError: 'x'", 4),
    ],
)
def test_a_loss_that_a_run_cannot_use_is_named_with_file_line_and_remedy(
    body: str, said: str, line: int, own: Any, modules: Path
) -> None:
    problem = the_problem(own("loss", f"{HEAD}def mine(tokens):\n    {body}\n"))
    assert problem.startswith("loss: rl_own")
    assert said in problem
    (file,) = modules.glob("rl_own*.py")
    assert problem.endswith(f"({file}, line {line})")


@pytest.mark.parametrize(
    ("expression", "is_refused"),
    [
        ("tokens.logprobs / tokens.entropies.mean()", True),
        ("tokens.logprobs - tokens.logprobs.logsumexp(0).detach()", True),
        ("sum_per_sequence(tokens.logprobs, ids, tokens.num_sequences)[ids]", False),
        ("tokens.logprobs * torch.rand_like(tokens.logprobs)", False),
    ],
)
def test_a_loss_that_depends_on_the_other_sequences_of_a_micro_batch_is_refused(
    expression: str, is_refused: bool, own: Any
) -> None:
    text = (
        f"{HEAD}from losses.tokens import sum_per_sequence\n"
        "def mine(tokens):\n    ids = tokens.sequence_ids\n"
        f"    return TokenLoss(-({expression}), {{}})\n"
    )
    if is_refused:
        assert "returned other losses for the same tokens if" in the_problem(own("loss", text))
    else:
        assert learn(own("loss", text)).reads({"logprobs"})


def test_a_loss_that_works_only_with_several_updates_is_refused_for_one(own: Any) -> None:
    old = "TokenLoss(-tokens.logprobs * (tokens.old_logprobs - 1).exp(), {})"
    problem = the_problem(own("loss", f"{HEAD}def mine(tokens):\n    return {old}\n"))
    assert "raised TypeError: unsupported operand" in problem


STATISTICS = (
    HEAD
    + """
class Mine:
    stays_near_reference = True
    whole_groups = True
    def statistics(self, tokens):
        {body}
    def __call__(self, tokens, statistics):
        kept = (tokens.entropies > statistics[1] / statistics[0]).float()
        rollouts = tokens.rollout_ids.unique(return_inverse=True)[1]
        gap = tokens.logprobs - tokens.ref_logprobs
        loss = -kept * tokens.advantages * gap.new_zeros(2).index_add(0, rollouts, gap)[rollouts]
        return TokenLoss(loss, {{}})
"""
)
SUMS = "return torch.stack([torch.ones_like(tokens.entropies), tokens.entropies]).sum(1)"


def test_a_loss_with_statistics_and_whole_groups_may_learn_near_the_initial_policy(
    own: Any,
) -> None:
    config = own("loss", STATISTICS.format(body=SUMS), "Mine")
    learned = learn(config)
    fields = {"entropies", "rollout_ids", "logprobs", "ref_logprobs", "advantages"}
    assert set(learned.loss_reads) == fields
    check_learned(config, learned)
    assert needs_reference(config)
    other = STATISTICS.format(body=SUMS).replace("stays_near", "runs_from")
    config = own("loss", other, "Mine")
    assert not needs_reference(config)
    with pytest.raises(ConfigError, match="reference=initial is the policy before training"):
        check_learned(config, learn(config))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (SUMS.replace("sum", "mean"), "do not add up to the result for all tokens: return"),
        ("return torch.tensor([1.0, tokens.num_sequences])", "do not add up to the result"),
        (SUMS + " + 1", "an empty one do not add up"),
        (SUMS.replace("(1)", "()"), "has statistics() that return a Tensor of shape []: return"),
        ("return 3.0", "has statistics() that return float 3.0: return finite sums over the"),
        (SUMS + " / 0 * 0", "has statistics() that return a Tensor of shape [2]: return finite"),
        ("return tokens.entropy", "AttributeError: 'Tokens' object has no attribute 'entropy'"),
    ],
)
def test_statistics_that_are_no_sums_over_tokens_are_refused(
    body: str, said: str, own: Any
) -> None:
    assert said in the_problem(own("loss", STATISTICS.format(body=body), "Mine"))


def test_every_name_that_the_run_logs_is_taken() -> None:
    texts = [path.read_text() for path in (REPO / "rl").rglob("*.py")]
    logged = {name for text in texts for name in re.findall(r'"train/(\w+)"', text)}
    assert logged - {"clip_fraction"} <= RUN_METRICS  # a loss computes clip_fraction itself
    learner = [path.read_text() for path in (REPO / "rl" / "learner").glob("*.py")]
    by_token = {name for text in learner for name in re.findall(r'metrics\["(\w+)"\]', text)}
    assert by_token | {"entropy", "kl_to_rollout", "value_loss"} <= RUN_METRICS


@pytest.mark.parametrize("name", ["correction_truncated", "value_clip_fraction"])
def test_two_components_must_not_return_metrics_of_the_same_name(name: str, own: Any) -> None:
    """The dry calls are in this order: loss, correction, critic."""
    config = changed(
        own(
            "loss",
            f"{HEAD}def mine(tokens):\n    return TokenLoss(-tokens.advantages * "
            f"tokens.logprobs * tokens.anchor.exp(), {{{name!r}: tokens.logprobs}})\n",
        ),
        {"updates_per_batch": 2, "correction": chosen("correction", "tis_token"),
         "critic": chosen("critic", "value"), "critic.loss.clip": 0.2},
    )  # fmt: skip
    assert f"named '{name}', which another component uses" in the_problem(config)


ONE = "def mine(group):\n    rewards = group.rewards\n    return "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "class mine:\n    def __init__(self, rewards): ...\n",
            "raised TypeError: mine.__init__() missing 1 required positional argument",
        ),
        (ONE + "rewards[:-1]\n", "returned 15 numbers instead of 16"),
        (ONE + "['x' for _ in rewards]\n", "returned 'x' instead of a finite number"),
        (ONE + "[float('inf')] * len(rewards)\n", "returned inf instead of a finite number"),
        (ONE + "[sum(rewards) for _ in rewards]\n", "TypeError"),  # None
        (ONE + "[1 / (max(r or 0 for r in rewards) - 1) for _ in rewards]\n", "ZeroDivisionError"),
    ],
)
def test_an_advantage_that_a_run_cannot_use_is_refused(text: str, said: str, own: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        learn(own("advantage", text))
    assert said in caught.value.problems[0]
    assert caught.value.problems[0].startswith("advantage: rl_own")


ONE_TURN = "    return [[0.0] * len(t or ()) for t in group.turn_rewards][1:]\n"


@pytest.mark.parametrize(
    ("group", "text", "said"),
    [
        ("advantage", "def mine(group):\n" + ONE_TURN, "returned 15 numbers instead of 16"),
        (
            "advantage",
            "class mine:\n    def __call__(self, group):\n        return [0.0] * 16\n"
            "    def state(self):\n        return {1: {2}}\n    def load(self, state): ...\n",
            "a state() that a checkpoint cannot store",
        ),
        ("reward", "class mine:\n    pass\n", "derive from rl.rollouts.credit.RewardShaping"),
        (
            "reward",
            "from rl.rollouts.credit import RewardShaping\nclass mine(RewardShaping):\n"
            "    def __init__(self): ...\n    def penalties(self, group):\n        return [0.0]\n",
            "returned 1 numbers instead of 9",
        ),
        ("correction", "def mine(a, b, c, d):\n    return a\n", "return Correction(weights,"),
        ("correction", "def mine(a, b, c):\n    return a\n", "takes 3 positional arguments"),
        (
            "correction",
            "from losses.correction import Correction\ndef mine(a, b, c, d):\n"
            "    return Correction((a - a) / 0, {})\n",
            "returned a weight that is NaN or infinite: clamp the log ratio",
        ),
        ("aggregation", "def mine(lengths, groups):\n    return [1.0]\n", "1 numbers instead of 4"),
        (
            "batch_credit",
            "def mine(groups):\n    return [g.credits[:1] for g in groups]\n",
            "to [[1], [1]]: return as many",
        ),
        ("batch_credit", "def mine(): ...\n", "takes 0 positional arguments but 1 was given"),
        (
            "batch_credit",
            "def mine(groups):\n    count = 1 / sum(len(g.credits) for g in groups)\n"
            "    return [g.credits for g in groups]\n",
            "called with groups with the rewards [], raised ZeroDivisionError: division by zero",
        ),
        (
            "batch_credit",
            "from dataclasses import replace\ndef mine(groups):\n    return [[replace(c, "
            "advantages=(float('nan'),)) for c in g.credits] for g in groups]\n",
            "returned nan instead of a finite number",
        ),
        ("truncation", "def mine(rollout):\n    return 0.0\n", "return Credit(reward, trains=...)"),
        ("kl.estimator", "def mine(a, b):\n    return (a - b).sum()\n", "one number per token"),
        ("kl.estimator", "def mine(a, b):\n    return (a - b).detach()\n", "without a gradient"),
        (
            "buffer",
            "from rl.rollouts.buffer import FifoBuffer\nclass mine(FifoBuffer):\n"
            "    def draw(self, step, count, max_staleness, running):\n"
            "        return self._groups[:count - 1]\n",
            "draw 16 new groups that add() accepted",
        ),
        (
            "buffer",
            "from rl.rollouts.buffer import FifoBuffer\nclass mine(FifoBuffer):\n"
            "    def draw(self, step, count, max_staleness, running):\n"
            "        return self._groups[:1] * count\n",
            "no group twice",
        ),
        (
            "buffer",
            "from rl.rollouts.buffer import FifoBuffer\nclass mine(FifoBuffer):\n"
            "    def state(self):\n        return {'seen': {1, 2}}\n",
            "a state() that a checkpoint cannot store",
        ),
        (
            "buffer",
            "class mine:\n    def add(self, group): ...\n",
            "object has no attribute 'num_new'",
        ),
        (
            "order",
            "from rl.rollouts.example_order import ExampleOrder\nclass mine(ExampleOrder):\n"
            "    def next(self, index):\n        return 0, 10**9\n",
            "pool 0 has no example 1000000000",
        ),
        (
            "order",
            "class mine:\n    def begin(self, pools, seed): ...\n",
            "object has no attribute 'next'",
        ),
        (
            "env",
            "from envs.protocol import Environment\nclass mine(Environment):\n"
            "    def examples(self, split):\n        return ['question']\n",
            "has examples of type str",
        ),
        (
            "env",
            "from envs.protocol import Environment\nclass mine(Environment):\n"
            "    def examples(self, split):\n        return []\n"
            "    async def score(self):\n        return {}\n",
            "cannot be called (too many positional arguments): its parameters must be the episode",
        ),
        (
            "strategy",
            "class mine:\n    def play(self): ...\n",
            "object has no attribute 'num_first'",
        ),
        (
            "strategy",
            "from rl.sampling.strategy import Strategy\nclass mine(Strategy):\n"
            "    async def play(self, group, play_one, size):\n"
            "        return [await play_one(group.example, seed=0) for _ in range(size)]\n",
            "mine plays two attempts with seed=0: use another seed",
        ),
        (
            "strategy",
            "from rl.sampling.strategy import Strategy\nclass mine(Strategy):\n"
            "    async def play(self, group, play_one, size):\n"
            "        return [await play_one(group.example, seed=0)]\n",
            "mine returned 1 rollouts for group_size=16: return 16 or none, or set fixed_size",
        ),
        (
            "strategy",
            "from rl.sampling.strategy import Strategy\nclass mine(Strategy):\n"
            "    async def play(self, group, play_one, size):\n        return []\n",
            "returned no rollouts: return rollouts that `play_one` returned",
        ),
        (
            "env",
            "from envs.protocol import Environment\nclass mine(Environment):\n"
            "    def examples(self, split):\n        return []\n"
            "    def teacher_messages(self, example, messages):\n        return messages\n",
            "its parameters must be the example and the messages and the episode and the group",
        ),
        ("logger", "import a_package_of_nobodys\ndef mine(): ...\n", "cannot be imported: Module"),
    ],
)
def test_other_functions_and_classes_that_a_run_cannot_use_are_refused(
    group: str, text: str, said: str, own: Any, modules: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        learn(own(group, text))
    problem = caught.value.problems[0]
    assert said in problem, caught.value.problems
    assert problem.startswith(f"{group.partition('.')[0]}: rl_own")
    assert f" ({modules / 'rl_own1.py'}" in problem, problem  # not a file of ours


def test_an_error_in_a_file_of_rl_is_reported_with_the_line_that_raised_it() -> None:
    report = Report()
    with report.calling("batch_credit", whiten):
        whiten([None])  # pyright: ignore[reportArgumentType]
    file, line = source_of(whiten) or ("", 0)
    said, _, raised_at = report.problems[0].rstrip(")").rpartition(", line ")
    assert said.endswith(f"({file}")
    assert int(raised_at) > line


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "estimator",
            "def mine(rewards, values):\n    return (rewards - values).sum(1)\n",
            "critic.estimator: rl_own1.mine, called with made-up rewards and values, returned a "
            "Tensor of shape [2]: return a tensor with one advantage for each value, of shape",
        ),
        (
            "loss",
            "def mine(values, old_values, returns):\n    return values\n",
            "critic.loss: rl_own1.mine, called with eight made-up values, returned a Tensor of",
        ),
    ],
)
def test_a_part_of_a_critic_that_a_run_cannot_use_is_refused(
    name: str, text: str, said: str, own: Any
) -> None:
    config = own("critic", text)
    config["critic"] = {**chosen("critic", "value"), name: config["critic"]}
    assert the_problem(config).startswith(said)


RANKED = (
    "from envs.episode import Example\nfrom envs.protocol import Environment\n"
    "class mine(Environment):\n    name = 'ranked'\n"
    "    def examples(self, split):\n"
    "        return [Example(0, 'ranked', [{'role': 'user', 'content': 'hi'}])]\n"
    "    async def score(self, episode):\n        return {}\n"
    "    async def score_group(self, episodes):\n        return [{} for _ in episodes]\n"
)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("hint_when_all_fail", "example 0 of env 'ranked' has no hint"),
        ("extremes", "reads rewards, but score_group of env 'ranked' computes them later"),
        ("branch", ""),
    ],
)
def test_a_strategy_that_cannot_play_the_environment_is_refused(
    strategy: str, said: str, own: Any
) -> None:
    config = {**own("env", RANKED), "strategy": chosen("strategy", strategy)}
    if not said:
        learn(config)
        return
    with pytest.raises(ConfigError) as caught:
        learn(config)
    assert caught.value.problems[0].startswith("strategy: rl.sampling.strategies.")
    assert said in caught.value.problems[0]


BY_TOKEN = (
    "def mine(group):\n    return [[r or 0.0] * n for r, n in zip(group.rewards, group.lengths)]\n"
)
STATEFUL = (
    "class mine:\n    def __init__(self):\n        self.count = 0\n"
    "    def __call__(self, group):\n        self.count += 1\n"
    "        return [0.0] * len(group.rewards)\n"
    "    def state(self):\n        return {'count': self.count}\n"
    "    def load(self, state):\n        self.count = state['count']\n"
)
READS_TEXT = (
    "def mine(group):\n"
    "    assert group.example and all(r.messages and r.turns for r in group.rollouts)\n"
    "    return [0.0 if named is None else 1.0 for named in group.named_rewards]\n"
)


@pytest.mark.parametrize(
    ("text", "by_turn", "by_token"),
    [
        (BY_TOKEN, False, True),
        ("def mine(group):\n    return [t or () for t in group.turn_rewards]\n", True, False),
        (STATEFUL, False, False),
        (READS_TEXT, False, False),
    ],
)
def test_the_unit_of_an_advantage_is_found_by_calling_it(
    text: str, by_turn: bool, by_token: bool, own: Any
) -> None:
    facts = learn(own("advantage", text))
    assert (facts.advantage_by_turn, facts.advantage_by_token) == (by_turn, by_token)


EXAMPLES = (
    "import time\nfrom envs.protocol import Environment\nclass mine(Environment):\n"
    "    def examples(self, split):\n        "
)


@pytest.mark.parametrize("body", ["raise ConnectionError('no network')\n", "time.sleep(3)\n"])
def test_an_environment_whose_examples_were_not_read_is_neither_refused_nor_cached(
    body: str, own: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.dry_call.examples.ENV_TIMEOUT_S", 1.0)
    assert starts(own("env", EXAMPLES + body))
    assert not cache.exists()


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
def test_the_facts_of_the_shipped_functions_are_found_by_calling_them(
    group: str, config: dict[str, Any]
) -> None:
    for path in sorted((REPO / "conf" / group).glob("*.yaml")):
        options = chosen(group, path.stem)
        options = {k: 100 if str(v).startswith(("?", "$")) else v for k, v in options.items()}
        learned = learn(changed(config, {group: options}))
        for fact, choices in FACTS[group].items():
            assert getattr(learned, fact) == (path.stem in choices), f"{fact} of {path.stem}"


@pytest.mark.parametrize(
    ("body", "compares"),
    [
        ("[0.0 for r in rewards]", True),
        ("[r or 0.0 for r in rewards]", False),
        ("[0.0 if r is None else r * (r - 1) for r in rewards]", False),  # 0 for 1 and 0
        ("[0.0 if r == 1 else 1.0 for r in rewards]", False),
        ("[0.0 if r == 0.37 else 1.0 for r in rewards]", False),
    ],
)
def test_an_advantage_compares_if_it_is_0_for_each_of_three_lone_rewards(
    body: str, compares: bool, own: Any
) -> None:
    assert learn(own("advantage", f"{ONE}{body}\n")).advantage_compares == compares


def test_only_k1_has_the_same_gradient_whatever_the_reference(config: dict[str, Any]) -> None:
    for name in ("k1", "k2", "k3"):
        node = {"kl.estimator": {"_target_": f"losses.kl.{name}"}}
        assert learn(changed(config, node)).divergence_is_linear == (name == "k1")


SAMPLERS = """
import rl.sampling.demonstrations as demonstrations
class Proverbs(demonstrations.ImitationSampler): ...
class Remote:
    uses_vllm = True
class Right(Remote):
    uses_vllm = False
class Left(Remote): ...
class Both(Left, Right): ...
"""


def test_a_constant_of_a_class_holds_for_its_subclasses(modules: Path) -> None:
    (modules / "knobs_samplers.py").write_text(SAMPLERS)
    assert is_imitator("knobs_samplers.Proverbs")
    assert not is_imitator("knobs_samplers.Remote")
    assert is_imitator("knobs_samplers.Both")  # in Python's order, Right comes before Remote


# The child process, and what is kept of it.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: Path) -> Path:
    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(modules))
    return tmp_path / "cache" / "dry_calls"


def starts(config: dict[str, Any]) -> bool:
    """Do a dry call, and return whether it started a child."""
    with DryCall([config]) as dry_call:
        dry_call.learned()
        return dry_call._child is not None


def test_a_dry_call_is_done_once_until_a_file_that_it_imported_changes(
    own: Any, cache: Path, modules: Path
) -> None:
    config = own("loss", LOSSES + "print('not an answer')\n", "by_a_helper")
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


def test_another_target_torch_or_folder_of_modules_needs_another_dry_call(
    own: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own("loss", LOSSES, "by_hand")
    kept = _cache_file(_inputs(config))
    assert _cache_file(_inputs({**config, "seed": 5})) == kept
    assert _cache_file(_inputs({**config, "group_size": 8})) != kept
    assert _cache_file(_inputs(changed(config, {"loss._target_": "rl_own.other"}))) != kept
    assert _cache_file(_inputs(changed(config, {"kl.estimator._target_": "losses.kl.k2"}))) != kept
    with monkeypatch.context() as patch:
        patch.setattr("rl.dry_call.child.version", lambda name: f"another {name}")
        assert _cache_file(_inputs(config)) != kept
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert _cache_file(_inputs(config)) != kept


def test_the_child_and_this_process_learn_the_same(own: Any, cache: Path) -> None:
    configs = [own("loss", LOSSES, "by_hand"), composed("loss=gspo")]
    with DryCall(configs) as dry_call:
        assert [dry_call.learned(i) for i in (0, 1)] == [learn(config) for config in configs]


def test_a_mistake_is_not_kept_and_a_child_that_dies_is_explained(own: Any, cache: Path) -> None:
    text = "import os, sys\nprint('the reason', file=sys.stderr)\nsys.stderr.flush()\nos._exit(3)\n"
    said_at_the_end = r"ended with status 3\. The end of its output:\nthe reason"
    for source, said in ((text, said_at_the_end), ("x = 1 / 0\n", "ZeroDivi")):
        config = own("loss", f"{source}def mine(tokens): ...\n")
        with DryCall([config]) as dry_call, pytest.raises(ConfigError, match=said):
            dry_call.learned()
    assert not cache.exists()


def test_a_child_that_answers_no_more_is_ended_after_one_limit_and_its_answers_count(
    own: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.dry_call.child.LIMIT_S", 3.0)
    # Instead of the child, which first imports torch.
    text = "import sys, time; open(sys.argv[1], 'w').write(sys.argv[2]); time.sleep(99)"
    reply = json.dumps([[{"problems": ["the first is wrong"]}], []])
    monkeypatch.setattr(
        "rl.dry_call.child.python_module",
        lambda _, answer: [sys.executable, "-c", text, answer, reply],
    )
    config = own("loss", LOSSES, "by_hand")
    with DryCall([config] * 3) as dry_call:
        for number, said in enumerate(["first is wrong", "ended after 3 s: make", "not checked"]):
            with pytest.raises(ConfigError, match=said):
                dry_call.learned(number)


def test_config_yaml_holds_what_was_learned(config: dict[str, Any], cache: Path) -> None:
    from rl.config.schema import Run

    run = Run.of(config)
    with DryCall([config]) as dry_call:
        run = replace(run, learned=asdict(dry_call.learned()))
    path = cache.parents[1] / "config.yaml"
    run.save(path)
    assert Learned.of(Run.load(path)) == learn(config)
    check_learned(config, Learned.of(run))


@pytest.mark.parametrize(
    ("folder", "is_installed"),
    [
        ("base/lib/python3.11/site-packages", True),
        ("usr/lib/python3/dist-packages", True),
        ("target", True),  # of pip install --target, with metadata
        ("vendor", False),  # as an editable install, whose edits must be noticed
    ],
)
def test_an_installed_package_is_a_library_in_every_folder(
    folder: str, is_installed: bool, tmp_path: Path
) -> None:
    package = tmp_path / folder / "fake_library"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if folder == "target":
        (package.parent / "fake_library-1.0.dist-info").mkdir()
    assert is_library(str(package / "a.py")) == is_installed
    assert is_library(json.__file__)
    assert not is_library(str(REPO / "losses" / "cispo.py"))


@pytest.mark.parametrize(
    ("order", "buffer", "expected"),
    [
        ("shuffled", "fifo", False),
        ("sequential", "fifo", False),
        ("difficulty", "fifo", True),
        ("shuffled", "difficulty", True),
    ],
)
def test_an_order_that_observes_and_a_buffer_that_rejects_select_examples(order, buffer, expected):
    config = composed(f"order={order}", f"buffer={buffer}")
    assert selects_by_rewards(config["order"], config["buffer"]) == expected
    assert learn(config).selects_examples == expected
