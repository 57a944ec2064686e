"""Explain an exception of Hydra in one sentence, and suggest the name that the user meant."""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.schema import ConfigError
from rl.config.shipped import CONF
from rl.config.signatures import did_you_mean
from rl.runtime.text import leaves

UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_NO_GLOBAL_PACKAGE = re.compile(r"In '([\w/-]+)': Could not override '(\w+)@\w+\.\2'")


def explain_hydra_error(
    error: Exception, arguments: list[str], primary: str = "train", added: Sequence[str] = ()
) -> ConfigError:
    """Return a ConfigError that explains an exception of Hydra.

    `primary`: the program's main file in conf/. `added`: keys that users must write as +key=value.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        hint = did_you_mean(choice, error.options)
        choices = f"({group} has {', '.join(error.options)})"
        return ConfigError([f"{group}={choice} does not exist{hint} {choices}"])
    if found := _NO_GLOBAL_PACKAGE.search(str(error)):
        own, group = found.groups()
        line = f"override /{group}@_global_.{group}: <choice>"
        return ConfigError([f"{own}.yaml must give {group} a Hydra package: write {line}"])
    if isinstance(error, OverrideParseException):
        how = "write key=value, and quote a value with special characters, such as key='\"~/x\"'"
        return ConfigError([f"{error.override} cannot be read: {how}"])
    if unknown := UNKNOWN_KEY.match(str(error)):
        inner = str(getattr(error.__cause__, "full_key", ""))  # a.b for the override a={b: 1}
        key = max(unknown[1], inner, key=len)
        return ConfigError([_explain_unknown_key(key, arguments, primary, added)])
    if isinstance(error, HydraException | OmegaConfBaseException | ValueError):
        causes = [error, *([error.__cause__] if error.__cause__ else [])]
        return ConfigError([line for cause in causes if (line := str(cause).strip())])
    return ConfigError([f"{type(error).__name__}: {error} (HYDRA_FULL_ERROR=1 prints a traceback)"])


def _explain_unknown_key(key: str, arguments: list[str], primary: str, added: Sequence[str]) -> str:
    if key in added or key.startswith(("inference.args.", "deepspeed.")):
        return f"{key} is not in the configuration yet: add it with +{key}=..."
    known = known_keys(arguments, primary)
    group, _, name = key.rpartition(".")
    files = sorted(CONF.glob(f"{group}/*.yaml")) if group else []
    if owners := [file.stem for file in files if f"\n{name}:" in file.read_text()]:
        return f"{key} belongs to another choice of {group}: set {group}={'|'.join(owners)}"
    siblings = [k.removeprefix(f"{group}.") for k in known if group and k.startswith(f"{group}.")]
    siblings = [name for name in siblings if "." not in name and name != "_target_"]
    if siblings:
        hint = did_you_mean(name, siblings).replace(" mean ", f" mean {group}.")
        hint = hint or did_you_mean(name, [key for key in known if "." not in key])
        return f"there is no key {key}{hint or f': {group} has ' + ', '.join(siblings)}"
    if group in known:
        return f"there is no key {key}: the chosen {group} has no options"
    hint = did_you_mean(key, known) or f" (python {primary}.py --help lists all keys)"
    return f"there is no key {key}{hint}"


def known_keys(arguments: list[str], primary: str = "train") -> list[str]:
    """Return all keys of the configuration that `arguments` choose, and all groups of conf/."""
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir())
    choices = [a for a in arguments if a.partition("=")[0] in groups and "," not in a]
    own = get_args_parser().parse_known_args(arguments)[0].config_dir
    search = [f"hydra.searchpath=[file://{Path(own).absolute()}]"] if own else []
    with initialize_config_dir(str(CONF), version_base=None):
        try:
            config = compose(primary, [*search, *choices])
        except (HydraException, OmegaConfBaseException):  # a choice is wrong: use the defaults
            config = compose(primary)
    return [*(key for key, _ in leaves(OmegaConf.to_container(config))), *groups]
