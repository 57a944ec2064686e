"""One mistake, and the tests that should notice it."""

from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """A plausible mistake in one file.

    Attributes:
        name: a short description that begins with the module.
        file: the changed file, relative to the root of the repository.
        old: text that occurs in the file exactly once.
        new: the text that replaces it.
        tests: fast tests that should fail, as arguments of pytest.
        server: a test with the real vLLM that should fail, if no fast test can.

    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    server: str = ""

    def applied(self, root: Path) -> str:
        """Return the file with the mistake; ValueError if `old` does not occur exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def mutation(name: str, file: str, old: str, new: str, *tests: str, server: str = "") -> Mutation:
    """Return a mutation; give its tests without the leading `tests/`."""
    return Mutation(name, file, old, new, tuple(f"tests/{test}" for test in tests), server)
