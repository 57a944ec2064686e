"""A kernel without Landlock is refused, unless the configuration accepts it."""

import asyncio

import pytest

from envs.maths import grading
from envs.maths.calculations import Calculations
from envs.maths.environment import Maths
from envs.maths.grading import Grader
from envs.maths.math_python import MathPython
from envs.mixture import Mixture
from envs.sandbox import sandbox
from envs.sandbox.sandbox import Limits
from tests.support.sandboxes import OPTIONS, interpreters, make, settled

QUESTIONS = Calculations(kinds=["sum"], digits=2, num_train=2, num_eval=2)
GRADER = {"workers": 1, "cpu_seconds": 5, "memory_mb": 1024}
MATHS = {"name": "maths", "questions": QUESTIONS, "instruction": "", "reward_weights": {}}


def grader(**changes):
    return Grader(**{**GRADER, "allow_without_landlock": False, **changes})


def math_python(grader, **changes):
    limits = Limits(**{**OPTIONS, **changes})
    return MathPython(**MATHS, grader=grader, max_turns=2, max_concurrent=2, sandbox=limits)


@pytest.fixture
def old_kernel(monkeypatch):
    forget = "from envs.sandbox import confinement as c; c.apply_landlock = lambda paths: False"
    boot = sandbox.BOOT.replace("from envs", f"{forget}; from envs", 1)
    monkeypatch.setattr(sandbox, "BOOT", boot)


def test_without_landlock_no_sandbox_starts_and_the_message_says_what_to_do(old_kernel):
    with pytest.raises(RuntimeError, match=r"no Landlock.*allow_without_landlock=true"):
        asyncio.run(make().run("1"))


def test_grading_works_without_landlock_if_the_configuration_accepts_it(old_kernel):
    accepted = grader(allow_without_landlock=True)
    assert asyncio.run(accepted.means_same("x + 1", "1 + x")) is True
    accepted.close()
    with pytest.raises(RuntimeError, match="no Landlock"):
        asyncio.run(grader().means_same("x + 1", "1 + x"))


def test_an_environment_that_runs_code_tries_a_sandbox_before_the_run(old_kernel):
    before = interpreters()
    accepted = grader(allow_without_landlock=True)
    for env in (Maths(**MATHS, grader=grader()), math_python(accepted)):
        with pytest.raises(ValueError, match="no Landlock"):
            env.check_machine()
        with pytest.raises(ValueError, match="no Landlock"):
            Mixture(envs={"maths": env}, weights={"maths": 1.0}).check_machine()
    math_python(accepted, allow_without_landlock=True).check_machine()
    assert settled(before)  # the processes are killed without waiting


def test_a_grader_whose_library_cannot_be_loaded_is_noticed_before_the_run(monkeypatch):
    monkeypatch.setattr(grading, "_PRELOAD", "import math_verify_of_another_world")
    with pytest.raises(ValueError, match=r"No module named 'math_verify_of_another_world'"):
        Maths(**MATHS, grader=grader()).check_machine()
