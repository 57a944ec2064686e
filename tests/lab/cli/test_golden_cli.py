"""Commands, help texts, translations and plans of the command line, as stored files."""

from types import SimpleNamespace

from envs.datasets import JsonLines
from envs.loading import cache_folder
from lab import doctor
from lab.from_toml import _COMMANDS, _as_hydra_value, _notes_on_hf, _sections, _translate_key
from lab.plan import _described_hosts, _rate_note
from lab.python_api import compose, load_run
from lab.runs import runs_at
from rl.config.shipped import SHIPPED
from rl.model.shape import GIB, Shape
from rl.runtime.devices import Host
from tests.support.finished_runs import made_arm, made_sweep
from tests.support.golden import golden
from tests.support.outcomes import outcome, without
from tests.support.viewed_run import copy_run


def test_every_key_of_the_tables_of_from_verifiers():
    """The overrides of each key for values of every type, and the notes on model=hf."""
    values, found = ("linear", True, False, 3), {}
    sections = _sections((SHIPPED / "docs" / "from-verifiers.md").read_text())
    for name in _COMMANDS:
        for key in sections[name]:
            lines = [" ".join(_translate_key(key, value, sections[name])[0]) for value in values]
            found[f"{name}: {key}"] = lines[0] if len({*lines}) == 1 else lines
    hf = [["model=hf", "sampler.max_tokens=2049"], ["model=hf", "sampler.max_tokens=2048"],
          ["model=hf", "max_seq_len=9", "sampler.max_tokens=4000"], ["model=hf", "adapter=none"],
          ["sampler.max_tokens=4000"]]  # fmt: skip
    found["hf"] = [[_notes_on_hf(name, one), one] for one in hf for name in ("hosted", "gepa")]
    found["values"] = [_as_hydra_value(one) for one in (0.25, [1, "x y"], "null", "a'b", [True])]
    golden("cli/from_toml", found)


def test_plans_checks_and_notebooks(tmp_path, monkeypatch):
    """Notes on learning rates, described hosts, the doctor's findings, and a run as tables."""
    monkeypatch.chdir(tmp_path)

    def note(parameters, rate, adapter):
        run = SimpleNamespace(optim={"learning_rate": rate}, adapter={"_target_": adapter})
        sizes = {"vocab": 1, "hidden": 1, "inner": 1, "query": 1, "key": 1, "layers": 1}
        return _rate_note(run, Shape(**sizes, parameters=parameters, expert=0, experts=0))

    adapters = ("NoAdapter", "Lora")
    rates = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2, None)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * GIB))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1, 4096))
    host = Host(devices=("0", "1"), driver="550", memory=8 * GIB, free_memory=3 * GIB)
    run, (arm, *_) = (
        load_run(copy_run(tmp_path / "run")),
        made_arm(tmp_path / "runs", "a=b", seeds=2),
    )
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
