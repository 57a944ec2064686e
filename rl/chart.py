"""A course of numbers as columns of text."""

from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text


class Chart:
    """Values as filled columns of eighths, oldest left; several share a column when they must."""

    def __init__(self, values: list[float], rows: int) -> None:
        self.values, self.rows = values, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        size = -(-len(self.values) // options.max_width) or 1  # values per column
        means = [fmean(self.values[i : i + size]) for i in range(0, len(self.values), size)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        scale = (8 * self.rows - 1) / ((high - low) or 1.0)
        heights = [1 + round((mean - low) * scale) for mean in means]  # eighths, at least one
        for row in reversed(range(self.rows)):
            cells = "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, height - 8 * row))] for height in heights)
            yield Text(cells, "cyan", no_wrap=True)
