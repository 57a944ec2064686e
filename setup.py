"""Add conf/, sweeps/, models/, the entry points and the other files named below to the wheel."""

from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("conf", "sweeps", "models", "baselines", "examples/my-lab")
ENTRY_POINTS = ["train", "evaluate", "report", "view", "plan", "optimize_prompt", "compare_losses"]
SINGLE_FILES = (*(f"{name}.py" for name in ENTRY_POINTS), "docs/from-verifiers.md")


class BuildWithFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        files = Path(self.build_lib) / "offbyone" / "files"
        rmtree(files, ignore_errors=True)  # removes the files of an earlier build
        for name in FOLDERS:
            caches = ignore_patterns("__pycache__", ".*", "outputs")
            copytree(name, files / name, ignore=caches, dirs_exist_ok=True)
        for name in SINGLE_FILES:
            (files / name).parent.mkdir(exist_ok=True)
            self.copy_file(name, str(files / name))


setup(cmdclass={"build_py": BuildWithFiles})
