"""Examples that are made when somebody looks at them."""

from collections.abc import Sequence
from typing import overload

from envs.episode import Example


class LazyExamples(Sequence[Example]):
    """Base of such a sequence: `__len__` and `made` are all that is needed, slices included."""

    def made(self, index: int) -> Example:
        """Return one of them, 0 <= index < len(self)."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.made(i) for i in range(*index.indices(len(self)))]
        return self.made(range(len(self))[index])  # IndexError behind the last
