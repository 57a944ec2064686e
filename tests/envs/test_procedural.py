"""Environments and sources of questions that make up their examples; sandboxes run their code."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.alphabet_sort import AlphabetSort
from envs.arithmetic import Arithmetic
from envs.episode import Episode, Example
from envs.maths.calculations import KINDS, Calculations
from envs.maths.word_problems import WordProblems
from envs.messages import assistant, user
from envs.reverse_text import ReverseText
from envs.trials import Trials
from tests.support.sandboxes import make as make_sandbox

WEIGHTS = {
    ReverseText: {"reward_weights": {"exact": 1.0, "similarity": 0.0}},
    Arithmetic: {"reward_weights": {"correct": 1.0}},
    AlphabetSort: {"reward_weights": {"exact": 0.0, "similarity": 1.0}},
}
TURNS = {"min_turns": 2, "max_turns": 3, "num_names": 3, "names_per_turn": 1}
LENGTHS = {"min_length": 2, "max_length": 4, "similarity_power": 2.0}
OPTIONS = {
    ReverseText: {"min_length": 3, "max_length": 8, "num_train": 2000, "num_eval": 100},
    Arithmetic: {"max_operand": 20, "operators": [*"+-*"], "num_train": 3000, "num_eval": 200},
    AlphabetSort: {**TURNS, **LENGTHS, "num_train": 500, "num_eval": 100},
    WordProblems: {"min_steps": 1, "max_steps": 5, "num_train": 500, "num_eval": 100},
    Calculations: {"kinds": [*KINDS], "digits": 4, "num_train": 400, "num_eval": 50},
}
ONE_LETTER = {"num_names": 1, "min_length": 1, "max_length": 1}
FEW = {  # so few possible examples that random draws of train and eval would overlap
    ReverseText: {"min_length": 1, "max_length": 2, "num_train": 102, "num_eval": 600},  # of 702
    Arithmetic: {"max_operand": 4, "operators": ["+", "*"], "num_train": 12, "num_eval": 45},
    AlphabetSort: {"min_turns": 1, "max_turns": 1, **ONE_LETTER, "num_eval": 13},  # of 26
    WordProblems: {},
    Calculations: {"kinds": ["product"], "digits": 2, "num_train": 500, "num_eval": 100},
}


def make(kind, **changes):
    """Return an environment or a source of questions with some options changed."""
    return kind(**{**OPTIONS[kind], **WEIGHTS.get(kind, {}), **changes})


def examples(made, split):
    return made.examples(split) if hasattr(made, "examples") else made.load(split)


def texts(made, split):
    found = examples(made, split)
    return [one.text if hasattr(one, "text") else one.messages[0]["content"] for one in found]


def fresh(made, seed, number):
    """Return demonstrations or new questions."""
    draw = made.sample_questions if hasattr(made, "sample_questions") else made.demonstrations
    return list(islice(draw(Random(seed)), number))


@pytest.mark.parametrize("kind", OPTIONS)
def test_eval_examples_are_fixed_and_occur_in_no_training_and_no_demonstration(kind):
    made = make(kind, **FEW[kind])
    held_out = set(texts(made, "eval"))
    shown = {d[0]["content"] if isinstance(d, list) else d.text for d in fresh(made, 3, 500)}
    assert len(held_out) > 6
    assert held_out.isdisjoint(texts(made, "train"))
    assert held_out.isdisjoint(shown)
    assert examples(make(kind), "eval") == examples(make(kind, num_train=5), "eval")


def test_impossible_options_are_refused_with_a_remedy():
    for kind, changes, message in (
        (ReverseText, {"min_length": 0}, "at least 1"),
        (ReverseText, {"max_length": 3, "num_train": 17500}, "only 17576 words .* raise max_leng"),
        (ReverseText, {"reward_weights": {"exakt": 1.0}}, "exakt.* choose from exact, similarity"),
        (Arithmetic, {"operators": ["+", "+"]}, "each once"),
        (Arithmetic, {"num_eval": 1323}, "only 1323 questions: raise max_operand or lower num_ev"),
        (AlphabetSort, {**ONE_LETTER, "num_names": 6}, "26 names .* 8 different .* raise max_len"),
        (AlphabetSort, {**ONE_LETTER, "max_turns": 2, "num_eval": 326}, "=326 .* few .* 650 lists"),
        (Calculations, {"digits": 7}, "digits=7"),
        # an error, and not an endless search
        (Calculations, FEW[Calculations] | {"num_eval": 8101}, r"=8101, but only 8\d{3} .* lower"),
    ):
        with pytest.raises(ValueError, match=message):
            examples(make(kind, **changes), "eval")


def test_rewards_of_an_answer():
    for kind, answer, said, expected in (
        *((ReverseText, "tac", "tac", (1, 1)), (ReverseText, "tac", "<think>tac", (0, 0))),
        (ReverseText, "tac", "<think>\ncat, so\n</think>\n\ntac", (1, 1)),
        *((ReverseText, "tac", "taco", (0, 3 / 4)), (ReverseText, "tac", "cat", (0, 1 / 3))),
        *((ReverseText, "tac", "ta", (0, 2 / 3)), (ReverseText, "tac", "TAC", (0, 0))),
        *((Arithmetic, "-1", "-1", (1,)), (Arithmetic, "7", "<think>3</think>\n\n7", (1,))),
        *((Arithmetic, "7", "3 + 4 = 7", (0,)), (Arithmetic, "7", "07", (0,))),
    ):
        env, example = make(kind), Example(0, "e", [], {"answer": answer})
        found = asyncio.run(env.score(Episode(example, [assistant(said)], turns=1)))
        assert found == pytest.approx(dict(zip(env.REWARDS, expected, strict=True)))


# The correct lists are an dob kit, then an dob fe kit.
LISTS = Example(
    0, "alphabet-sort", [user("sort: dob an kit")], {"names": [["dob", "an", "kit"], ["fe"]]}
)


async def play(env, example, answers):
    """The conversation in which the policy says `answers`, as the player would lead it."""
    episode = Episode(example, list(example.messages))
    for answer in answers:
        episode.messages.append(assistant(answer))
        episode.turns += 1
        reply = await env.reply(episode, episode.messages[-1])
        if reply is None:
            break
        episode.messages += reply
    return episode, await env.score(episode)


async def test_each_turn_of_sorting_gives_half_of_the_reward():
    for answers, exact, similarity in (
        (["an dob kit", "an dob fe kit"], [1, 1], [1, 1]),
        ([" an\ndob  kit\n", "<think>fe?</think>an dob fe kit"], [1, 1], [1, 1]),
        (["an dob kit", "fe an dob kit"], [1, 0], [1, (6 / 8) ** 2]),  # 3 of 4 in order
        (["an dob kit", "an dob kit"], [1, 0], [1, (6 / 7) ** 2]),  # fe forgotten
        (["an dob kit"], [1], [1]),  # cut off: the turn that was not played scores 0
        (["dob an kit", "an dob fe kit"], [0, 1], [(4 / 6) ** 2, 1]),
        (["an dob kit an", "an dob fe kit"], [0, 1], [(6 / 7) ** 2, 1]),  # one too many
        (["an,dob,kit", "AN DOB FE KIT"], [0, 0], [0, 0]),
        ([], [], []),
    ):
        episode, found = await play(make(AlphabetSort), LISTS, answers)
        asked = [message["content"] for message in episode.messages[::2]]
        assert asked == ["sort: dob an kit", "add: fe"][: len(answers) + 1]
        assert found["exact"] == [turn / 2 for turn in exact]
        assert found["similarity"] == pytest.approx([turn / 2 for turn in similarity])


def test_python_agrees_with_every_answer():
    box = make_sandbox()

    async def disagreements():
        questions = [q for kind in (WordProblems, Calculations) for q in make(kind).load("train")]
        return [q for q in questions if await box.run(q.code) != f"{q.answer}\n"]

    assert asyncio.run(disagreements()) == []
    box.close()


def trials(**changes):
    plain = {"turns": 1, "copied": 0.0, "uneven": 0.0, "copy_tasks": 0.0}
    lengths = {"min_length": 3, "max_length": 3, "num_train": 100, "num_eval": 20}
    return Trials(**{**plain, **lengths, **changes}, reward_weights={"exact": 1.0})


def scored(env, example, *said, **place):
    messages = [m for text in said for m in (example.messages[0], assistant(text))]
    return asyncio.run(env.score(Episode(example, messages, turns=len(said), **place)))


def test_rewards_are_flipped_as_often_as_their_names_say():
    env = trials()
    example = env.examples("eval")[0]
    word = example.info["words"][0]
    found = [scored(env, example, word[::-1], number=number) for number in range(2000)]
    assert sum(one["flipped_10"] for one in found) / 2000 == pytest.approx(0.9, abs=0.03)
    assert sum(one["flipped_30"] for one in found) / 2000 == pytest.approx(0.7, abs=0.04)
    again = [scored(trials(), example, word[::-1], number=number) for number in range(20, 0, -1)]
    assert again == found[20:0:-1]  # also in another order, and after a resume
    flips = [one["flipped_30"] for one in found[:100]]
    for other, version in ((example, 1), (env.examples("eval")[2], 0)):
        said = other.info["words"][0][::-1]
        places = [{"number": number, "policy_version": version} for number in range(100)]
        assert [scored(env, other, said, **place)["flipped_30"] for place in places] != flips


def test_an_episode_of_several_turns_asks_for_other_words_and_scores_their_mean():
    env = trials(turns=3)
    example = env.examples("train")[0]
    words = example.info["words"]
    assert len({*words}) == 3
    episode = Episode(example, [*example.messages, assistant("x")], turns=1)
    asked = asyncio.run(env.reply(episode, assistant("x")))
    assert asked[0]["content"] == f"reverse: {words[1]}"
    assert scored(env, example, words[0][::-1], "no", words[2][::-1])["exact"] == 2 / 3
    assert scored(env, example, words[0], "no", words[2][::-1])["copied"] == 1 / 3
    assert scored(env, example, "x" * 16, "x" * 16)["length"] == 1 / 3  # 32 letters count as 1
    assert scored(env, example, "x" * 99)["length"] == 1
    assert "kept" not in scored(env, example, "x")
    copy = next(one for one in trials(copy_tasks=0.5).examples("eval") if one.info["is_copy"])
    assert scored(env, copy, copy.info["words"][0])["kept"] == 1 / 3
