"""The mistakes of mistakes.txt, which `python -m tests.mutations` tries."""

from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass
class Mutation:
    """A plausible mistake in one file: the text `old`, which occurs once, becomes `new`."""

    name: str  # begins with the module
    file: str
    tests: list[str]  # arguments of pytest
    old: str = ""
    new: str = ""

    @property
    def needs_vllm(self) -> bool:
        return self.tests[0].startswith("tests/runs/")

    def applied(self, root: Path) -> str:
        """Return the file with the mistake; ValueError if `old` does not occur exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def _read(lines: list[str]) -> list[Mutation]:
    """Return the mistakes of these lines, whose format mistakes.txt describes."""
    found: list[Mutation] = []
    file, tests = Path(), list[str]()
    for line in lines:
        start, rest = line[:2], line[2:]
        if start == "  ":
            found.append(Mutation(f"{file.stem}: {rest}", str(file), tests))
        elif start == "- ":
            found[-1].old += "\n" * bool(found[-1].old) + rest
        elif start == "+ ":
            found[-1].new += "\n" * bool(found[-1].new) + rest
        elif start != "# ":
            name, *named = line.split()
            file = Path(name)
            tests = named or [f"tests/{file.parent}/test_{file.stem}.py"]
    return found


MUTATIONS = _read(Path(__file__).with_name("mistakes.txt").read_text().splitlines())
