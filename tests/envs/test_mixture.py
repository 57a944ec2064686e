"""A mixture: which environment an example comes from, how often, and who plays it."""

from collections import Counter
from itertools import islice
from random import Random

import pytest

from envs.arithmetic import Arithmetic
from envs.episode import Example
from envs.mixture import Mixture
from envs.protocol import Environment
from envs.reverse_text import ReverseText
from tests.support.orders import examples, shuffled


def words(**changes):
    options = {"min_length": 3, "max_length": 4, "num_train": 50, "num_eval": 5}
    return ReverseText(**{**options, "reward_weights": {"exact": 1.0}, **changes})


def sums(max_operand=9):
    options = {"operators": ["+"], "num_train": 30, "num_eval": 7}
    return Arithmetic(max_operand=max_operand, **options, reward_weights={"correct": 2.0})


def make(weights=(1.0, 2.0, 5.0)):
    envs = {"words": words(), "sums": sums(), "large": sums(99)}
    return Mixture(envs=envs, weights=dict(zip(envs, weights, strict=True)))


def drawn(env, seed, count=10_000):
    return examples(shuffled(env.pools("train"), seed), count)


def test_each_environment_is_drawn_as_often_as_its_weight_says():
    counts = Counter(example.env for example in drawn(make(), 0))
    # Three standard deviations of a binomial: 3 sqrt(10000 p (1 - p)) <= 150.
    assert counts["words"] == pytest.approx(1250, abs=100)
    assert counts["sums"] == pytest.approx(2500, abs=130)
    assert counts["large"] == pytest.approx(6250, abs=146)


def test_the_same_seed_draws_the_same_examples_and_another_seed_others():
    assert drawn(make(), 3) == drawn(make(), 3) != drawn(make(), 4)
    few = [example.id for example in drawn(make(), 3) if example.env == "sums"]
    assert sorted(few[:30]) == list(range(30))  # a small pool is gone through before it repeats


def test_two_environments_of_one_class_keep_their_names_and_their_own_examples():
    env = make()
    assert [pool.examples[0].env for pool in env.pools("train")] == ["words", "sums", "large"]
    for example in drawn(env, 0, 200):
        assert env.environment_of(example).name == example.env
    assert Counter(e.env for e in env.examples("eval")) == {"words": 5, "sums": 7, "large": 7}
    pools = env.pools("train")
    assert max(len(e.messages[0]["content"]) for e in pools[1].examples) == len("9 + 9 =")
    assert max(len(e.messages[0]["content"]) for e in pools[2].examples) == len("99 + 99 =")


def test_demonstrations_come_from_the_experts_as_often_as_the_weights_say():
    shown = list(islice(make().demonstrations(Random(0)), 4000))
    again = list(islice(make().demonstrations(Random(0)), 4000))
    assert shown == again
    of_words = [messages for messages in shown if messages[0]["content"].startswith("reverse: ")]
    assert len(of_words) == pytest.approx(500, abs=63)
    question, answer = of_words[0]
    assert question["content"] == f"reverse: {answer['content'][::-1]}"


class Lookup(Environment):
    """Three turns with a tool; its examples forget whose they are."""

    max_turns, max_concurrent = 3, 2
    reward_weights = {"found": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self, env=None):
        def find(word: str) -> str:
            """Find."""
            return word

        self.tools, self.env = [find], env

    def examples(self, split):
        return [Example(0, self.env or self.name, [{"role": "user", "content": "?"}])]


def test_each_environment_keeps_its_own_turns_tools_and_concurrency():
    env = Mixture(envs={"words": words(), "find": Lookup()}, weights={"words": 1, "find": 1})
    assert (env.max_turns, env.is_multi_turn) == (3, True)
    one, other = (env.environment_of(pool.examples[0]) for pool in env.pools("train"))
    assert (one.max_turns, one.tool_specs, one.max_concurrent) == (1, None, None)
    assert (other.max_turns, other.max_concurrent) == (3, 2)
    assert [spec["name"] for spec in other.tool_specs] == ["find"]


@pytest.mark.parametrize(
    ("envs", "weights", "message"),
    [
        ({}, {}, "envs is empty"),
        (["a"], {"b": 1.0}, "weights has b, but envs has a: set one weight for each"),
        (["a"], {"a": 0.0}, r"weights=\{'a': 0.0\}: set weights above 0"),
    ],
)
def test_names_and_weights_that_do_not_fit_are_refused(envs, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(envs={name: words() for name in envs}, weights=weights)


def test_environments_that_cannot_be_mixed_are_refused():
    with pytest.raises(ValueError, match=r"another mixture \(envs\.inner\)"):
        Mixture(envs={"inner": make()}, weights={"inner": 1.0})
    env = Mixture(envs={"find": Lookup("lookup")}, weights={"find": 1.0})
    with pytest.raises(ValueError, match="examples of the environment 'find' have env='lookup'"):
        env.pools("train")
    empty = Lookup()
    empty.examples = lambda split: []
    with pytest.raises(ValueError, match=r"envs\.find has no eval examples"):
        Mixture(envs={"find": empty}, weights={"find": 1.0}).pools("eval")
