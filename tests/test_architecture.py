"""The house: which package may know which, and where the heavy libraries live.

A package of rl/ is a process or a concern; those with a __main__.py are processes. What crosses the
wall between processes lies at the root of rl/. docs/architecture.md draws it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
LONGEST_ENTRY_POINT = 50

# What a package may import besides itself. One without an entry here fails the test.
MAY_IMPORT = {
    "rl.records": "envs",
    "rl.wire": "",
    "rl.config": "",
    "rl.run": "",
    "rl.cluster": "rl.run",
    "rl.model": "rl.config",
    "rl.placement": "rl.config rl.run rl.model",
    "rl.inference": "rl.config rl.run rl.model",
    "rl.sampling": "rl.records rl.model rl.inference envs",
    "rl.evaluation": "rl.records rl.config rl.run rl.placement rl.inference rl.sampling envs",
    "rl.rollouts": "rl.records rl.wire rl.config rl.run rl.model rl.inference rl.sampling "
    "rl.evaluation envs",
    "rl.learner": "rl.records rl.config rl.run rl.model losses",
    "rl.weights": "rl.records rl.config rl.run rl.model rl.inference rl.learner",
    "rl.trainer": "rl.records rl.wire rl.config rl.run rl.inference rl.learner rl.weights",
    "rl.report": "rl.run envs",
    "rl.prompts": "rl.records rl.config rl.run rl.model rl.placement rl.inference rl.sampling "
    "rl.evaluation rl.report envs",
    "rl.viewer": "rl.run",
    "rl.supervisor": "rl.config rl.run rl.cluster rl.model rl.placement rl.inference rl.report "
    "envs",
    "rl.sweeps": "rl.config rl.run rl.report",
    "rl.cli": "rl.config rl.run rl.sweeps",
    "envs": "",
    "losses": "",
    "offbyone": "envs rl.config",
}
PROCESSES = {"rl.inference", "rl.rollouts", "rl.trainer"}
# All that rl/ may know of the other two folders: what an environment is, what a loss sees.
SHARED = {
    *("envs.cache", "envs.episode", "envs.messages", "envs.protocol", "envs.threads"),
    *("envs.lazy_examples", "envs.turn_limits"),
    "envs.turn_rewards",
    "losses.tokens",
}
AT_HOME = {
    "vllm": {"rl.weights.vllm_plugin", "rl.weights.vllm_proof", "rl.inference.quick_start"},
    "deepspeed": {"rl.learner.deepspeed_engine", "rl.learner.ranks"},
    "ray": {"rl.cluster.ray_cluster"},
}
HEAVY = {"torch", "transformers", "deepspeed", "vllm", "ray"}

ENTRY_POINTS = sorted(path for path in REPO.glob("*.py") if path.name != "conftest.py")


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in ("rl", "losses", "envs", "offbyone"):
        for path in sorted((REPO / folder).rglob("*.py")):
            parts = path.relative_to(REPO).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(_modules())


def package_of(module: str) -> str:
    """The package of a module of ours, at the depth of MAY_IMPORT."""
    return next(p for p in (".".join(module.split(".")[:2]), module.split(".")[0]) if p in PACKAGES)


PACKAGES = {
    ".".join(parts[:2] if parts[0] == "rl" else parts[:1])
    for parts in (name.split(".") for name in MODULES)
} - {"rl"}


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, `from package import module` spelled out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (modules & MODULES.keys()) or {str(node.module)}
    return names


def ours(name: str) -> set[str]:
    """What a module imports of ours, itself excepted."""
    return (imports(MODULES[name]) & MODULES.keys()) - {name}


def roots(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(path)}


def test_every_package_has_its_line_and_every_line_its_package():
    assert set(MAY_IMPORT) == PACKAGES
    assert {p for p in PACKAGES if f"{p}.__main__" in MODULES} == PROCESSES


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package):
    allowed = {package, *MAY_IMPORT[package].split()}
    inside = [name for name in MODULES if name != "rl" and package_of(name) == package]
    assert inside
    for name in inside:
        strangers = {other for other in ours(name) if package_of(other) not in allowed}
        assert not strangers, f"{name} imports {sorted(strangers)}"


def test_the_allowed_imports_form_no_cycle():
    graph = {package: allowed.split() for package, allowed in MAY_IMPORT.items()}
    assert set(TopologicalSorter(graph).static_order()) == PACKAGES


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter({name: ours(name) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rl_knows_no_particular_loss_and_no_particular_environment():
    for name in (name for name in MODULES if name.startswith("rl.")):
        particular = {m for m in ours(name) if m.startswith(("envs.", "losses."))} - SHARED
        assert not particular, f"{name} imports {sorted(particular)}"


def test_a_package_of_rl_says_in_one_docstring_what_it_is_and_imports_nothing():
    for name, path in MODULES.items():
        if path.name == "__init__.py" and name != "offbyone":  # that one is other programs' face
            (only,) = ast.parse(path.read_text()).body
            assert isinstance(only, ast.Expr), f"{name} does more than say what it is"


def test_an_entry_point_is_thin_and_imports_only_rl():
    assert ENTRY_POINTS
    for path in ENTRY_POINTS:
        assert not roots(path) & {"losses", "envs", *HEAVY}, path.name
        assert len(path.read_text().splitlines()) <= LONGEST_ENTRY_POINT, path.name


@pytest.mark.parametrize("library", AT_HOME)
def test_vllm_deepspeed_and_ray_are_imported_in_one_place(library):
    assert {name for name, path in MODULES.items() if library in roots(path)} == AT_HOME[library]


def targets(*groups: str) -> set[str]:
    """Modules that the YAML files of these groups name."""
    texts = (
        path.read_text() for group in groups for path in (REPO / "conf" / group).glob("*.yaml")
    )
    modules = {target for text in texts for target in re.findall(r"_target_: ([\w.]+)\.\w+", text)}
    assert modules
    return modules


@pytest.mark.parametrize(
    ("mains", "groups"),
    [
        (
            "train, rl.supervisor.supervise",
            "model adapter env order sampler client buffer optim inference logger evaluation",
        ),
        (
            "rl.rollouts.__main__",
            "model env order sampler client buffer reward truncation advantage aggregation "
            "evaluation",
        ),
        ("evaluate, rl.evaluation.standalone", "model env sampler client inference"),
        (
            "optimize_prompt, rl.prompts.optimize, rl.prompts.search",
            "model env sampler client inference",
        ),
    ],
)
def test_neither_supervisor_nor_rollouts_nor_whoever_only_plays_can_reach_torch(mains, groups):
    modules = ", ".join([mains, *sorted(targets(*groups.split()))])
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert "rl.records" in done.stdout
    assert not HEAVY & set(done.stdout.split())
