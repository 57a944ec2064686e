"""Run the command `offbyone`, such as `offbyone train loss=cispo` or `offbyone new my-idea`."""

import keyword
import re
import runpy
import shutil
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rl.config.shipped import SHIPPED

ENTRY_POINTS = {
    "train": "train a policy, or start a sweep with --multirun",
    "evaluate": "measure a model or a checkpoint on held-out examples",
    "report": "compare runs with confidence intervals",
    "view": "browse rollouts and tokens",
    "compare-losses": "compute other losses on the batches that a run recorded",
    "plan": "show devices and memory of a run without starting it",
    "optimize-prompt": "search for a better system prompt",
}
NEW = "new"
# Subcommand -> (module whose main(arguments) returns the text to print, help text).
FUNCTIONS = {
    "doctor": ("lab.doctor", "check this machine, and say what to install"),
    "from-toml": ("lab.from_toml", "print the command for a TOML file of verifiers or prime-rl"),
}
_PACKAGES = ("rl", "lab", "losses", "envs", "offbyone")
_TEMPLATE_PACKAGE = "my_lab"  # the package name in examples/my-lab


def usage() -> str:
    about = {**ENTRY_POINTS, NEW: "create a folder with a loss, an environment and their tests"}
    about |= {name: text for name, (_, text) in FUNCTIONS.items()}
    lines = [f"  offbyone {name:<16} {text}" for name, text in about.items()]
    return "\n".join(["usage: offbyone <command> [key=value ...]", "", *lines])


def main() -> None:
    command, arguments = next(iter(sys.argv[1:]), "--help"), sys.argv[2:]
    if command in ("--help", "-h", "help"):
        print(usage())  # noqa: T201
    elif command == "--version":
        print(version("offbyone-rl"))  # noqa: T201
    elif command == NEW:
        print(copy_my_lab(arguments))  # noqa: T201
    elif command in FUNCTIONS:
        print(import_module(FUNCTIONS[command][0]).main(arguments))  # noqa: T201
    elif command in ENTRY_POINTS:
        exit_if_package_is_hidden()
        script = SHIPPED / f"{command.replace('-', '_')}.py"
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.exit(f"offbyone has no command {command}\n{usage()}")


def exit_if_package_is_hidden() -> None:
    root = Path(__file__).parents[2]
    for name in _PACKAGES:
        module = import_module(name)
        folders = [Path(folder) for folder in getattr(module, "__path__", [module.__file__])]
        if root / name not in folders:
            sys.exit(
                f"{folders[0]} hides the package {name} of offbyone: rename this file or folder, "
                "or start offbyone from another folder"
            )


def copy_my_lab(arguments: list[str]) -> str:
    """Copy examples/my-lab, and name its package after the new folder. Return what to do next."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit("usage: offbyone new <folder>")
    folder = Path(arguments[0])
    package = re.sub(r"\W", "_", folder.resolve().name).lower()
    template = SHIPPED / "examples" / "my-lab"
    losses = [path.stem for root in (SHIPPED, template) for path in root.glob("conf/loss/*.yaml")]
    is_taken = package in (*losses, "conf", "tests") or getattr(find_spec(package), "origin", None)
    if not package.isidentifier() or keyword.iskeyword(package):
        sys.exit(f"{package} cannot be the name of a Python package: choose another name")
    if is_taken and package != _TEMPLATE_PACKAGE:
        sys.exit(f"{package} is already a loss, a module or a folder of a lab: choose another name")
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        sys.exit(f"{folder} is a file or is not empty: choose another folder")
    caches = shutil.ignore_patterns("__pycache__", ".pytest_cache", "outputs")
    shutil.copytree(template, folder, ignore=caches, dirs_exist_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True):  # rename files before their folders
        if path.is_file():
            path.write_text(path.read_text().replace(_TEMPLATE_PACKAGE, package))
        path.rename(path.with_name(path.name.replace(_TEMPLATE_PACKAGE, package)))
    return (
        f"created {folder} with the package {package}\n\n"
        f"  cd {folder}\n"
        "  python -m pytest\n"
        f"  offbyone train loss={package} max_steps=20"
    )
