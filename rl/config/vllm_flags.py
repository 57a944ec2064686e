"""Which flags vLLM has, read from its source: importing it takes many seconds.

parser.add_argument("--max-num-seqs", ...)         engine/arg_utils.py
class FrontendArgs: api_key: list[str] | None      cli_args.py: a field is a flag
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rl.config.facts import fact
from rl.config.signatures import did_you_mean, spec_of

PARSERS = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")


def flag_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each key of inference.args that is no flag; vLLM would say so after 10 s."""
    inference = config["inference"]
    if inference is None or not fact(inference["_target_"], "starts_vllm", False):
        return
    flags = known_flags()
    for key in inference["args"] if flags else ():
        name = plain(str(key))
        # argparse makes a --no-x of every flag x that is yes or no.
        if name not in flags and name.removeprefix("no_") not in flags:
            yield f"inference.args.{key} is no flag of vLLM{did_you_mean(name, flags)}"


def plain(key: str) -> str:
    """`--max-num-seqs` as `max_num_seqs`; a dot begins a part of its JSON, + adds to it."""
    return key.removeprefix("--").replace("-", "_").partition(".")[0].rstrip("+")


@cache
def known_flags() -> frozenset[str]:
    """Every flag of vLLM's server, with underscores; none where vLLM is not installed."""
    spec = spec_of("vllm")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for pattern in PARSERS for file in folder.glob(pattern)]
    return frozenset(flag for file in files for flag in _flags_of(file.read_text("utf-8")))


def _flags_of(text: str) -> Iterator[str]:
    yield from (plain(name) for name in re.findall(r'"(--[a-z][a-z0-9-]+)"', text))
    if "FrontendArgs" not in text:
        return
    for definition in ast.parse(text).body:
        if isinstance(definition, ast.ClassDef) and definition.name.endswith("FrontendArgs"):
            for field in definition.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id
