"""Explain Hydra's exceptions in one sentence each, with the key that was probably meant.

Hydra says that a key or a choice does not exist, but not which one was meant. To find out, the
configuration is composed again without the mistyped argument.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rl.config.schema import RENAMED, ConfigError
from rl.config.signatures import did_you_mean
from rl.config.vllm_flags import known_flags, plain

UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
CONF = Path(__file__).parents[2] / "conf"
PRIMARY = "train"

# Names of the same options in other libraries.
OTHER_NAMES = {
    "lr": "optim.learning_rate",
    "steps": "max_steps",
    "num_steps": "max_steps",
    "train_batch_size": "batch_size",
    "num_generations": "group_size",
    "n_samples_per_prompt": "group_size",
    "rollouts_per_example": "group_size",
    "seq_len": "max_seq_len",
    "max_new_tokens": "sampler.max_tokens",
    "max_completion_length": "sampler.max_tokens",
    "environment": "env",
    "model_name": "model.path",
    "name": "run_name",
}


def explain_all(
    error: Exception, arguments: list[str], primary: str = PRIMARY, added: Sequence[str] = ()
) -> ConfigError:
    """Return every unknown name on the command line; Hydra stops at the first.

    Args:
        error: Hydra's exception about the first one.
        arguments: the command line.
        primary: the configuration in conf/; the keys of another one (--config-name) are unknown.
        added: further keys of the program, which are written with a plus.

    """
    problems = explain(error, arguments, primary, added).problems
    given = [a for a in arguments if not a.startswith("-") and "=" in a]
    own = _own_folder(arguments)
    search = [f"hydra.searchpath=[file://{own}]"] if own else []
    is_shipped = not any(a.startswith(("--config-name", "-cn")) for a in arguments)
    while is_shipped and (wrong := _culprit(error, given)):
        given.remove(wrong)
        try:
            with initialize_config_dir(str(CONF), version_base=None):
                compose(primary, [*search, *given])
        except (HydraException, OmegaConfBaseException) as another:
            error = another
            if _culprit(error, given):
                problems += explain(error, arguments, primary, added).problems
    return ConfigError(problems)


def _culprit(error: Exception, arguments: Sequence[str]) -> str | None:
    """Return the argument that caused the error."""
    if isinstance(error, MissingConfigException):
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return next((a for a in arguments if a.lstrip("+") == f"{group}={choice}"), None)
    unknown = UNKNOWN_KEY.match(str(error))
    return next((a for a in arguments if unknown and a.partition("=")[0] == unknown[1]), None)


def explain(
    error: Exception, arguments: list[str], primary: str = PRIMARY, added: Sequence[str] = ()
) -> ConfigError:
    """Explain one exception; the arguments are those of `explain_all`."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError([_unknown_file(error)])
    if isinstance(error, OverrideParseException):
        how = "write key=value, and quote a value with special characters, key='\"~/x\"'"
        return ConfigError([f"{error.override} cannot be read: {how}"])
    if unknown := UNKNOWN_KEY.match(str(error)):
        if unknown[1] in added:
            given = next(a for a in arguments if a.partition("=")[0] == unknown[1])
            return ConfigError([f"{given} is not a key of a run: write +{given}"])
        return ConfigError([_unknown_key(unknown[1], arguments, primary)])
    if str(error).startswith("Config group override must be"):
        empty = [a for a in arguments if a.endswith("=null")]
        return ConfigError([f"{' '.join(empty)}: a group needs one of its choices"])
    if isinstance(error, HydraException | OmegaConfBaseException | ValueError):
        causes = [error, *([error.__cause__] if error.__cause__ else [])]
        return ConfigError([line for cause in causes if (line := str(cause).strip())])
    if isinstance(error, OSError) and error.filename:  # Hydra makes a sweep's folder
        why = f"{error.filename} cannot be written ({error.strerror})"
        return ConfigError([f"{why}: choose another output_dir"])
    name = type(error).__name__
    return ConfigError([f"{name}: {error} (HYDRA_FULL_ERROR=1 shows where)"])


