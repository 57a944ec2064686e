"""The machine and the memory of a run: offbyone doctor, python plan.py, and what they read."""

from types import SimpleNamespace

import pytest

from envs.datasets import JsonLines
from envs.loading import cache_folder
from lab import doctor
from lab.plan import _described_hosts, _learning_rate_note, show_plan
from lab.python_api import compose, load_run
from lab.runs import runs_at
from rl.config.build import build
from rl.config.schema import ConfigError, Run
from rl.model.shape import GIB, Shape
from rl.runtime.devices import Host
from rl.runtime.folder import RunFolder
from tests.support.composing import composed
from tests.support.finished_runs import made_arm, made_sweep
from tests.support.golden import golden, outcome, without
from tests.support.viewed_run import copy_run


def test_each_problem_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "not" / "made"))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (100, 256))
    monkeypatch.setattr(doctor, "_MIN_FREE_SPACE", 1 << 60)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho details >&2\necho no Landlock >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(doctor.sys, "executable", str(python))
    found = list(doctor.checks(Host(devices=("0", "1"), driver="550.1")))
    assert ("GPUs", "2, driver 550.1") in [check[:2] for check in found]
    problems = {name: problem for name, _, problem in found}
    assert problems["sandbox"] == "env=math-python cannot run on this machine: no Landlock"
    assert "set CXX" in problems["C++ compiler"]
    assert "install python3-dev" in problems["Python headers"]
    assert "make install DEVICE=cuda" in problems["GPUs"]  # the CPU build beside a GPU
    assert problems["open files"].startswith("at most 256: raise the hard limit")
    assert str(tmp_path / "not" / "made") in problems["cache"]
    with pytest.raises(SystemExit, match="raise the hard limit"):
        doctor.main([])


@pytest.fixture
def plan(tmp_path):
    def plan(*overrides, **machines):
        config = composed(f"output_dir={tmp_path}", "run_name=r", *overrides)
        return show_plan(config | machines)

    return plan


def test_other_machines_can_be_planned_for(plan):
    page = plan("trainer.ranks=9", hosts=2, gpus=8, gpu_gib=24, host_gib=100)
    assert "trainer x8  host 0, GPU 0 1 2 3 4 5 6 7" in page
    assert "trainer     host 1, GPU 0 " in page
    assert "of 100.0 GiB; each GPU has 24.0" in page
    with pytest.raises(ConfigError, match="2 of 2 GPUs are for training and 0 for vLLM"):
        plan("trainer.ranks=2", gpus=2)


def test_a_cluster_is_planned_as_it_will_be_reserved(plan):
    cluster = ("cluster=ray", "trainer.ranks=2")
    vllm, trainer, memory, _, hosts = plan(*cluster).splitlines()[1:]
    assert vllm.startswith("vLLM        GPU 2 ")
    assert trainer.startswith("trainer x2  GPU 0 1 ")
    assert " of " not in memory  # the machines are not known yet
    assert "+hosts=2 +gpus=8" in hosts
    # One replica is the default of a cluster.
    assert "vLLM        host " in plan(*cluster, hosts=2, gpus=4)


def test_the_plan_of_a_run_from_a_checkpoint_has_the_sizes_of_that_checkpoint(plan, tmp_path):
    parent = RunFolder(tmp_path / "first")
    wide = composed("model.hidden_size=256")
    build(Run.of(wide).model)().prepare(parent.export_of(parent.checkpoint(3)))
    assert "usual for all of 2." in plan("init_from=first")


def test_plans_checks_and_notebooks(tmp_path, monkeypatch):
    """Notes on learning rates, described hosts, the doctor's findings, and a run as tables."""
    monkeypatch.chdir(tmp_path)

    def note(parameters, rate, adapter):
        run = SimpleNamespace(optim={"learning_rate": rate}, adapter={"_target_": adapter})
        sizes = {"vocab": 1, "hidden": 1, "inner": 1, "query": 1, "key": 1, "layers": 1}
        return _learning_rate_note(run, Shape(**sizes, parameters=parameters, expert=0, experts=0))

    adapters = ("NoAdapter", "Lora")
    rates = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2, None)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * GIB))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1, 4096))
    host = Host(devices=("0", "1"), driver="550", memory=8 * GIB, free_memory=3 * GIB)
    run = load_run(copy_run(tmp_path / "run"))
    arm, _ = made_arm(tmp_path / "runs", "a=b", seeds=2)
    rollouts, tokens = run.rollouts, run.tokens(1)
    own = tokens[tokens["mask"]]
    places = [made_sweep(tmp_path / "sweep", [arm]), tmp_path / "runs", arm, tmp_path / "none"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OFFBYONE_CACHE", raising=False)
    golden("cli/machines", without(tmp_path, {
        "files": [cache_folder(), JsonLines.local_files],
        "notes": [note(p, r, a) for p in (9.9e7, 1e8) for r in rates for a in adapters],
        "hosts": [_described_hosts(hosts=2, gpus=2, gpu_gib=1.5, host_gib=None, cores=3),
                  _described_hosts(hosts=1, gpus=0, gpu_gib=None, host_gib=0.5, cores=1)],
        "checks": [x for x in doctor.checks(host) if x[0] in ("memory", "open files", "disk")],
        "rollouts": [list(rollouts.columns), len(rollouts), rollouts.groupby("step").reward.sum()],
        "tokens": [list(tokens.columns), len(tokens), own.iloc[60:63].to_dict("list")],
        "metrics": load_run(arm).metrics.tail(2).to_dict("list"),
        "texts": [repr(run), repr(load_run(arm)), repr(compose(["seed=4"])), repr(compose())],
        "final": str(load_run(arm).__rich__()).splitlines(), "refused": outcome(load_run, tmp_path),
        "found": [[[r.folder and r.folder.name, r.overrides, r.error, r.grown] for r in runs_at(p)]
                  for p in places],
    }))  # fmt: skip
