"""The viewer shows the recorded numbers of a token, and why it has no gradient."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tokenizers

from lab.viewer.token_record import NO_RECORD, NOT_TRAINED, pieces, tokens_of, zero_reason
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import Lines, read_rows, write_lines
from tests.support.viewed_run import copy_run

TOKEN = {"grad": 0.0, "advantage": 0.5, "ratio": 1.3125, "weight": 0.1, "correction": 1.0}
PPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "epsilon": 1e-8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder(copy_run(tmp_path_factory.mktemp("token") / "run"))


def read(run: RunFolder, identity: str, step: int = 0, *, used: bool = True):
    def recorded(step: int) -> dict:
        return {identity: read_rows(run, step, identity)}

    return tokens_of(run, step, identity, recorded, used=used, options={"clip_low": 0.2})


UP, DOWN = "ratio 1.31 and advantage > 0: clipped", "ratio 0.50 and advantage < 0: clipped"
BOUNDS = "loss: clip_low=0.2, clip_high=0.28, dual_clip=3"
DROPPED = "the correction for vLLM's logprobs dropped the token (correction 0)"
MEAN = "advantage 0: the reward equals its baseline, such as the mean of the group"
CLIPS = ["clip_fraction", "mask_fraction"]


@pytest.mark.parametrize(
    ("changes", "flagged", "reason"),
    [
        ({"grad": -0.01}, ["clip_fraction"], None),
        ({"grad": math.nan}, [], None),
        ({"weight": 0.0}, ["clip_fraction"], "the token's weight in the objective is 0"),
        ({"correction": 0.0}, [], DROPPED),
        ({"advantage": 0.0}, [], MEAN),
        ({"advantage": -1.0, "ratio": 0.5}, CLIPS[:1], f"{DOWN} (clip_fraction; {BOUNDS})"),
        ({}, [*CLIPS, "dropped"], f"{UP} (clip_fraction, mask_fraction, dropped; {BOUNDS})"),
        ({}, ["trust"], "the objective does not change with the token's probability"),
    ],
)
def test_why_a_token_has_no_gradient(changes, flagged, reason):
    assert zero_reason({**TOKEN, **changes}, flagged, PPO) == reason


def test_only_sampled_tokens_have_numbers(run: RunFolder):
    (row,) = read(run, "000003.2", 1)["rows"]
    sampled = [i for i, m in enumerate(row["mask"]) if m]
    for name in ("pi", "mu", "ratio", "mismatch", "grad", "entropy"):
        assert [i for i, x in enumerate(row[name]) if x is not None] == sampled
    for i in sampled:
        ratio = math.exp(row["pi"][i] - row["mu"][i])
        assert row["ratio"][i] == pytest.approx(ratio, rel=1e-4)
        clipped = bool(row["metrics"]["clip_fraction"][i])
        assert clipped == (row["grad"][i] == 0) == (row["reason"][i] is not None)
        if not clipped:
            expected = -row["weight"][i] * row["advantage"][i] * row["ratio"][i]
            assert row["grad"][i] == pytest.approx(expected, rel=1e-4)
    text = "".join(row["pieces"])
    assert text.startswith("<|im_start|>system\nAnswer from the pages")
    assert text.count("<|im_end|>") in (3, 5)


@pytest.mark.parametrize(("change", "limited"), [(0.5, 0.5), (30.0, 20.0), (-30.0, -20.0)])
def test_old_logprobs_replace_mu_in_the_ratio_and_pi_in_the_mismatch(change, limited, tmp_path):
    moved = RunFolder(copy_run(tmp_path / "run", steps=1))
    for path in (tmp_path / "run" / "tokens").glob("*.trainer.rank*"):
        table = pq.read_table(path)
        old = [[x - change for x in line] for line in table["pi"].to_pylist()]
        pq.write_table(table.append_column("old", [old]), path)
    (row,) = read(moved, "000000.2")["rows"]
    i = row["mask"].index(True)
    assert row["ratio"][i] == pytest.approx(math.exp(limited), rel=1e-4)
    assert row["mismatch"][i] == pytest.approx(row["pi"][i] - change - row["mu"][i], abs=1e-4)


def test_a_missing_record_is_reported(run: RunFolder, tmp_path: Path):
    assert read(run, "000000.0", step=77) == {"rows": [], "why": NO_RECORD}
    assert read(run, "000099.0")["why"].startswith("this group was not recorded")
    moved = RunFolder(copy_run(tmp_path / "run", steps=1))
    for path in moved.tokens.glob("*.trainer.rank*"):
        write_lines(path, Lines([], [], [], {}))  # the step trained on nothing
    (tmp_path / "run" / "model.txt").write_text("/nowhere\n\n")
    answer = read(moved, "000000.0")
    assert f"{NOT_TRAINED}; token ids instead of text" in answer["why"]
    assert not any(answer["rows"][0]["reason"])


def test_a_record_of_other_tokens_is_reported_and_not_shown(tmp_path: Path):
    run = RunFolder(copy_run(tmp_path / "run", steps=1))
    for path in (tmp_path / "run" / "tokens").glob("*.trainer.rank*"):
        table = pq.read_table(path)
        shorter = table.set_column(2, "pi", [[line[1:] for line in table["pi"].to_pylist()]])
        pq.write_table(shorter, path)
    answer = read(run, "000000.0")
    assert answer["rows"] == []
    assert "the files come from different runs" in answer["why"]


def test_the_last_token_of_a_character_shows_it_and_invalid_bytes_hide_no_later_ones():
    words = {"<unk>": 0, "a": 1, **{f"<0x{i:02X}>": 2 + i for i in range(256)}}
    model = tokenizers.models.BPE(words, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    whole = [2 + byte for byte in "日".encode()]
    ids = [1, *whole, *whole[:2], 1, *whole, 1]
    shown = pieces(tokenizer, ids)
    assert shown == ["a", "", "", "日", "", "", "a", "", "", "日", "a"]
