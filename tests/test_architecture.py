"""Check which package may import which, where heavy libraries are imported, the reading order.

A package of rl/ is a process or one concern of training; processes have a __main__.py. Data that
crosses from one process to another is defined at the root of rl/.
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

# What a package may import besides itself. A package without an entry fails the test.
MAY_IMPORT = {
    "rl.records": "envs losses",
    "rl.schedule": "rl.config",
    "rl.wire": "",
    "rl.config": "rl.runtime envs",
    "rl.runtime": "envs",
    "rl.dry_call": "rl.records rl.config rl.runtime rl.rollouts rl.sampling envs losses",
    "rl.terminal": "rl.runtime",
    "rl.cluster": "rl.runtime",
    "rl.model": "rl.config envs",
    "rl.placement": "rl.config rl.runtime rl.model",
    "rl.inference": "rl.config rl.runtime rl.model envs",
    "rl.sampling": "rl.records rl.config rl.model rl.inference envs losses",
    "rl.evaluation": "rl.records rl.config rl.runtime rl.inference rl.sampling envs",
    "rl.rollouts": "rl.records rl.wire rl.config rl.runtime rl.model rl.inference rl.sampling "
    "rl.evaluation envs losses",
    "rl.learner": "rl.records rl.config rl.runtime rl.model envs losses",
    "rl.weights": "rl.records rl.config rl.runtime rl.model rl.inference rl.learner",
    "rl.trainer": "rl.records rl.wire rl.config rl.runtime rl.inference rl.learner rl.weights envs",
    "rl.supervisor": "rl.config rl.dry_call rl.runtime rl.terminal rl.cluster rl.model "
    "rl.placement rl.inference envs",
    "lab.plan": "rl.config rl.dry_call rl.runtime rl.model rl.placement rl.supervisor",
    "lab.runs": "rl.runtime",
    "lab.doctor": "rl.runtime rl.model rl.placement envs",
    "lab.from_toml": "rl.config rl.runtime",
    "lab.python_api": "rl.config rl.runtime rl.supervisor rl.terminal lab.cli lab.evaluation",
    "lab.report": "rl.runtime lab.runs envs",
    "lab.viewer": "rl.runtime lab.runs envs",
    "lab.losses": "rl.records rl.config rl.dry_call rl.rollouts rl.learner rl.runtime lab.cli "
    "lab.runs lab.viewer losses",
    "lab.evaluation": "rl.records rl.config rl.runtime rl.placement rl.inference rl.sampling "
    "rl.evaluation rl.terminal lab.viewer envs",
    "lab.prompts": "rl.records rl.config rl.runtime rl.model rl.placement rl.inference rl.sampling "
    "rl.evaluation rl.terminal lab.evaluation envs",
    "lab.sweeps": "rl.config rl.runtime rl.terminal lab.report",
    "lab.cli": "rl.config rl.dry_call rl.runtime lab.report lab.sweeps",
    "envs": "",
    "losses": "",
    "offbyone": "envs rl.config lab.python_api",
}
PROCESSES = {"rl.rollouts", "rl.trainer"}
# The only modules of envs/ and losses/ that rl/ may import.
SHARED = {
    *("envs.chat_endpoint", "envs.deadline", "envs.episode", "envs.http_client", "envs.loading"),
    *("envs.messages", "envs.options", "envs.protocol", "envs.stateful", "envs.threads"),
    "envs.user_code",
    "losses.groups",
    "losses.tokens",
}
ONLY_IN = {
    "vllm": {"rl.weights.vllm_plugin", "rl.weights.vllm_proof", "rl.inference.quick_start"},
    "deepspeed": {"rl.learner.deepspeed_engine", "rl.learner.ranks"},
    "ray": {"rl.cluster.ray_cluster"},
}
HEAVY = {"torch", "transformers", "deepspeed", "vllm", "ray"}


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in ("rl", "lab", "losses", "envs", "offbyone"):
        for path in sorted((REPO / folder).rglob("*.py")):
            parts = path.relative_to(REPO).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(_modules())
PACKAGES = {
    ".".join(parts[:2] if parts[0] in ("rl", "lab") else parts[:1])
    for parts in (name.split(".") for name in MODULES)
} - {"rl", "lab"}


def package_of(module: str) -> str:
    """Return the package of one of our modules, as MAY_IMPORT names it."""
    return next(p for p in (".".join(module.split(".")[:2]), module.split(".")[0]) if p in PACKAGES)


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, also by `from package import module`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (modules & MODULES.keys()) or {str(node.module)}
    return names


def own_imports(name: str) -> set[str]:
    """Return the modules of this repository that a module imports."""
    return (imports(MODULES[name]) & MODULES.keys()) - {name}


def roots(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {module.partition(".")[0] for module in imports(path)}


def test_a_package_imports_only_allowed_packages():
    assert set(MAY_IMPORT) == PACKAGES
    assert {p for p in PACKAGES if f"{p}.__main__" in MODULES} == PROCESSES
    for name in MODULES.keys() - {"rl", "lab"}:
        package = package_of(name)
        allowed = {package, *MAY_IMPORT[package].split()}
        refused = {other for other in own_imports(name) if package_of(other) not in allowed}
        assert not refused, f"{name} imports {sorted(refused)}"


def test_neither_packages_nor_modules_import_each_other_in_a_cycle():
    graph = {package: allowed.split() for package, allowed in MAY_IMPORT.items()}
    assert set(TopologicalSorter(graph).static_order()) == PACKAGES
    try:
        TopologicalSorter({name: own_imports(name) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rl_imports_no_single_loss_no_single_environment_and_nothing_of_lab():
    for name in (name for name in MODULES if name.startswith("rl.")):
        others = {m for m in own_imports(name) if m.startswith(("envs.", "losses.", "lab."))}
        assert others <= SHARED, f"{name} imports {sorted(others - SHARED)}"


def test_an_entry_point_is_short_and_imports_no_heavy_library():
    for path in REPO.glob("*.py"):
        assert not roots(path) & {"losses", "envs", *HEAVY}, path.name
        assert len(path.read_text().splitlines()) <= LONGEST_ENTRY_POINT, path.name


def test_vllm_deepspeed_and_ray_are_imported_only_in_listed_modules():
    for library, modules in ONLY_IN.items():
        assert {name for name, path in MODULES.items() if library in roots(path)} == modules


def test_no_module_unpickles_what_another_process_or_a_file_sends():
    # The dry call reads what its supervisor writes to its standard input. The engine imports the
    # name of an error.
    allowed = {"rl.dry_call.child", "rl.dry_call.learn", "rl.learner.deepspeed_engine"}
    assert {name for name, path in MODULES.items() if "pickle" in roots(path)} == allowed
    for name, path in MODULES.items():
        text = path.read_text()
        assert not re.search(r"_object(_list)?\(|weights_only=False|\.load_module\(", text), name


def test_supervisor_rollouts_evaluation_and_prompt_search_never_import_torch():
    groups = "adapter advantage aggregation buffer client env evaluation inference logger model "
    groups += "optim order reward sampler truncation"
    paths = (path for group in groups.split() for path in (REPO / "conf" / group).glob("*.yaml"))
    text = "\n".join(path.read_text() for path in paths)
    modules = {
        *("train", "rl.supervisor.supervise", "rl.rollouts.__main__"),
        *("evaluate", "lab.evaluation.standalone"),
        *("optimize_prompt", "lab.prompts.optimize", "lab.prompts.search"),
        *re.findall(r"_target_: ([\w.]+)\.\w+", text),
    }
    python = [sys.executable, "-c", f"import sys, {', '.join(modules)}; print(*sys.modules)"]
    done = subprocess.run(python, cwd=REPO, capture_output=True, text=True, check=True)
    assert {"rl.records", "rl.rollouts.buffer"} <= set(done.stdout.split())
    assert not HEAVY & set(done.stdout.split())


# The reading order of docs/architecture.md begins with the core.
CORE = ["rl/records.py", "rl/sampling/row_builder.py", "rl/rollouts/buffer.py"]
CORE += ["rl/rollouts/dispatcher.py", "rl/rollouts/plan.py", "rl/learner/objective.py"]
CORE += ["rl/trainer/loop.py"]
LONGEST_CORE = 1200  # lines


def num_lines(paths: list[str]) -> int:
    return sum(len((REPO / path).read_text().splitlines()) for path in paths)


def test_the_core_comes_first_and_is_short_and_the_page_says_how_many_lines_there_are():
    page = (REPO / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Reading order\n")[2].partition("\n## ")[0]
    introduction, *items = re.split(r"^\d+\. ", section, flags=re.MULTILINE)
    # An item names the files to read before its colon.
    named = [re.findall(r"`([\w/.]+/[\w/.]+)`", item.partition(": ")[0]) for item in items]
    order = [path for paths in named for path in paths]
    assert [path for path in order if path in CORE] == CORE
    # Among them stands what users write a loss against.
    assert set(order[: len(CORE) + 1]) == {*CORE, "losses/tokens.py"}
    assert num_lines(CORE) <= LONGEST_CORE
    said = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) lines", introduction)]
    for count, paths in zip(said, (CORE, order), strict=True):
        assert abs(count - num_lines(paths)) <= 50, num_lines(paths)
