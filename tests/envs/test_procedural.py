"""What all environments and sources that make examples up have in common."""

from itertools import islice
from random import Random

import pytest

from envs.alphabet_sort import AlphabetSort
from envs.arithmetic import Arithmetic
from envs.maths.calculations import KINDS, Calculations
from envs.maths.word_problems import WordProblems
from envs.reverse_text import ReverseText

OPTIONS = {
    ReverseText: {
        "min_length": 3,
        "max_length": 8,
        "num_train": 2000,
        "num_eval": 100,
        "reward_weights": {"exact": 1.0, "similarity": 0.0},
    },
    Arithmetic: {
        "max_operand": 20,
        "operators": ["+", "-", "*"],
        "num_train": 3000,
        "num_eval": 200,
        "reward_weights": {"correct": 1.0},
    },
    AlphabetSort: {
        "min_turns": 2,
        "max_turns": 3,
        "num_names": 3,
        "names_per_turn": 1,
        "min_length": 2,
        "max_length": 4,
        "similarity_power": 2.0,
        "num_train": 500,
        "num_eval": 100,
        "reward_weights": {"exact": 0.0, "similarity": 1.0},
    },
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
    return kind(**{**OPTIONS[kind], **changes})


def examples(made, split):
    return made.examples(split) if hasattr(made, "examples") else made.load(split)


def texts(made, split):
    if hasattr(made, "examples"):
        return [example.messages[0]["content"] for example in made.examples(split)]
    return [question.text for question in made.load(split)]


def fresh(made, seed, number):
    """Return demonstrations or new questions."""
    drawn = (made.sample_questions if hasattr(made, "sample_questions") else made.demonstrations)(
        Random(seed)
    )
    return list(islice(drawn, number))


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
    if kind not in (WordProblems, Calculations):
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
        (Arithmetic, {"num_train": 0}, "num_train=0"),
        (Arithmetic, {"num_eval": 1323}, "only 1323 questions: raise max_operand or lower num_ev"),
        (AlphabetSort, {"min_turns": 4}, "min_turns to at most"),
        (AlphabetSort, {**ONE_LETTER, "num_names": 6}, "26 names .* 8 different .* raise max_len"),
        (
            AlphabetSort,
            {"max_turns": 2, **ONE_LETTER, "num_eval": 326},
            "num_eval=326 leaves too few .* 650 lists",
        ),
        (AlphabetSort, {"similarity_power": 0.0}, "set it above 0"),
        (WordProblems, {"min_steps": 6}, "min_steps to at most"),
        (Calculations, {"kinds": ["sums"]}, "sums.* one or more of product"),
        (Calculations, {"kinds": []}, "one or more of"),
        (Calculations, {"digits": 7}, "digits=7"),
        (Calculations, {"digits": 1}, "digits=1"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **changes)
