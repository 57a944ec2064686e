"""The lab as a Python library, and our environments for the library `verifiers`.

offbyone.train(["loss=cispo", "max_steps=20"])             see lab/python_api.py
vf.load_environment("offbyone", env="reverse-text")        verifiers 0.1.14
vf-eval offbyone --env.taskset.env reverse-text            verifiers >= 0.4
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.python_api import *  # noqa: F403

_API = ("Config", "Run", "compose", "load_run", "sample", "train")

if find_spec("verifiers") is None:
    __all__ = []  # without verifiers, _API and offbyone.environments still work
elif find_spec("verifiers.envs"):
    from offbyone.classic import load_environment

    __all__ = ["load_environment"]
else:
    from offbyone.v1 import ExportedEnv, ExportedHarness, ExportedTaskset

    __all__ = ["ExportedEnv", "ExportedHarness", "ExportedTaskset"]


def __getattr__(name: str) -> Any:
    """Return the attribute `name` of lab/python_api.py. Import that module on first use."""
    if name not in _API:
        raise AttributeError(f"module 'offbyone' has no attribute {name!r}")
    from lab import python_api

    return getattr(python_api, name)
