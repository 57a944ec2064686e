"""The floors of the house: imports only point down, and the heavy ones stay where they belong."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
LONGEST_FILE, LONGEST_ENTRY_POINT = 220, 50

# A module of rl/ imports modules of lower floors only. A new module: put it on the lowest it can.
FLOORS = (
    "adapter attention chart client estimates failure fingerprint free_form kl layout metrics "
    "model_folder muon process ranges ranks reaper records run_folder signatures status token_sums "
    "tokenizer vllm_processes wire",
    "annotations batches blame buffer demonstrations example_order logprobs model_files objective "
    "optim panel plan reads rollout_metrics rows runs sampler strategy truncation verdict "
    "vllm_plugin",
    "algorithm_rules chat credit dispatcher engine evaluation_table pretrained "
    "rollout_lines screen server summary tiny transcripts",
    "policy rules speaker tokens_chat",
    "config player reference rewriting",
    "anchors clients construction endpoint evaluation evaluation_config evaluation_page "
    "hydra_errors loading parts warm_start weights",
    "learner messages_chat periodic",
    "checkpoint",
    "evaluating launch rollouts supervisor trainer",
)
FLOOR = {f"rl.{name}": floor for floor, names in enumerate(FLOORS, 1) for name in names.split()}
MAINS = {"rl.supervisor", "rl.rollouts", "rl.trainer", "rl.evaluating"}
# All that rl/ may know of the other two folders: their records, no formula and no environment.
SHARED = {"envs.cache", "envs.messages", "envs.protocol", "envs.workers", "losses.tokens"}
AT_HOME = {"vllm": {"rl.vllm_plugin", "rl.vllm_processes"}, "deepspeed": {"rl.engine", "rl.ranks"}}
HEAVY = {"torch", "transformers", "deepspeed", "vllm"}

ENTRY_POINTS = sorted(path for path in REPO.glob("*.py") if path.name != "conftest.py")
MODULES = {
    f"{folder}.{path.stem}": path
    for folder in ("rl", "losses", "envs")
    for path in sorted((REPO / folder).glob("*.py"))
    if path.stem != "__init__"
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, `from package import module` spelled out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {str(node.module)}
    return found


def roots(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(path)}


def test_every_module_of_rl_has_its_floor():
    assert {name for name in MODULES if name.startswith("rl.")} == set(FLOOR)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("rl.")])
def test_a_module_of_rl_imports_only_from_lower_floors(name):
    ours = {m for m in imports(MODULES[name]) if m.partition(".")[0] in ("rl", "losses", "envs")}

    too_high = {m for m in ours - SHARED if FLOOR.get(m, 99) >= FLOOR.get(name, 0)}
    assert not too_high, f"{name} (floor {FLOOR.get(name)}) imports {sorted(too_high)}"


@pytest.mark.parametrize("folder", ["losses", "envs"])
def test_losses_and_environments_import_only_their_own_folder(folder):
    others = {"rl", "losses", "envs"} - {folder}
    for name, path in MODULES.items():
        if name.startswith(f"{folder}."):
            assert not roots(path) & others, name


def test_an_entry_point_is_thin_and_imports_only_rl():
    assert ENTRY_POINTS
    for path in ENTRY_POINTS:
        assert not roots(path) & {"losses", "envs", *HEAVY}, path.name
        assert len(path.read_text().splitlines()) <= LONGEST_ENTRY_POINT, path.name


def test_only_entry_points_import_the_three_mains():
    for name, path in MODULES.items():
        assert not imports(path) & MAINS, name


@pytest.mark.parametrize("package", AT_HOME)
def test_vllm_and_deepspeed_are_imported_in_one_place(package):
    assert {name for name, path in MODULES.items() if package in roots(path)} == AT_HOME[package]


def targets(*groups: str) -> set[str]:
    """Modules that the YAML files of these groups name."""
    texts = (
        path.read_text() for group in groups for path in (REPO / "conf" / group).glob("*.yaml")
    )
    found = {target for text in texts for target in re.findall(r"_target_: ([\w.]+)\.\w+", text)}
    assert found
    return found


@pytest.mark.parametrize(
    ("main", "groups"),
    [
        (
            "train, rl.supervisor",
            "model env sampler client buffer optim inference logger evaluation",
        ),
        (
            "rl.rollouts",
            "model env sampler client buffer reward truncation advantage aggregation evaluation",
        ),
        ("evaluate, rl.evaluating", "model env sampler client inference"),
    ],
)
def test_neither_supervisor_nor_rollouts_can_reach_torch(main, groups):
    modules = ", ".join([main, *sorted(targets(*groups.split()))])
    code = f"import sys; before = set(sys.modules); import {modules}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert "rl.records" in done.stdout or not main.startswith("rl.")
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize("folder", ["rl", "losses", "envs", "benchmarks"])
def test_a_file_is_short_enough_to_be_read(folder):
    lengths = {
        str(path.relative_to(REPO)): len(path.read_text().splitlines())
        for path in (REPO / folder).rglob("*.py")
    }
    assert not {path: n for path, n in lengths.items() if n > LONGEST_FILE}
