"""What would fail only after a warm start, or in another program's words, is refused at once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.config.check import check
from rl.config.vllm_flags import known_flags
from tests.support.composing import REPO, Changes, changed, chosen, composed, only_problem

DISTILL = {"loss": chosen("loss", "distill")}


def teacher(path: Path | str) -> Changes:
    node = {**chosen("reference", "model"), "path": str(path), "dtype": "float32"}
    return {**DISTILL, "reference": node}


def data(path: Path | str, config: dict[str, Any]) -> dict[str, Any]:
    node = composed("env=composed", "env.dataset.path=x")["env"]
    node["dataset"]["path"] = str(path)
    return changed(config, {"env": node})


def flags(**given: Any) -> Changes:
    return {"inference.args": given}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_num_sequs", "max_num_sequs is no flag of vLLM: did you mean max_num_seqs?"),
        ("--enforce-eagr", "--enforce-eagr is no flag of vLLM: did you mean enforce_eager?"),
        ("xyzzy", "xyzzy is no flag of vLLM"),
        ("api_key", "api_key is decided by output_dir"),
    ],
)
def test_a_flag_that_vllm_does_not_have_is_refused(
    name: str, said: str, config: dict[str, Any]
) -> None:
    assert only_problem(changed(config, flags(**{name: 1}))).startswith(f"inference.args.{said}")


def test_flags_that_vllm_has_are_none_of_our_business(config: dict[str, Any]) -> None:
    names = ("max_num_seqs", "max-num-seqs", "--no-enable-prefix-caching", "no_enforce_eager")
    check(changed(config, flags(**dict.fromkeys(names, 4))))
    check(changed(config, flags(**{"compilation-config.level": 3, "tool_call_parser": "hermes"})))
    scripted = {**config["inference"], "args": {"faults": "file"}}
    scripted["_target_"] = "tests.support.scripted_vllm.ScriptedVLLM"
    check(changed(config, {"inference": scripted}))


@pytest.mark.server
def test_the_flags_read_from_source_are_those_of_the_parser() -> None:
    code = (
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "actions = make_arg_parser(FlexibleArgumentParser())._actions\n"
        "print(*(s for a in actions for s in a.option_strings if s.startswith('--')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    real = {name[2:].replace("-", "_") for name in done.stdout.splitlines()[-1].split()}
    assert len(real) > 200
    unknown = {name for name in real if name.removeprefix("no_") not in known_flags()}
    assert unknown <= {name for name in real if name in known_flags()}


@pytest.mark.parametrize("stage", [4, -1, 1.5, True, "two"])
def test_a_stage_that_zero_does_not_have_is_refused(stage: Any, config: dict[str, Any]) -> None:
    problem = only_problem(changed(config, {"deepspeed": {"zero_optimization": {"stage": stage}}}))
    assert problem.startswith(f"deepspeed.zero_optimization.stage={stage}, but ZeRO has the")


def test_a_teacher_that_is_not_whole_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    problem = only_problem(changed(config, teacher(folder)))
    assert problem.endswith(r"holds no *.safetensors: save the whole model there")
    (folder / "model.safetensors").touch()
    check(changed(config, teacher(folder)))
    problem = only_problem(changed(config, teacher(tmp_path / "teecher")))
    assert "no such folder" in problem
    assert problem.endswith("did you mean teacher?")


def test_a_name_in_a_folder_of_ours_is_none_on_the_hub(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    for key in ("model", "reference"):
        node = changed(config, teacher("Qwen/Qwen3-0.6B"))
        node[key] = {
            **chosen("model", "tiny-wiki"),
            "path": "models/tiny-wikki",
            "max_seq_len": 256,
        }
        if key == "reference":
            node = changed(config, teacher("models/tiny-wikki"))
        problem = only_problem(node)
        assert problem == (f"{key}.path=models/tiny-wikki: no such folder: did you mean tiny-wiki?")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.jsonl", "no such file (looked for in "),
        ("folder", "is a folder: name the file in it that holds the rows"),
        (
            "rows.csv",
            "holds no JSON lines: use env.dataset._target_=envs.datasets.Files "
            "+env.dataset.format=csv",
        ),
    ],
)
def test_a_data_set_that_is_not_there_is_refused(
    name: str, said: str, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.csv").write_text("question,answer\n")
    problem = only_problem(data(tmp_path / name, config))
    assert problem.startswith(f"env.dataset.path={tmp_path / name}")
    assert said in problem


@pytest.mark.parametrize("choice", ["tiny-wiki", "tiny-words"])
def test_files_of_ours_are_found_wherever_one_starts(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"tiny-wiki": "path", "tiny-words": "tokenizer"}[choice]
    monkeypatch.chdir(REPO)
    assert not os.path.isabs(composed(f"model={choice}")["model"][key])
    monkeypatch.chdir(tmp_path)
    config = composed("env=wiki-search", f"model={choice}", f"output_dir={tmp_path}")
    assert Path(config["model"][key]).exists()
    check(config)
