"""Distribute rows over the ranks and pack them into micro-batches.

Without shared prefixes, a micro-batch has rows of similar length, because its token limit includes
padding. With shared prefixes (docs/architecture.md), the trainer computes equal beginnings
of a micro-batch's rows only once. So rows with equal beginnings stay together, and tokens that a
row shares with the previous row count less (`_pack_by_prefix`).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from rl.records import TrainingRow
from rl.runtime.failure import RunFailed

Row = TypeVar("Row", bound=TrainingRow)


def split_by_advantage(rows: Sequence[Any], *, whole_groups: bool) -> tuple[list[Any], list[Any]]:
    """Return the rows that have an advantage other than 0, and the other rows.

    If `whole_groups`, one row with such an advantage puts its whole group in the first list.
    """
    units = [row.group_id if whole_groups else i for i, row in enumerate(rows)]
    trained = {unit for unit, row in zip(units, rows, strict=True) if row.has_advantage}
    parts: tuple[list[Any], list[Any]] = ([], [])
    for unit, row in zip(units, rows, strict=True):
        parts[unit not in trained].append(row)
    return parts


def pack(
    rows: Sequence[Row], loads: list[int], budget: int, *, shares_prefixes: bool
) -> list[list[list[Row]]]:
    """Return the micro-batches of each rank, the same number for every rank.

    Args:
        loads: number of tokens of each rank so far, to which `pack` adds the tokens of `rows`.
        budget: maximum number of tokens in a micro-batch. A longer row is packed alone.
    """
    if shares_prefixes:
        by_tokens = sorted(rows, key=lambda row: row.token_ids.astype(">u4").tobytes())
        shares = _cut_for_ranks(by_tokens, loads)
        packed = [_pack_by_prefix(share, budget) for share in shares]
    else:
        shares = _assign_to_ranks(sorted(rows, key=lambda row: -row.length), loads)
        packed = [_pack_by_length(share, budget) for share in shares]
    _equalise_counts(packed)
    return packed


def pack_groups(
    rows: Sequence[Any], loads: list[int], budget: int, *, shares_prefixes: bool
) -> list[list[list[Any]]]:
    """Return micro-batches as `pack` does, but keep all rows of a group in one micro-batch."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.group_id].append(row)

    def pack_on_one_rank(groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
        rows = [row for group in groups for row in group]
        return pack(rows, [0], budget, shares_prefixes=shares_prefixes)[0]

    # One list of micro-batches per rank. Each micro-batch is a list of groups:
    shares: list[list[list[Sequence[Any]]]] = [[] for _ in loads]
    for group in sorted(groups.values(), key=lambda group: -sum(row.length for row in group)):
        if len(pack_on_one_rank([group])) > 1:
            raise RunFailed(
                f"the loss needs each group in one micro-batch, but a group of {len(group)} rows "
                f"exceeds trainer.tokens_per_micro_batch={budget}: raise it or lower group_size"
            )
        bins, least_loaded = shares[loads.index(min(loads))], loads.index(min(loads))
        loads[least_loaded] += sum(row.length for row in group)
        if bins and len(pack_on_one_rank([*bins[-1], group])) == 1:
            bins[-1].append(group)
        else:
            bins.append([group])
    _equalise_counts(shares)
    return [[pack_on_one_rank(bin)[0] if bin else [] for bin in bins] for bins in shares]


def _assign_to_ranks(rows: Sequence[Row], loads: list[int]) -> list[list[Row]]:
    shares: list[list[Row]] = [[] for _ in loads]
    for row in rows:
        lightest = loads.index(min(loads))
        shares[lightest].append(row)
        loads[lightest] += row.length
    return shares


def _pack_by_length(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    bins: list[list[Row]] = []
    for row in rows:
        # The longest rows come first, so a micro-batch is padded to the length of its first row.
        if bins and (len(bins[-1]) + 1) * bins[-1][0].length <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _prefix_length(row: TrainingRow, other: TrainingRow) -> int:
    """Return the number of equal tokens at the beginning of two rows."""
    length = min(row.length, other.length)
    differs = row.token_ids[:length] != other.token_ids[:length]
    return int(differs.argmax()) if differs.any() else length


def _cut_for_ranks(rows: Sequence[Row], loads: list[int]) -> list[list[Row]]:
    """Return one slice of the sorted rows per rank, and add its distinct tokens to `loads`.

    The cuts make the maximum load as small as possible. All tokens of a slice's first row count,
    because its rank cannot use the beginning that another rank has computed.
    """
    lengths = [row.length for row in rows]
    shared = [0, *map(_prefix_length, rows, rows[1:])]  # tokens shared with the previous row
    distinct = [length - number for length, number in zip(lengths, shared, strict=False)]

    def fits(limit: int, row: int = 0, rank: int = 0) -> bool:
        """Return whether rank `rank` and later ranks can take rows[row:] with loads <= `limit`."""
        for load in loads[rank:]:
            start, total = row, load
            while row < len(rows):
                total += lengths[row] if row == start else distinct[row]
                if total > limit:
                    break
                row += 1
        return row == len(rows)

    limit = bisect_left(range(max(loads) + sum(lengths)), True, key=fits)
    shares: list[list[Row]] = []
    row = 0
    for rank in range(len(loads)):
        start, mean = row, (sum(loads[rank:]) + sum(distinct[row:])) / (len(loads) - rank)
        while row < len(rows):
            count = lengths[row] if row == start else distinct[row]
            is_full = row > start and loads[rank] + count / 2 > mean
            if loads[rank] + count > limit or (is_full and fits(limit, row, rank + 1)):
                break
            loads[rank] += count
            row += 1
        shares.append(list(rows[start:row]))
    return shares


def _pack_by_prefix(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Return the micro-batches of one rank. `rows` must be sorted by their token ids."""
    bins: list[list[Row]] = []
    cost = 0.0
    for row in rows:
        equal = _prefix_length(bins[-1][-1], row) if bins else 0
        new = row.length - equal
        # Attention reads a complete copy of each row. If this row extends the previous row, one
        # copy serves both rows. A copied token takes a quarter of a distinct token's memory.
        copied = new if bins and equal == bins[-1][-1].length else row.length
        # A duplicate row adds no tokens, but the output head computes its completion again.
        added = max(new + copied / 4, row.num_completion / 4)
        if bins and cost + added <= budget:
            bins[-1].append(row)
            cost += added
        else:
            bins.append([row])
            cost = 1.25 * row.length
    return bins


def _equalise_counts(shares: Sequence[list[Any]]) -> None:
    """Halve large micro-batches or append empty ones, until all ranks have the same number."""
    count = max(map(len, shares))
    for bins in shares:
        while len(bins) < count:
            largest = max(bins, key=len, default=[])
            if len(largest) < 2:
                bins.append([])
                continue
            half = len(largest) // 2
            bins.append(largest[half:])
            del largest[half:]
