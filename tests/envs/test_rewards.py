"""Comparisons of text, and rewards of whole episodes, as tables."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs import rewards
from envs.episode import Episode, Example
from envs.maths.grading import final_answer, marked_answer, normalise, number
from envs.messages import assistant
from tests.support.fuzz import large_texts, texts


def score(reward, said, answer=None, **options):
    example = Example(4, "e", [], {} if answer is None else {"answer": answer})
    return asyncio.run(reward(Episode(example, [assistant(said)]), **options))


def test_exact_and_f1_of_text():
    for said, answers, exact, f1 in (
        ("the Eiffel Tower.", ["Eiffel tower"], 1, 1),
        ("Eiffel", ["Eiffel Tower"], 0, 2 / 3),  # precision 1, recall 1/2
        ("a b b c", ["b b b d"], 0, 2 * 2 / (3 + 4)),  # the article a falls away
        ("Theodore", ["odore"], 0, 0),
        ("paris", ["London", "Paris, France", "Paris"], 1, 1),
        ("paris", "Paris", 1, 1),  # one text is one answer, not five letters
        *(("x", [""], 0, 0), ("!!!", [""], 0, 0), ("x", [], 0, 0)),
        (" ", [""], 1, 1),  # an empty text is right if the answer is empty
        # an answer that is only an article or punctuation
        *(("The", ["an"], 0, 0), ("", ["A"], 0, 0), (" a. ", ["A"], 1, 1)),
        # punctuation that changes no number
        *(("1,234", ["1234"], 1, 1), ("\u22125", ["-5"], 1, 1), ("$5!", ["5"], 1, 1)),
        *(("the A", ["A"], 0, 2 * 1 / (2 + 1)), ("+", ["-"], 0, 0), (" - ", ["-"], 1, 1)),
    ):
        assert rewards.exact(said, answers) == exact
        assert rewards.f1(said, answers) == pytest.approx(f1)


def test_punctuation_that_changes_a_number_or_a_formula_is_compared():
    for said, answer in (
        *(("-$5", "$5"), ("1.5", "15"), (".5", "5"), ("1/2", "12"), ("1,2", "12"), ("7:30", "730")),
        *(("3.000", "3,000"), ("x^-2", "x2"), ("(x)+1", "x1"), ("x-y", "x+y"), ("2a/b", "2ab")),
    ):
        assert rewards.exact(said, answer) == rewards.exact(answer, said) == 0
        assert rewards.exact(f"**{said}**.", said) == rewards.exact(f"({said})", said) == 1
        assert rewards.f1(said, answer) == 0
        assert score(rewards.contains, f"It is {said}.", answer) == 0
        assert score(rewards.contains, f"It is {said}.", said) == 1


def test_rewards_of_an_answer():
    for said, answer, exact_match, token_f1, contains in (
        ("Paris!", "paris", 1, 1, 1),
        ("It is Paris.", "Paris", 0, 2 * 1 / (3 + 1), 1),
        ("<think>London</think>\nParis", "London", 0, 0, 0),
        *(("<think>Paris, surely", "Paris", 0, 0, 0), ("comparison", "paris", 0, 0, 0)),
        *(("new  york", ["NYC", "New York"], 1, 1, 1), ("42", 42, 1, 1, 1)),
        ("(A)", "A", 1, 1, 0),  # an answer of only an article
    ):
        assert score(rewards.exact_match, said, answer) == exact_match
        assert score(rewards.token_f1, said, answer) == pytest.approx(token_f1)
        assert score(rewards.contains, said, answer) == contains


def test_the_last_number_is_compared():
    for said, answer, tolerance, match in (
        *(("3 + 4 = 7.", 7, 0, 1), ("7 of 8", "7", 0, 0), ("8 of 7", ["6", "7"], 0, 1)),
        *(("<think>7</think> none", "7", 0, 0), ("", "7", 0, 0), ("5 km/h", "5", 0, 1)),
        ("so 72", "48 + 24 = <<48+24=72>>72 clips\n#### 72", 0, 1),
        # signs, of which U+2212 is one, and minuses
        *(("10-3", "-3", 0, 0), ("it is -3", "-3", 0, 1), ("-$1,200", "-1200", 0, 1)),
        *(("it is \u22125", "5", 0, 0), ("it is \u22125", "-5", 0, 1), ("10\u22123", "-3", 0, 0)),
        # decimals, in which 0.3 - 0.1 is no more than 0.2; the float 0.3 is less than 0.3
        *(("0.1", 0.3, 0.2, 1), ("0.0999", 0.3, 0.2, 0), ("1.3", "1", 0.3, 1)),
        *((".5", "0.5", 0, 1), ("-.5 or so.", "-0.5", 0, 1), ("9" * 400, f"1{'0' * 400}", 1.0, 1)),
        # exponents, of which no number could hold the third
        *(("1e5", "100000", 0, 1), ("2.5E\u22121", "0.25", 0, 1), ("1e9999999", "9999999", 0, 1)),
        ("7e", "7", 0, 1),
        # thousands have three digits, and the others are lists
        *(("about 1,234.50 dollars", "1234.5", 0, 1), ("1,234,567", "1234567", 0, 1)),
        *(("12,3456", "3456", 0, 1), ("1,2,3", "3", 0, 1)),
        # fractions, which dates and divisions by zero are not, and percentages
        *(("3/4", "0.75", 0, 1), ("3/4", "4", 0, 0), ("-1/3", "-0.3333", 0.001, 1)),
        *(("3/0", "3", 0, 1), ("on 12/24/2026", "12", 0, 1)),
        *(("50%", "50", 0, 1), ("50 %", "0.5", 0, 0)),
    ):
        assert score(rewards.number_match, said, answer, tolerance=tolerance) == match


def test_a_pattern_matches_the_whole_answer_without_its_reasoning():
    for said, match in (
        ("<think>so</think>\n\n<answer>7\n8</answer>\n", 1),
        ("<answer>7</answer> there", 0),
        ("<think><answer>7</answer>", 0),
    ):
        assert score(rewards.matches, said, pattern="<answer>.+</answer>") == match


def test_a_slow_pattern_and_an_example_without_a_usable_answer_are_errors():
    with pytest.raises(ValueError, match=r"pattern=.* took over"):
        score(rewards.matches, "a" * 60 + "c", pattern="(.|..)*[xb]")
    with pytest.raises(ValueError, match=r"example 4 has no info\['answer'\]"):
        score(rewards.exact_match, "x")
    with pytest.raises(ValueError, match=r"\['seven'\] has no number: use the reward exact_match"):
        score(rewards.number_match, "7", "seven", tolerance=0.0)


async def test_every_way_to_read_an_answer_reads_any_text():
    ways = (rewards.exact_match, rewards.token_f1, rewards.contains)
    for said in [*large_texts(), *islice(texts(Random("fuzz")), 1_000)]:
        episode = Episode(Example(4, "e", [], {"answer": "12"}), [assistant(said)])
        found = [await way(episode) for way in ways]
        found.append(await rewards.number_match(episode, tolerance=0.1))
        found.append(await rewards.matches(episode, pattern=r"\s*<b>.*</b>\s*"))
        assert 0 <= min(found) <= max(found) <= 1
        marked_answer(said)
        number(normalise((final_answer(said) or "")[:500]))
