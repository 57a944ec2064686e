"""The configuration of a search for a prompt (conf/optimize_prompt.yaml)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rl.config.annotations import Node
from rl.config.check import check
from rl.config.evaluation import POLICY_RULES, PlayedPolicy, of_played_policy
from rl.config.limits import value_of
from rl.config.resume_rules import run_folder_problems

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PromptOptimization(PlayedPolicy):
    """The top level of conf/optimize_prompt.yaml, resolved. Values are explained there."""

    max_calls: int
    num_rounds: int | None
    num_train: int
    num_val: int
    minibatch_size: int
    perfect_score: float | None
    state_columns: list[str]
    reflection: Node
    resume: bool


def checked(config: Config, choices: Mapping[str, str] | None = None) -> PromptOptimization:
    """Return the search that a configuration asks for. ConfigError if it cannot work."""
    inference = config.get("inference")
    config = {**of_played_policy(config)}
    if value_of(config, "reflection.path") is not None:  # the teacher needs a vLLM in any case
        config |= {"inference": inference}
    check(config, f"{__name__}.PromptOptimization", _problems, choices=choices)
    return PromptOptimization(**config)


def _problems(config: Config) -> list[str]:
    rules = (*POLICY_RULES, *_RULES)
    return [problem for rule in rules for problem in rule(config)]


def _is_installed(config: Config) -> Iterator[str]:  # noqa: ARG001 rules take it
    """GEPA is somebody else's package."""
    if find_spec("gepa") is None:
        yield (
            "the package gepa, which looks for prompts, is not installed: `make install` installs "
            "it, or pip install 'offbyone[prompts]'"
        )


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (_is_installed, run_folder_problems)
