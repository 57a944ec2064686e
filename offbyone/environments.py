"""Load an environment by the name of its YAML file or its class, outside of train.py.

load("reverse-text", max_length=8)    conf/env/reverse-text.yaml with one option changed
load("my_package.MyEnv", size=3)      a custom class with all its options
"""

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from envs.protocol import Environment
from rl.config.build import build
from rl.config.shipped import CONF
from rl.config.signatures import did_you_mean

# model=hf sets model.describe_tools=true, so the prompts of wiki-search describe its tools.
MODEL = ("model=hf", "model.path=unknown")


def load(name: str, **options: Any) -> Environment:
    """Return an environment. Raise ValueError (wrong name or option), LookupError (wrong class)."""
    node = {"_target_": name} if "." in name else _env_node(name)
    node |= options
    if missing := sorted(OmegaConf.missing_keys(node)):
        raise ValueError(f"the option {name}.{missing[0]} has no default: pass a value for it")
    return build(node)()


def load_for_verifiers(name: str, **options: Any) -> Environment:
    """Return `load(name, **options)`. Raise ValueError if the environment uses `score_group`."""
    env = load(name, **options)
    if env.scores_groups:
        raise ValueError(
            f"{name} compares the episodes of a group (score_group), which our export to "
            "verifiers does not support: use it with train.py"
        )
    return env


def _env_node(name: str) -> dict[str, Any]:
    if not (CONF / "env" / f"{name}.yaml").exists():
        names = [path.stem for path in sorted((CONF / "env").glob("*.yaml"))]
        hint = did_you_mean(name, names) or f": choose one of {', '.join(names)}"
        raise ValueError(f"the environment {name!r} does not exist{hint}")
    with initialize_config_dir(str(CONF), version_base=None):
        chosen = compose("train", [f"env={name}", *MODEL]).env
    node = OmegaConf.to_container(chosen, resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}
