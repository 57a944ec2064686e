"""offbyone from-toml: the commands for TOML files of verifiers and prime-rl."""

import os
import re
import shlex
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

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
mask_truncated_completions = false
zero_truncated_completions = true
buffer.type = "online-difficulty"
[[orchestrator.env]]
id = "owner/reverse-text"
"""
VF = """
model = "Qwen/Qwen3-0.6B"
env = { id = "owner/alphabet-sort", args = { max_turns = 3, seed = 7 } }
inference = { gpus = 2, args.max_model_len = 64 }
trainer.gpus = 1
[trainer.args]
use_lora = false
micro_batch_size = 4
top_p = 0.9
bf16 = false
lr_scheduler_type = "linear"
eval_steps = 5
surprise = 1
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
            "adapter.target_modules=[q_proj,v_proj] truncation=zero_reward buffer=difficulty "
            "buffer.min_reward=0.01 buffer.max_reward=0.99 env=reverse-text",
            ["orchestrator.env.id"],
        ),
        (
            VF,
            f"train experiment=rlconfig model=hf {QWEN} "
            "env=alphabet-sort env.max_turns=3 inference.replicas=2 "
            "+inference.args.max_model_len=64 trainer.ranks=1 adapter=none "
            "sampler.allow_biased_ratio=true sampler.top_p=0.9 model.dtype=float32 "
            "optim.schedule=linear evaluation.every=5",
            ["env.id", "env.args.seed", "trainer.args.micro_batch_size", "trainer.args.surprise"],
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


@pytest.mark.parametrize("text", [PRIME, HOSTED.replace("unknown", "arithmetic")])
def test_the_translated_command_passes_the_check(text, tmp_path):
    _, _, *overrides = shlex.split(translate(text).splitlines()[0])
    overrides = [item for item in overrides if not item.startswith(("env.", "inference.devices"))]
    check(composed(*overrides, f"output_dir={tmp_path}"))


def test_truncated_answers_that_are_masked_and_zeroed_have_one_choice():
    command = translate(PRIME.replace("= false", "= true"))
    assert "truncation=mask_zero" in command
    assert "truncation=mask " not in command


@pytest.mark.parametrize(
    ("sampling", "is_biased"),
    [("top_p = 0.9", True), ("top_p = 0.9\ntop_k = 64", False), ("top_k = 129", True),
     ("top_k = -1\nmin_p = 0.1", True), ("top_k = 64\nrepetition_penalty = 1.1", True),
     ("top_k = 64\nrepetition_penalty = 1.0", False)],
)  # fmt: skip
def test_a_bias_is_accepted_only_where_no_exact_ratios_exist(sampling, is_biased, tmp_path):
    command = translate(f"[orchestrator.sampling]\n{sampling}").splitlines()[0]
    assert ("sampler.allow_biased_ratio=true" in command) == is_biased
    check(composed(*shlex.split(command)[2:], f"output_dir={tmp_path}"))


def test_an_argument_of_an_own_environment_is_named_with_its_cell():
    (note,) = translate('env = { id = "gsm8k", args.num_train = 9 }').splitlines()[2:]
    assert note.startswith("# env.args.num_train = 9: options of ")


def test_several_environments_are_left_to_a_file_of_the_user():
    text = '[[env]]\nid = "gsm8k"\nweight = 0.5\n[[env]]\nid = "math-python"\nweight = 0.3\n'
    command, note = translate(text).splitlines()
    assert command == "offbyone train 'env=<copy>'"  # fails until the user has chosen the file
    assert note.startswith("# several environments: copy conf/env/three-tasks.yaml, ")
    named = "env.id = gsm8k, env.weight = 0.5, env.id = math-python, env.weight = 0.3"
    assert note.endswith(f"choose it with env=<copy>: {named}")


# A table, a setting, a comment or a further line of a list. Documents have TOML between prose.
TOML_LINE = re.compile(r"""(\[+[\w.]+\]+|"?[a-z][\w.]* = .*|#.*|["\]].*)?""")


def seed_files() -> list[str]:
    """Return each TOML file, and each excerpt of one, in the documents of OFFBYONE_SEEDS."""
    files = [""]
    for path in sorted(Path(os.environ.get("OFFBYONE_SEEDS", "/nowhere")).glob("*.txt")):
        for line in [*path.read_text().splitlines(), "the end"]:
            if TOML_LINE.fullmatch(line.strip()):
                files[-1] += f"{line}\n"
            elif files[-1]:
                files.append("")
    found = []
    for text in files:
        with suppress(tomllib.TOMLDecodeError):  # a sentence with a setting
            found += [text] if tomllib.loads(text) else []
    return found


def without_setting(lines: list[str], at: int) -> str:
    """Return the file without the setting that begins at a line."""
    opens_list = lines[at].rstrip().endswith("[")
    after = next(i for i in range(at, len(lines)) if lines[i].startswith("]")) if opens_list else at
    return "\n".join([*lines[:at], *lines[after + 1 :]])


def test_every_key_of_the_files_of_the_seed_documents_is_translated_or_named(tmp_path):
    files = seed_files()
    if not files:
        pytest.skip("OFFBYONE_SEEDS names no folder of documents")
    assert len(files) >= 15
    for text in files:
        answer = translate(text)
        assert "does not name this key" not in answer, answer
        _, program, *overrides = shlex.split(answer.splitlines()[0])
        if "max_steps" in text and "env]" in text:  # a whole file
            assert program == "train"
            kept = [one for one in overrides if not one.startswith(("inference.devices", "env=<"))]
            check(composed(*kept, f"output_dir={tmp_path}"))
        lines = text.splitlines()
        for at in [i for i, line in enumerate(lines) if re.match(r"[\w\"].* = (?!false)", line)]:
            with suppress(ValueError):  # no key is left
                assert translate(without_setting(lines, at)) != answer, lines[at]


def test_the_command_reads_a_file_and_refuses_one_that_is_no_toml(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("max_steps = 3")
    monkeypatch.setattr(sys, "argv", ["offbyone", "from-toml", str(path)])
    console.main()
    assert capsys.readouterr().out == "offbyone train max_steps=3\n"
    path.write_text("max_steps: 3")
    with pytest.raises(SystemExit, match="cannot be translated: Expected"):
        console.main()
    path.write_text("[surprise]\nmax_steps = 3")
    with pytest.raises(SystemExit, match="cannot be translated: it has no key that docs"):
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
