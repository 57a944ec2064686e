"""Test that every YAML of conf/ composes and passes the check with which train.py begins."""

from itertools import product
from pathlib import Path

import pytest
import yaml
from composing import OURS, composed

from rl.config.check import check

CHOICES = [f"{path.parent.name}={path.stem}" for path in sorted(OURS.glob("*/*.yaml"))]
SWEEPS = sorted(OURS.glob("*.yaml"))


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_goes_with_the_library_s_defaults(choice: str) -> None:
    check(composed(choice))


def test_all_of_them_go_together() -> None:
    check(composed(*CHOICES))


def test_the_command_line_wins_over_what_a_choice_brings() -> None:
    config = composed("env=lockers", "loss=focal", "model=tiny", "advantage=group_mean")
    assert config["advantage"]["_target_"] == "losses.advantages.group_mean"
    assert config["max_seq_len"] == 256


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_job_of_a_sweep_can_start(path: Path) -> None:
    params = yaml.safe_load(path.read_text())["hydra"]["sweeper"]["params"]
    values = [[f"{key}={value}" for value in str(params[key]).split(",")] for key in params]
    for job in product(*values):
        check(composed(*job, primary=path.stem))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_opens_with_the_question_it_answers(path: Path) -> None:
    assert path.read_text().splitlines()[0].endswith("?")
