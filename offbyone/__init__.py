"""Exports this project's environments to the `verifiers` library, which looks for this name.

vf.load_environment("offbyone", env="reverse-text")        verifiers 0.1.14
vf-eval offbyone --env.taskset.env reverse-text            verifiers >= 0.4
"""

from importlib.util import find_spec

if find_spec("verifiers") is None:
    __all__ = []  # Without verifiers, nothing is exported here; offbyone.environments still works.
elif find_spec("verifiers.envs"):
    from offbyone.classic import load_environment

    __all__ = ["load_environment"]
else:
    from offbyone.v1 import ExportedEnv, ExportedHarness, ExportedTaskset

    __all__ = ["ExportedEnv", "ExportedHarness", "ExportedTaskset"]
