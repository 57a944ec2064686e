"""offbyone from-toml file.toml: print the command for a TOML file of verifiers or prime-rl.

The tables of docs/from-verifiers.md map each TOML key to clauses, separated by semicolons. A clause
that begins with options, such as "`model=hf` and `model.path`", becomes overrides. An option
without a value, here model.path, gets the value of the TOML key. A clause "linear: `...`" is used
only for the TOML value linear. If no clause becomes an override, all of them are printed as a note.
"""

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.config.limits import NEUTRAL_SAMPLING, num_returned_tokens
from rl.config.shipped import CONF, SHIPPED
from rl.runtime.start_record import quote_for_hydra

# Section of docs/from-verifiers.md (one kind of TOML file) -> the command without overrides.
_COMMANDS = {
    "prime-rl": ["offbyone", "train"],
    "hosted": ["offbyone", "train"],
    "vf-rl": ["offbyone", "train", "experiment=rlconfig"],
    "gepa": ["offbyone", "optimize-prompt"],
}
_HF_LENGTH = 4096  # default of max_seq_len with model=hf, unless the model has fewer positions
_RowOfKey = dict[str, tuple[list[str], str]]  # key -> (all keys of its row, the row's clauses)
_ONLY_IF = re.compile(r"([\w-]+): (?=`)")
_ITEM = re.compile(r"(?:, | and |, and )?`([a-z_]+[\w.]*(?:=[\w.-]+)?)`(?: \([^)]*\))?")


def main(arguments: list[str]) -> str:
    if len(arguments) != 1:
        sys.exit("usage: offbyone from-toml <file>")
    try:
        return translate(Path(arguments[0]).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments[0]} cannot be translated: {error}")


def translate(text: str) -> str:
    items = list(_dotted_items(tomllib.loads(text)))
    sections = _sections((SHIPPED / "docs" / "from-verifiers.md").read_text())
    name = max(_COMMANDS, key=lambda name: sum(key in sections[name] for key, _ in items))
    if not any(key in sections[name] for key, _ in items):
        raise ValueError("it has no key that docs/from-verifiers.md names")
    overrides, notes = [], []
    if is_mixture := [key for key, _ in items].count("env.id") > 1:
        options = ", ".join(f"{key} = {value}" for key, value in items if key.startswith("env."))
        notes = [
            "several environments: copy conf/env/three-tasks.yaml, write these options and weights "
            f"into the copy, and choose it with env=<copy>: {options}"
        ]
        overrides = ["env=<copy>"]
    for key, value in items:
        if not (is_mixture and key.startswith("env.")):
            found, note = _translate_key(key, value, sections[name])
            overrides += found
            notes += [f"{key} = {value}: {note}"] if note else []
    if "env=verifiers" in overrides:
        foreign = [o for o in overrides if o.startswith("env.") and not o.startswith("env.id=")]
        overrides = [o for o in overrides if o not in foreign]
        notes += [f"{o}: with env=verifiers, set this option in env.args" for o in foreign]
    both = {"truncation=mask", "truncation=zero_reward"}
    if both <= set(overrides):
        overrides = [*(o for o in overrides if o not in both), "truncation=mask_zero"]
    pairs = (override.removeprefix("sampler.").split("=", 1) for override in overrides)
    numbers = {key: float(value) for key, value in pairs if key in NEUTRAL_SAMPLING}
    if num_returned_tokens(numbers):  # then ratios are exact (docs/losses.md)
        overrides = [o for o in overrides if o != "sampler.allow_biased_ratio=true"]
    notes += _notes_on_hf(name, overrides)
    command = shlex.join([*_COMMANDS[name], *dict.fromkeys(overrides)])
    return "\n".join([command, *(f"# {note}" for note in notes)])


def _notes_on_hf(name: str, overrides: list[str]) -> list[str]:
    """Return notes on model=hf. Add a longer max_seq_len to `overrides` if max_tokens needs it."""
    chosen = dict(override.split("=", 1) for override in overrides)
    text, notes = chosen.get("sampler.max_tokens", ""), list[str]()
    limit = int(text) if text.isdecimal() else 0
    if chosen.get("model") == "hf" and "max_seq_len" not in chosen and limit > _HF_LENGTH / 2:
        overrides.append(f"model.max_seq_len={2 * limit}")
        notes = ["model.max_seq_len: twice max_tokens, because the file sets no sequence length"]
    if chosen.get("model") == "hf" and "adapter" not in chosen and name in ("prime-rl", "hosted"):
        without = "adapter=none optim.learning_rate=1e-6"
        notes += [f"adapter: model=hf trains LoRA. To train all weights, add {without}"]
    return notes


def _dotted_items(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        tables = value if isinstance(value, list) else [value]
        for table in tables if all(isinstance(table, dict) for table in tables) else ():
            yield from _dotted_items(table, f"{path}{key}.")
        if not any(isinstance(table, dict) for table in tables):
            yield f"{path}{key}", value


def _sections(page: str) -> dict[str, _RowOfKey]:
    """Return the table rows of each section of a page, by the title of the section."""
    sections = {}
    for section in page.split("\n## ")[1:]:
        lines = [line.strip("|").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
        rows = [(re.findall(r"`([^`]+)`", keys), clauses.strip()) for keys, _, clauses in lines]
        found = {key: (keys, clauses) for keys, clauses in rows for key in keys}
        sections[section.partition(":")[0]] = found
    return sections


def _translate_key(key: str, value: Any, rows: _RowOfKey) -> tuple[list[str], str]:
    """Return the overrides for a TOML key, and a note for the user ("" if there is none)."""
    name = str(value).rpartition("/")[2]
    if key.endswith("env.id") and (CONF / "env" / f"{name}.yaml").exists():
        return [f"env={name}"], f"offbyone's {name}; for the package: env=verifiers env.id={value}"
    if key.startswith("inference.args.") and key not in rows:
        return [f"+{key}={_as_hydra_value(value)}"], ""
    if key.startswith("env.args.") and key not in rows:
        key = "env.args"
    if key not in rows:
        return [], "docs/from-verifiers.md does not name this key"
    keys, clauses = rows[key]
    fixed, named, is_condition_met = [], [], False
    for clause in clauses.split("; "):
        condition = _ONLY_IF.match(clause)
        if condition and condition[1] != str(value).lower():
            continue
        is_condition_met |= condition is not None
        at = condition.end() if condition else 0
        while item := _ITEM.match(clause, at):
            (fixed if "=" in item[1] else named).append(item[1])
            at = item.end()
    if value is False and fixed and not is_condition_met:
        return [], ""  # the overrides in this key's row are for true only
    if len(named) == len(keys):
        named = [named[keys.index(key)]]
    chosen = [*fixed, *(f"{option}={_as_hydra_value(value)}" for option in named[:1])]
    return chosen, "" if chosen else clauses


def _as_hydra_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_as_hydra_value, value))}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return quote_for_hydra(str(value))
