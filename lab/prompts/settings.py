"""The options of conf/optimize_prompt.yaml, and the rules that refuse bad combinations."""

from dataclasses import dataclass
from importlib.util import find_spec

from lab.evaluation.settings import Config, PolicySettings, checked_settings, without_training_keys
from rl.config.annotations import Node
from rl.config.limits import value_of
from rl.config.ranges import PositiveInt
from rl.config.schema import ConfigError


@dataclass(frozen=True, kw_only=True)
class PromptOptimization(PolicySettings):
    max_calls: PositiveInt
    num_rounds: PositiveInt | None
    num_train: PositiveInt
    num_val: PositiveInt
    minibatch_size: PositiveInt
    perfect_score: float | None
    state_columns: list[str]
    reflection: Node
    resume: bool


def check_search(config: Config) -> PromptOptimization:
    inference = config.get("inference")
    config = {**without_training_keys(config)}
    if value_of(config, "reflection.path") is not None:
        # Undo the null that client=messages sets, because vLLM must serve the reflection model.
        config |= {"inference": inference}
    if find_spec("gepa") is None:
        problem = "the package gepa, which optimizes prompts, is not installed: run `make install`"
        raise ConfigError([f"{problem} or `pip install gepa`"])
    return checked_settings(PromptOptimization, config)
