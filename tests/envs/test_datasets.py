"""Data sets: columns, splits without common prompts, and files read by the real library."""

import csv
import json

import pytest

from envs.datasets import Files, Hub, JsonLines
from envs.episode import Example
from envs.messages import user

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1), "level": i % 3} for i in range(40)]
COLUMNS = {"prompt": "question", "answer": "answer", "num_eval": 10}


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """Return the library, whose cache is in a folder of the test."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    return library


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def lines(file, rows=ROWS, **changes):
    options = {**COLUMNS, "path": written(file, rows), "eval_path": None}
    return JsonLines(**{**options, **changes})


def both(dataset):
    return [dataset.examples(split, env="mine") for split in ("train", "eval")]


def prompts(examples):
    return [example.messages[-1]["content"] for example in examples]


def test_a_row_becomes_an_example_with_its_other_columns(tmp_path):
    train, _ = both(lines(tmp_path / "a.jsonl", num_eval=0))
    assert train[7] == Example(7, "mine", [user("7 + 1?")], {"answer": "8", "level": 1})
    assert (list(train), train[-1].id) == (train[:], 39)
    told = [user("hi \u2028 there")]  # no line break in JSON
    rows = [{"told": told, "n": 5}, {"told": 7, "n": 6}]
    columns = {"prompt": "told", "answer": "n", "num_eval": 0}
    first, second = both(lines(tmp_path / "a.jsonl", rows, **columns))[0]
    assert (first.messages, first.info) == (told, {"answer": 5, "n": 5})
    assert second.messages == [user("7")]


def test_held_out_prompts_do_not_depend_on_the_order_and_are_not_trained_on(tmp_path):
    train, held_out = both(lines(tmp_path / "a.jsonl"))
    assert (len(train), len(held_out)) == (30, 10)
    assert set(prompts(train)).isdisjoint(prompts(held_out))
    turned = both(lines(tmp_path / "b.jsonl", ROWS[::-1]))[1]
    assert prompts(turned) == prompts(held_out)[::-1]
    twice = both(lines(tmp_path / "c.jsonl", ROWS + ROWS))
    assert [len(split) for split in twice] == [60, 20]
    assert set(prompts(twice[1])) == set(prompts(held_out))
    assert [example.id for example in twice[1]] == list(range(20))


def test_a_file_for_evaluation_is_a_split_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "eval.jsonl", ROWS[::2])
    paths = {"path": "~/a.jsonl", "eval_path": "~/eval.jsonl"}
    train, chosen = both(lines(tmp_path / "a.jsonl", **paths, num_eval=5))
    # Prompts of the file are never trained on, even if num_eval leaves them out of an evaluation.
    assert prompts(train) == [f"{i} + 1?" for i in range(1, 40, 2)]
    assert len(chosen) == 5
    assert set(prompts(chosen)) <= {f"{i} + 1?" for i in range(0, 40, 2)}
    written(tmp_path / "eval.jsonl", ROWS[::2][::-1])
    _, turned = both(lines(tmp_path / "a.jsonl", **paths, num_eval=5))
    assert prompts(turned) == prompts(chosen)[::-1]
    written(tmp_path / "eval.jsonl", [])
    with pytest.raises(ValueError, match=r"eval\.jsonl has no rows"):
        lines(tmp_path / "a.jsonl", **paths).check()


def test_parquet_and_csv_give_the_same_examples_as_json_lines(tmp_path, datasets):
    from_lines = both(lines(tmp_path / "a.jsonl"))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ROWS[0].keys())
        table.writeheader()
        table.writerows(ROWS)
    for kind in ("parquet", "csv"):
        files = Files(format=kind, path=str(tmp_path / f"a.{kind}"), eval_path=None, **COLUMNS)
        for ours, theirs in zip(both(files), from_lines, strict=True):
            assert prompts(ours) == prompts(theirs)
            infos = [{**e.info, "answer": str(e.info["answer"])} for e in ours]
            assert infos == [e.info for e in theirs]


def test_a_data_set_in_the_form_of_the_hub_has_splits_by_name(tmp_path, datasets, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, rows in (("train", ROWS[:30]), ("test", ROWS[30:])):
        written(folder / f"{split}.jsonl", rows)
    options = {**COLUMNS, "path": str(folder), "config": None, "revision": None, "num_eval": 5}
    train, held_out = both(Hub(split="train", eval_split="test", **options))
    assert (len(train), len(held_out)) == (30, 5)
    assert set(prompts(held_out)) <= {f"{i} + 1?" for i in range(30, 40)}
    monkeypatch.setattr(
        "envs.datasets.load_rows", lambda *given, **more: [{"question": (given, more), "answer": 1}]
    )
    options |= {"path": "a/b", "config": "main", "revision": "v2", "num_eval": 0}
    (example,) = both(Hub(split="train", eval_split=None, **options))[0]
    asked = {"split": "train", "name": "main", "revision": "v2"}
    assert example.messages == [user(str((("a/b", "a/b"), asked)))]


TOLD = '{"question": [{"role": "human", "content": "q"}], "answer": 1}'
GOOD, LINES = '{"question": "q", "answer": 1}\n', "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ('{"question": "q", "a": 1}', {}, r"row 1 .* column 'answer' \(it has 'question', "),
        (LINES + '{"question": null, "answer": 1}', {}, "row 41 has no value in the column 'quest"),
        (GOOD + "{", {}, "line 2 is not JSON at character 2 .Exp.*quotes.: correct"),
        ("\n", {}, "has no rows"),
        (None, {}, "no such file"),
        (GOOD + TOLD, {}, r"jsonl, row 2: message 1 has the role 'human': use system, user, assis"),
        (GOOD * 2, {"num_eval": 1}, "leaves no rows for training, because all 2 have prompts that"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path, text, changes, message):
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        both(JsonLines(**{**COLUMNS, "path": str(path), "eval_path": None, **changes}))
