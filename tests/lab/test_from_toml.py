"""offbyone from-toml: the commands for TOML files of verifiers and prime-rl."""

import re
import shlex
import sys

import pytest

from lab import from_toml
from lab.cli import console
from lab.from_toml import translate
from rl.config.check import check
from rl.config.shipped import SHIPPED
from tests.support.composing import composed
from tests.support.golden import golden

QWEN = "model.path=Qwen/Qwen3-0.6B"
PRIME = """
inference_gpu_ids = [0]
model.name = "Qwen/Qwen3-0.6B"
wandb = { project = "mine", name = "first" }
trainer.model.experimental.lora = { rank = 4, target_modules = ["q_proj", "v_proj"] }
[orchestrator]
mask_truncated_completions = true
zero_truncated_completions = true
buffer.type = "online-difficulty"
[[orchestrator.env]]
id = "owner/reverse-text"
"""
VF = """
env = { id = "owner/alphabet-sort", args = { max_turns = 3, seed = 7 } }
inference.args.max_model_len = 64
trainer.args = { top_p = 0.9, surprise = 1 }
"""
HOSTED = """
model = "Qwen/Qwen3-0.6B"
batch_size = 32
sampling.stop = ["</answer>"]
difficulty_filter = { enabled = true, max_reward = 0.95 }
kl_penalty = { enabled = true, beta = 0.1 }
[[env]]
id = "owner/unknown"
harness.max_turns = 8
"""
GEPA = 'model = "Qwen/Qwen3-0.6B"\nenv.id = "reverse-text"\ngepa.max_calls = 40'


@pytest.mark.parametrize(
    ("text", "command", "noted"),
    [
        (
            PRIME,
            f"train inference.devices=[0] model=hf {QWEN} logger=wandb "
            "logger.project=mine run_name=first adapter=lora adapter.rank=4 "
            "adapter.target_modules=[q_proj,v_proj] buffer=difficulty "
            "buffer.min_reward=0.01 buffer.max_reward=0.99 env=reverse-text truncation=mask_zero",
            ["orchestrator.env.id"],
        ),
        (
            VF,
            "train experiment=rlconfig env=alphabet-sort env.max_turns=3 "
            "+inference.args.max_model_len=64 sampler.allow_biased_ratio=true sampler.top_p=0.9",
            ["env.id", "env.args.seed", "trainer.args.surprise"],
        ),
        (
            HOSTED,
            f"train model=hf {QWEN} batch_size=32 "
            "sampler.stop=['</answer>'] buffer=difficulty buffer.max_reward=0.95 kl=adaptive "
            "kl.beta=0.1 env=verifiers env.id=owner/unknown",
            ["env.max_turns=8", "adapter"],
        ),
        (GEPA, f"optimize-prompt {QWEN} env=reverse-text max_calls=40", ["env.id"]),
    ],
    ids=["prime-rl", "vf-rl", "hosted", "gepa"],
)
def test_each_key_is_translated_or_named_with_the_reason(text, command, noted):
    first, *notes = translate(text).splitlines()
    assert shlex.split(first) == ["offbyone", *shlex.split(command, posix=False)]
    assert [re.split(" = |: ", note.removeprefix("# "))[0] for note in notes] == noted


@pytest.mark.parametrize(
    ("text", "is_biased"),
    [
        ("[orchestrator.sampling]\ntop_p = 0.9\ntop_k = 64", False),
        ("[orchestrator.sampling]\ntop_k = 129", True),
        ("[orchestrator.sampling]\ntop_k = 64\nrepetition_penalty = 1.1", True),
        (HOSTED.replace("owner/unknown", "arithmetic").partition("harness")[0], False),
    ],
)
def test_a_command_passes_the_check_and_accepts_a_bias_only_where_no_exact_ratios_exist(
    text, is_biased, tmp_path
):
    command = translate(text).splitlines()[0]
    assert ("sampler.allow_biased_ratio=true" in command) == is_biased
    check(composed(*shlex.split(command)[2:], f"output_dir={tmp_path}"))


def test_the_command_reads_a_file_and_refuses_one_that_is_no_toml(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("max_steps = 3")
    monkeypatch.setattr(sys, "argv", ["offbyone", "from-toml", str(path)])
    console.main()
    assert capsys.readouterr().out == "offbyone train max_steps=3\n"
    path.write_text("max_steps: 3")
    with pytest.raises(SystemExit, match="cannot be translated: Expected"):
        console.main()


def test_every_key_of_the_tables_of_from_verifiers():
    """The overrides of each key for values of every type, and the notes on model=hf."""
    values, found = ("linear", True, False, 3), {}
    sections = from_toml._sections((SHIPPED / "docs" / "from-verifiers.md").read_text())
    for name in from_toml._COMMANDS:
        for key in sections[name]:
            items = [from_toml._translate_key(key, value, sections[name])[0] for value in values]
            lines = list(map(" ".join, items))
            found[f"{name}: {key}"] = lines[0] if len({*lines}) == 1 else lines
    hf = [["model=hf", "sampler.max_tokens=2049"], ["model=hf", "sampler.max_tokens=2048"],
          ["model=hf", "max_seq_len=9", "sampler.max_tokens=4000"], ["model=hf", "adapter=none"],
          ["sampler.max_tokens=4000"]]  # fmt: skip
    notes = from_toml._notes_on_hf
    found["hf"] = [[notes(name, one), one] for one in hf for name in ("hosted", "gepa")]
    plain = (0.25, [1, "x y"], "null", "a'b", [True])
    found["values"] = list(map(from_toml._as_hydra_value, plain))
    golden("cli/from_toml", found)
