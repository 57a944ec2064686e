"""Data sets: columns, splits without common prompts, and files read by the real library."""

import csv
import json
import sys

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
    info = {"answer": "8", "level": 1}
    assert train[7] == Example(7, "mine", [user("7 + 1?")], info)
    assert [example.id for example in train] == list(range(40))
    assert (list(train), train[-1].id) == (train[:], 39)
    with pytest.raises(IndexError):
        train[40]


def test_other_columns_can_be_the_prompt_and_the_answer(tmp_path):
    told = [user("hi \u2028 there")]  # no line break in JSON
    for row, columns, messages, info in (
        ({"told": told, "n": 5}, {"prompt": "told", "answer": "n"}, told, {"answer": 5, "n": 5}),
        ({"q": 7}, {"prompt": "q", "answer": None}, [user("7")], {}),
    ):
        (example,) = both(lines(tmp_path / "a.jsonl", [row], **columns, num_eval=0))[0]
        assert (example.messages, example.info) == (messages, info)


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
    _, held_out = both(lines(tmp_path / "a.jsonl", **paths, num_eval=30))
    assert len(held_out) == 20  # all that there are
    dataset = lines(tmp_path / "a.jsonl", eval_path=str(tmp_path / "a.jsonl"), num_eval=30)
    assert len(dataset.examples("eval", env="mine")) == 30
    with pytest.raises(ValueError, match=r"no rows for training, because all 40 have prompts that"):
        dataset.examples("train", env="mine")
    written(tmp_path / "eval.jsonl", [])
    with pytest.raises(ValueError, match=r"eval\.jsonl has no rows"):
        lines(tmp_path / "a.jsonl", **paths).check()


def test_a_file_is_checked_before_the_run_unless_it_is_large(tmp_path, monkeypatch):
    dataset = lines(tmp_path / "a.jsonl", answer="reply")
    size = (tmp_path / "a.jsonl").stat().st_size
    monkeypatch.setattr("envs.datasets._CHECKED_BYTES", size)
    with pytest.raises(ValueError, match="row 1 has no value in the column 'reply'"):
        dataset.check()
    monkeypatch.setattr("envs.datasets._CHECKED_BYTES", size - 1)
    dataset.check()


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
    # Several files, one of them for evaluation.
    for i in range(2):
        datasets.Dataset.from_list(ROWS[20 * i : 20 * i + 20]).to_parquet(tmp_path / f"{i}.parquet")
    paths = {"path": str(tmp_path / "[01].parquet"), "eval_path": str(tmp_path / "1.parquet")}
    train, held_out = both(Files(format="parquet", **paths, **COLUMNS))
    assert (len(train), len(held_out)) == (20, 10)
    assert set(prompts(held_out)) <= {f"{i} + 1?" for i in range(20, 40)}


def test_a_data_set_in_the_form_of_the_hub_has_splits_by_name(tmp_path, datasets, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, rows in (("train", ROWS[:30]), ("test", ROWS[30:])):
        written(folder / f"{split}.jsonl", rows)
    options = {**COLUMNS, "path": str(folder), "config": None, "revision": None, "num_eval": 5}
    train, held_out = both(Hub(split="train", eval_split="test", **options))
    assert (len(train), len(held_out)) == (30, 5)
    assert set(prompts(held_out)) <= {f"{i} + 1?" for i in range(30, 40)}
    train, held_out = both(Hub(split="train[:50%]", eval_split=None, **options))
    assert (len(train), len(held_out)) == (10, 5)
    options["eval_split"] = None
    with pytest.raises(ValueError, match=r"cannot be loaded \(\w+: .* name and splits, and the "):
        both(Hub(split="validation", **options))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    missing = Hub(split="train", **{**options, "path": "no-such/data"})
    for read in (missing.check, lambda: both(missing)):
        with pytest.raises(ValueError, match=r"cannot be fetched \(HF_HUB_OFFLINE is set\): use "):
            read()
    monkeypatch.setattr(
        "envs.datasets.load_rows", lambda *given, **more: [{"question": (given, more), "answer": 1}]
    )
    options |= {"path": "a/b", "config": "main", "revision": "v2", "num_eval": 0}
    (example,) = both(Hub(split="train", **options))[0]
    asked = {"split": "train", "name": "main", "revision": "v2"}
    assert example.messages == [user(str((("a/b", "a/b"), asked)))]


def test_without_the_library_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)  # import then raises ImportError
    files = Files(format="csv", path="a.csv", eval_path=None, **COLUMNS)
    with pytest.raises(ValueError, match=r"a\.csv needs .* `pip install datasets`"):
        both(files)
    assert len(both(lines(tmp_path / "a.jsonl"))[0]) == 30


TOLD = '{"question": [{"role": "human", "content": "q"}], "answer": 1}'
GOOD, LINES = '{"question": "q", "answer": 1}\n', "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ('{"question": "q", "a": 1}', {}, r"row 1 .* column 'answer' \(it has 'question', "),
        (LINES + '{"question": null, "answer": 1}', {}, "row 41 has no value in the column 'quest"),
        (LINES + '{"question": "", "answer": null}', {}, "row 41 has no value in the column 'ans"),
        (GOOD + "{", {}, "line 2 is not JSON at character 2 .Exp.*quotes.: correct"),
        ("[1]", {}, "line 1 is not a JSON object"),
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
