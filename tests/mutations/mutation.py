"""One mistake, and who should notice it."""

from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """A plausible mistake in one file.

    Attributes:
        name: of the mistake, in a few words, the module first.
        file: where it is made, from the root of the repository.
        old: text that occurs there exactly once.
        new: what stands there instead.
        tests: fast tests that should notice, as pytest takes them.
        server: the test with the real vLLM that does, where no fast one can.

    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    server: str = ""

    def applied(self, root: Path) -> str:
        """Return the file with the mistake. ValueError where the code has moved on."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def mutation(name: str, file: str, old: str, new: str, *tests: str, server: str = "") -> Mutation:
    """Return a mutation; its tests without the leading `tests/`."""
    return Mutation(name, file, old, new, tuple(f"tests/{test}" for test in tests), server)
