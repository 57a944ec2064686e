"""Exports our environments to the library `verifiers`, which imports the package `offbyone`.

vf.load_environment("offbyone", env="reverse-text")        verifiers 0.1.14
vf-eval offbyone --env.taskset.env reverse-text            verifiers >= 0.4
"""

from importlib.util import find_spec

if find_spec("verifiers") is None:
    __all__ = []  # offbyone.environments works without verifiers
elif find_spec("verifiers.envs"):
    from offbyone.classic import load_environment

    __all__ = ["load_environment"]
else:
    from offbyone.v1 import ExportedEnv, ExportedHarness, ExportedTaskset

    __all__ = ["ExportedEnv", "ExportedHarness", "ExportedTaskset"]
