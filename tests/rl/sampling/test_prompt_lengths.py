"""Examples whose prompt leaves no room for an answer are replaced and counted."""

import logging

import pytest

from envs.episode import Example
from envs.messages import user
from envs.mixture import Mixture
from rl.sampling.prompt_lengths import FittingExamples
from tests.support.scripted import PREFIX, ScriptedClient, ScriptedEnv, chat_of


def examples(*lengths: int, env: str = "scripted") -> list[Example]:
    """Return prompts of these lengths in tokens, without tools."""
    return [Example(i, env, [user("x" * (n - PREFIX + 2))]) for i, n in enumerate(lengths)]


def fitting(given, env=None, max_seq_len=100, max_prompt_len=None) -> FittingExamples:
    chat = chat_of(ScriptedClient(), max_seq_len=max_seq_len)
    return FittingExamples(given, env or ScriptedEnv(), chat, max_seq_len, max_prompt_len)


@pytest.mark.parametrize(
    ("max_prompt_len", "problem"),
    [
        (None, "fill max_seq_len=100: raise max_seq_len (and model.max_seq_len, if it is"),
        (80, "have more tokens than sampler.max_prompt_len=80: raise it, or set sampler"),
    ],
)
def test_a_prompt_that_is_too_long_is_replaced_and_counted(max_prompt_len, problem, caplog):
    prompts = examples(50, max_prompt_len or 99, (max_prompt_len or 99) + 1, 120)
    with caplog.at_level(logging.WARNING):
        assert {e.id for e in fitting(prompts, None, 100, max_prompt_len)} == {0, 1}
    assert "1 of 3 prompts of env 'scripted' that were drawn are replaced, because" in caplog.text
    assert problem in caplog.text
    assert "2 of 4 prompts" in caplog.text


@pytest.mark.parametrize(
    ("lengths", "max_seq_len", "message"),
    [
        ((50, 60), 40, "all 2 prompts of env 'scripted' fill max_seq_len="),
        ((100_000,), 256, "fill max_seq_len=256: .* The shortest has 100000 tokens"),
    ],
)
def test_a_data_set_without_a_usable_prompt_is_refused_at_the_start(lengths, max_seq_len, message):
    with pytest.raises(ValueError, match=message):
        fitting(examples(*lengths), None, max_seq_len)


def test_prompts_are_measured_with_the_tools_of_their_own_environment():
    def find(word: str) -> str:
        """Find a word."""
        return word

    env = ScriptedEnv()
    env.tools = [find]
    fitting(examples(50), None, 256)
    with pytest.raises(ValueError, match="fill max_seq_len=256"):
        fitting(examples(50), env, 256)
    # A conversation that its environment holds has no prompt to measure.
    one, two = ScriptedEnv(), ScriptedEnv()
    two.holds_conversation = True
    env = Mixture(envs={"one": one, "two": two}, weights={"one": 1.0, "two": 1.0})
    assert {e.id for e in fitting(examples(50, 300, env="one"), env)} == {0}
    assert {e.id for e in fitting(examples(300, 300, env="two"), env)} == {0, 1}
    # The rollouts of a prompt that cannot be rendered report the error.
    broken = Example(7, "scripted", [{"content": "no role" * 100}])
    assert fitting([broken])[0] is broken


def test_the_replacement_does_not_depend_on_what_was_measured_before(caplog):
    prompts = examples(*[50, 300] * 20)
    drawn = [example.id for example in fitting(prompts)]
    assert len(caplog.records) == 5  # for the 1st, 2nd, 4th, 8th and 16th that is too long
    backwards = fitting(prompts)
    assert drawn == [backwards[i].id for i in reversed(range(40))][::-1]
    assert drawn[::2] == list(range(0, 40, 2))  # each prompt that fits keeps its position
    assert len(set(drawn[1::2])) > 5  # not one example for all prompts that are too long
