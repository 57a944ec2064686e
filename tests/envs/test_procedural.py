"""Environments and sources of questions that make up their examples; sandboxes run their code."""

import asyncio
import math
import re
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


def scores(env, example, said):
    episode = Episode(example, [*example.messages, assistant(said)], turns=1)
    return asyncio.run(env.score(episode))


@pytest.mark.parametrize("kind", OPTIONS)
def test_training_and_demonstrations_share_no_example_with_eval(kind):
    made = make(kind, **FEW[kind])
    held_out = set(texts(made, "eval"))
    shown = {d[0]["content"] if isinstance(d, list) else d.text for d in fresh(made, 3, 500)}
    assert len(held_out) > 6
    assert held_out.isdisjoint(texts(made, "train"))
    assert held_out.isdisjoint(shown)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_options_and_seeds_give_the_same_examples(kind):
    train, held_out = (examples(make(kind), split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (OPTIONS[kind]["num_train"], OPTIONS[kind]["num_eval"])
    assert train == examples(make(kind), "train")
    assert held_out == examples(make(kind, num_train=5), "eval")
    if kind in WEIGHTS:
        assert [example.id for example in train] == list(range(len(train)))
    first, again, other = (fresh(make(kind), seed, 20) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (ReverseText, {"min_length": 9}, "min_length to at most"),
        (ReverseText, {"min_length": 0}, "at least 1"),
        (ReverseText, {"max_length": 3, "num_train": 17500}, "only 17576 words .* raise max_leng"),
        (ReverseText, {"reward_weights": {"exakt": 1.0}}, "exakt.* choose from exact, similarity"),
        (Arithmetic, {"operators": []}, "one or more of"),
        (Arithmetic, {"operators": ["/"]}, "one or more of"),
        (Arithmetic, {"operators": ["+", "+"]}, "each once"),
        (Arithmetic, {"num_eval": 1323}, "only 1323 questions: raise max_operand or lower num_ev"),
        (AlphabetSort, {"min_turns": 4}, "min_turns to at most"),
        (AlphabetSort, {**ONE_LETTER, "num_names": 6}, "26 names .* 8 different .* raise max_len"),
        (AlphabetSort, {**ONE_LETTER, "max_turns": 2, "num_eval": 326}, "=326 .* few .* 650 lists"),
        (WordProblems, {"min_steps": 6}, "min_steps to at most"),
        (Calculations, {"kinds": ["sums"]}, "sums.* one or more of product"),
        (Calculations, {"kinds": []}, "one or more of"),
        (Calculations, {"digits": 7}, "digits=7"),
        (Calculations, {"digits": 1}, "digits=1"),
        # an error, and not an endless search
        (
            Calculations,
            FEW[Calculations] | {"num_eval": 8101},
            r"=8101, but only 8\d{3} .* lower n",
        ),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        examples(make(kind, **changes), "eval")


@pytest.mark.parametrize(
    ("said", "exact", "similarity"),
    [
        *(("tac", 1, 1), ("<think>\ncat, so\n</think>\n\ntac", 1, 1)),
        ("it ends in t</think>tac", 1, 1),
        ("<think>tac", 0, 0),  # reasoning without an end has no answer
        *(("ta", 0, 2 / 3), ("taco", 0, 3 / 4), ("cat", 0, 1 / 3), ("ta c", 0, 2 / 4)),
        *(("TAC", 0, 0), ("", 0, 0), ("\ufffd\ufffd", 0, 0)),
    ],
)
def test_rewards_of_reversing_cat(said, exact, similarity):
    cat = Example(0, "reverse-text", [], {"answer": "tac"})
    expected = pytest.approx({"exact": exact, "similarity": similarity})
    assert scores(make(ReverseText), cat, said) == expected


def test_the_expert_in_reversing_scores_one_on_its_own_and_on_every_example():
    env = make(ReverseText)
    for example in env.examples("eval"):
        word = example.messages[0]["content"].removeprefix("reverse: ")
        assert scores(env, example, word[::-1]) == {"exact": 1.0, "similarity": 1.0}
    for prompt, answer in fresh(env, 0, 50):
        assert prompt == user(f"reverse: {answer['content'][::-1]}")
        assert answer["role"] == "assistant"


def test_all_existing_words_and_words_longer_than_the_largest_numbered_length_can_be_used():
    for options, longest in (
        ({"min_length": 1, "max_length": 2, "num_train": 700, "num_eval": 2}, 26 + 26**2),
        ({"min_length": 13, "max_length": 300, "num_train": 400}, 500),
    ):
        env = make(ReverseText, **options)
        words = [e.info["answer"] for split in ("train", "eval") for e in env.examples(split)]
        assert len(set(words)) == len(words) == longest
        assert {options["min_length"], options["max_length"]} <= set(map(len, words))
    assert next(env.demonstrations(Random(0)))


@pytest.mark.parametrize(
    ("answer", "said", "correct"),
    [
        *(("7", "7", 1), ("-1", "-1", 1), ("7", "<think>3 and 4</think>\n\n7", 1)),
        *(("7", "<think>7", 0), ("7", "8", 0), ("7", "07", 0), ("7", "3 + 4 = 7", 0)),
        *(("7", "", 0), ("7", "seven \ufffd", 0)),
    ],
)
def test_reward_of_a_number(answer, said, correct):
    example = Example(0, "arithmetic", [], {"answer": answer})
    assert scores(make(Arithmetic), example, said) == {"correct": correct}


def worked_out(question):
    a, sign, b, _ = question.split()
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def test_answers_of_arithmetic_are_right_and_the_expert_gives_them():
    env = make(Arithmetic)
    for example in [*env.examples("eval"), *env.examples("train")]:
        assert example.info["answer"] == str(worked_out(example.messages[0]["content"]))
    assert {scores(env, e, e.info["answer"])["correct"] for e in env.examples("eval")} == {1.0}
    for question, answer in fresh(env, 0, 200):
        assert answer == assistant(str(worked_out(question["content"])))


def test_training_questions_repeat_in_order_only_when_there_are_too_few():
    env = make(Arithmetic, **FEW[Arithmetic])  # 2 * 5 * 5 = 50 questions, 45 held out
    train = texts(env, "train")
    assert len(set(texts(env, "eval"))) == 45
    assert len(set(train)) == 5
    assert train == (train[:5] * 3)[:12]
    assert {messages[0]["content"] for messages in fresh(env, 3, 200)} == set(train)
    for options, count in (({"num_train": 1000}, 1000), ({}, 1123), ({"max_operand": 10**9}, 3000)):
        assert len(set(texts(make(Arithmetic, **options), "train"))) == count


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


@pytest.mark.parametrize(
    ("answers", "exact", "similarity"),  # of each turn
    [
        (["an dob kit", "an dob fe kit"], [1, 1], [1, 1]),
        ([" an\ndob  kit\n", "<think>fe?</think>an dob fe kit"], [1, 1], [1, 1]),
        (["an dob kit", "fe an dob kit"], [1, 0], [1, (6 / 8) ** 2]),  # 3 of 4 in order
        (["an dob kit", "an dob kit"], [1, 0], [1, (6 / 7) ** 2]),  # fe forgotten
        (["an dob kit"], [1], [1]),  # cut off: the turn that was not played scores 0
        (["kit dob an", "an dob fe kit"], [0, 1], [(2 / 6) ** 2, 1]),
        (["dob an kit", "an dob fe kit"], [0, 1], [(4 / 6) ** 2, 1]),
        (["an dob kit an", "an dob fe kit"], [0, 1], [(6 / 7) ** 2, 1]),  # one too many
        *((["an,dob,kit", "AN DOB FE KIT"], [0, 0], [0, 0]), (["", "\ufffd"], [0, 0], [0, 0])),
        ([], [], []),
    ],
)
async def test_each_turn_of_sorting_gives_half_of_the_reward(answers, exact, similarity):
    _, found = await play(make(AlphabetSort), LISTS, answers)
    assert found["exact"] == [turn / 2 for turn in exact]
    assert found["similarity"] == pytest.approx([turn / 2 for turn in similarity])


async def test_every_answer_gets_the_next_names_until_the_last_turn():
    episode, _ = await play(make(AlphabetSort), LISTS, ["nonsense", "more", "never asked for"])
    assert [m["content"] for m in episode.messages[1:]] == ["nonsense", "add: fe", "more"]


async def test_the_expert_in_sorting_scores_one_in_the_environments_own_conversations():
    env = make(AlphabetSort, names_per_turn=2, max_turns=4)
    turns = set()
    for shown in fresh(env, 0, 100):
        lists = [message["content"].split()[1:] for message in shown[::2]]
        example = Example(0, env.name, shown[:1], {"names": lists})
        episode, found = await play(env, example, [m["content"] for m in shown[1::2]])
        assert episode.messages == shown
        assert {n: math.fsum(part) for n, part in found.items()} == {"exact": 1, "similarity": 1}
        assert [len(names) for names in lists] == [3] + [2] * (len(lists) - 1)
        turns.add(len(lists))
    assert turns == {2, 3, 4}


def test_all_names_of_a_list_differ():
    length, turns = {"min_length": 2, "max_length": 2}, {"min_turns": 1, "max_turns": 1}
    make(AlphabetSort, **length, **turns, num_names=169)  # 26 ** 2 = 4 * 169 names are enough
    for example in make(AlphabetSort).examples("train"):
        names = [name for turn in example.info["names"] for name in turn]
        assert len(set(names)) == len(names) in (4, 5)
        assert {len(name) for name in names} <= {2, 3, 4}


@pytest.mark.parametrize("source", [WordProblems, Calculations])
def test_python_agrees_with_every_answer(source):
    box = make_sandbox()

    async def disagreements():
        questions = make(source).load("train")
        return [q for q in questions if await box.run(q.code) != f"{q.answer}\n"]

    assert asyncio.run(disagreements()) == []
    box.close()


def test_the_solution_of_a_word_problem_leads_from_its_first_number_to_its_answer():
    for question in make(WordProblems).load("train"):
        number = re.search(r"has (\d+)", question.text)[1]
        for line in question.solution.splitlines():
            left, _, result = line.partition(" = ")
            assert left.startswith(f"{number} ")
            assert eval(left) == int(result)
            number = result
        assert number == question.answer
        assert int(number) > 0


def trials(weights=None, **changes):
    plain = {"turns": 1, "copied": 0.0, "uneven": 0.0, "copy_tasks": 0.0}
    lengths = {"min_length": 3, "max_length": 3, "num_train": 100, "num_eval": 20}
    return Trials(**{**plain, **lengths, **changes}, reward_weights=weights or {"exact": 1.0})


def scored(env, example, *said, **place):
    messages = [m for text in said for m in (example.messages[0], assistant(text))]
    return asyncio.run(env.score(Episode(example, messages, turns=len(said), **place)))


def test_a_turn_is_right_copied_or_wrong_and_its_length_counts():
    env = trials()
    example = env.examples("eval")[0]
    word = example.info["words"][0]
    found = [scored(env, example, text) for text in (word[::-1], word, "x" * 64)]
    names = ("exact", "copied", "length")
    told = [tuple(one[name] for name in names) for one in found]
    assert told == [(1, 0, 3 / 32), (0, 1, 3 / 32), (0, 0, 1)]


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
    assert asyncio.run(env.reply(Episode(example, [], turns=3), assistant("x"))) is None
    assert scored(env, example, words[0][::-1], "no", words[2][::-1])["exact"] == 2 / 3
    assert scored(env, example, words[0][::-1])["exact"] == 1 / 3
    assert scored(env, example, words[0])["copied"] == 1 / 3
    assert scored(env, example, "x" * 16, "x" * 16)["length"] == 1 / 3


def test_the_second_skill_is_demonstrated_and_judged_but_not_trained():
    env = trials(copy_tasks=0.5)
    asked = [m[0]["content"].split(":")[0] for m in fresh(env, 0, 200)]
    assert 60 < asked.count("copy") < 140
    assert not any(one.info["is_copy"] for one in env.examples("train"))
    copies = [one for one in env.examples("eval") if one.info["is_copy"]]
    assert len(copies) == 10
    assert scored(env, copies[0], copies[0].info["words"][0])["kept"] == 1
    assert "kept" not in scored(env, env.examples("eval")[0], "x")


def test_an_unknown_reward_of_trials_is_refused():
    assert trials({"exact": 1.0, "similarity": 0.0}).reward_weights == {"exact": 1.0}
    with pytest.raises(ValueError, match="reward_weights"):
        trials({"length2": 1.0})
