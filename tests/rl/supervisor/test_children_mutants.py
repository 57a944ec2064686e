"""When the supervisor stops watching, and why: with little programs as the parts of a run."""

import time
from types import SimpleNamespace

import pytest

from rl.config.schema import Run
from rl.run.child import Reaper
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.supervisor.children import Children
from tests.support.composing import changed, composed

SUPERVISED = ("loss=sft", "sampler=demonstrations", "model.warm_start=null")


class StillWatching(Exception):
    """Raised by the test: it has seen enough."""


@pytest.fixture
def watched(tmp_path):
    """Watches parts {name: command} for some seconds."""

    def watch(*overrides, seconds=2.0, **parts):
        config = composed(f"output_dir={tmp_path}", "run_name=r", *overrides)
        config = changed(config, {"inference.startup_timeout": 0.1})
        folder = RunFolder(tmp_path / "r")
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.make_sockets_folder()
        deadline = time.monotonic() + seconds

        def tick() -> None:
            if time.monotonic() > deadline:
                raise StillWatching

        with Reaper() as reaper:
            children = Children(Run(**config), folder, reaper)
            try:
                for name, command in parts.items():
                    children._start(name.replace("_", "."), command, {})
                children.watch(tick, SimpleNamespace(asked=False))
            finally:
                children.end()

    return watch


def test_a_run_is_over_when_every_rank_has_finished(watched):
    ranks = {"trainer_rank0": ["true"], "trainer_rank1": ["sleep", "0.3"]}
    watched(*SUPERVISED, seconds=20.0, rollouts=["sleep", "30"], **ranks)


def test_one_rank_that_has_finished_is_not_the_end_of_the_run(watched):
    ranks = {"trainer_rank0": ["true"], "trainer_rank1": ["sleep", "30"]}
    with pytest.raises(StillWatching):
        watched(*SUPERVISED, rollouts=["sleep", "30"], **ranks)


def test_a_part_that_ends_too_early_ends_the_run_and_is_named(watched):
    ranks = {"trainer_rank0": ["sleep", "30"]}
    with pytest.raises(RunFailed, match="rollouts ended with status 0"):
        watched(*SUPERVISED, seconds=20.0, rollouts=["true"], **ranks)


def test_a_server_that_never_answers_is_waited_for_no_longer_than_was_said(watched):
    parts = {"inference": ["sleep", "30"], "trainer_rank0": ["sleep", "30"]}
    with pytest.raises(RunFailed, match=r"did not answer within inference\.startup_timeout=0\.1"):
        watched("model.warm_start=null", seconds=20.0, rollouts=["sleep", "30"], **parts)
