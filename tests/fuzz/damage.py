"""Damage valid inputs: bytes and JSON-like trees."""

from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

WORDS = (b"\x00" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x7f" * 8, b"PAR1")
TARGETS = (
    *("json.loads", "a..b", "", ".", "losses.cispo", "losses.cispo.nothing", "os.system"),
    *("rl.config.schema.Run", "envs.composed.Composed", "losses.gspo.gspo", "builtins.dict"),
    *("rl.sampling.strategies.AdaptiveSize", "envs.reverse_text.ReverseText", "no.such.thing"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 10**9, 10**30, -(10**30), 0.0, -0.5, 1e308, 1e-308),
    *(float("nan"), float("inf"), "", " ", "x", "\ud800", "\x00", "é🙂", "???", "${seed}", "null"),
    *("1", "1e999", "nan", "-1", "a.b.c", "../..", "/dev/null", "~nobody/x", "*", "[", "%s"),
    *("http://u:p@h/", "x" * 5000, "9" * 5000),
    *([], {}, [[]], [None], [{}], {"": 1}, {"a": {"b": 1}}),
    *({"_target_": 1}, {"_target_": "x"}, {"_target_": None}, {"_target_": "losses.cispo.cispo"}),
)


def damaged(data: bytes, rng: Random) -> bytes:
    """Return the bytes with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
        size = rng.choice((1, 2, 4, 8, 64, max(len(data) // 3, 1)))
        if at < len(data) and rng.random() < 0.2:  # one bit
            new = bytes([data[at] ^ 1 << rng.randrange(8)])
            removed = 1
        else:
            moved, word = data[other : other + size], rng.choice(WORDS)
            new = rng.choice((b"", rng.randbytes(size), moved, word))
            # Insert it, overwrite as much, replace a piece, or all that follows.
            removed = rng.choice((0, len(new), size, len(data)))
        data = data[:at] + new + data[at + removed :]
    return data


def changed_tree(tree: Any, rng: Random, *, deep: bool = True) -> Any:
    """Return a copy of a tree of dicts and lists with one to three changes.

    `deep`: some values may have up to 3,000 levels.
    """
    tree = deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return deepcopy(rng.choice(VALUES))
        holder, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            source, name = rng.choice(places)  # a value from elsewhere
            holder[key] = deepcopy(source[name]) if name in _keys(source) else None
        elif kind == 2:
            holder[key] = [holder[key]]
        elif kind == 3 and isinstance(holder, dict):
            holder[f"{key}{rng.choice('x_. ')}"] = holder.pop(key)
        elif kind == 4 and isinstance(holder, dict):
            name = rng.choice(("new", "_target_", "", "path", "a.b"))
            holder[name] = deepcopy(rng.choice(VALUES))
        elif kind == 5 and key == "_target_":
            holder[key] = rng.choice(TARGETS)
        elif kind == 6 and deep and rng.random() < 0.1:
            holder[key] = _nested(rng.choice((70, 500, 3000)))
            return tree  # a copy of a value that is so deep would exceed Python's stack
        else:
            holder[key] = deepcopy(rng.choice(VALUES))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, key) of every value in a tree, without recursion, because it may be deep."""
    left = [tree]
    while left:
        holder = left.pop()
        for key in _keys(holder):
            yield holder, key
            left.append(holder[key])


def _keys(holder: Any) -> list[Any]:
    if isinstance(holder, dict):
        return list(holder)
    return list(range(len(holder))) if isinstance(holder, list) else []


def _nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value