def _unknown_file(error: MissingConfigException) -> str:
    """Explain a choice that its group does not have, or a missing primary configuration."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group or not error.options:
        return str(error).strip()
    hint = did_you_mean(choice, error.options)
    return f"{group}={choice}: no such choice{hint} ({group} has {', '.join(error.options)})"


def _unknown_key(key: str, arguments: list[str], primary: str) -> str:
    """Explain a key that the chosen files do not have."""
    for free in ("inference.args", "deepspeed"):
        if key.startswith(f"{free}."):
            name = key.removeprefix(f"{free}.")
            flags = known_flags() if free == "inference.args" else frozenset()
            if flags and plain(name) not in flags:
                return f"{key}: vLLM has no such flag{did_you_mean(plain(name), flags)}"
            return f"{key} is not set yet and {free} is free-form: write +{key}=..."
    if key in RENAMED:
        return f"there is no key {key}: renamed to {RENAMED[key]}"
    known = known_keys(arguments, primary)
    if key in known:  # the argument gives a mapping new names
        return f"{key} takes a new name as +{key}.<name>=<value>, and loses one by ~{key}.<name>"
    suggestion = OTHER_NAMES.get(key.rpartition(".")[2])
    if suggestion and (primary == PRIMARY or suggestion in known):
        return f"there is no key {key}: did you mean {suggestion}?"
    group, _, name = key.rpartition(".")
    # After loss.eps, a key of `loss` is suggested only if its own name is similar.
    beside = [k.rpartition(".")[2] for k in known if group and k.rpartition(".")[0] == group]
    unlike = {f"{group}.{other}" for other in beside if not did_you_mean(name, [other])}
    alike = [k for k in known if k not in unlike and not key.startswith(f"{k}.")]
    if hint := did_you_mean(key, alike):
        return f"there is no key {key}{hint}"
    # The name exists in another group.
    elsewhere = [k for k in known if k.rpartition(".")[2] == name]
    hint = f": did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
    names = [k.removeprefix(f"{group}.") for k in known if group and k.startswith(f"{group}.")]
    names = [name for name in names if "." not in name and name != "_target_"]
    if names:
        return f"there is no key {key}{hint or ':'} {group} has {', '.join(names)}"
    return f"there is no key {key}{hint or f' (python {primary}.py --help lists them all)'}"


def known_keys(arguments: list[str], primary: str = PRIMARY) -> list[str]:
    """Return every dotted key and group of the configuration with the given choices."""
    own = _own_folder(arguments)
    folders = [CONF, *([own] if own else [])]
    groups = sorted({p.name for folder in folders for p in folder.iterdir() if p.is_dir()})
    choices = [a for a in arguments if a.partition("=")[0] in groups and "," not in a]
    search = [f"hydra.searchpath=[file://{own}]"] if own else []
    with initialize_config_dir(str(CONF), version_base=None):
        # If a choice or the user's folder is the mistake, compose without it.
        for given in ([*search, *choices], search, []):
            try:
                config = compose(primary, given)
            except (HydraException, OmegaConfBaseException):
                continue
            return [*_dotted(config, ""), *groups]
    return groups


def _own_folder(arguments: list[str]) -> Path | None:
    """Return the folder of the user's own choices, given by --config-dir."""
    for i, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            folder = Path(value or "".join(arguments[i + 1 : i + 2])).expanduser().absolute()
            return folder if folder.is_dir() else None
    return None


def _dotted(config: DictConfig, prefix: str) -> list[str]:
    keys: list[str] = []
    for key in config:
        keys.append(f"{prefix}{key}")
        # Not config[key], which resolves interpolations and raises for ???.
        value = config._get_node(str(key))
        if isinstance(value, DictConfig) and not value._is_none():
            keys += _dotted(value, f"{prefix}{key}.")
    return keys
