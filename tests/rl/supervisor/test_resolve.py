"""A configuration becomes a run once: typed nodes, counts of the devices, and the saved file."""

from types import SimpleNamespace as Bundle

import pytest
import yaml

from rl.cluster.host import Hosts
from rl.config.schema import ConfigError, Run
from rl.model.shape import shape
from rl.placement.placement import Place, Plan
from rl.runtime.devices import Host
from rl.supervisor import resolve as module
from rl.supervisor.resolve import resolve, with_devices
from tests.support.composing import composed

GPUS = [Host(devices=("0", "1", "2"), cores=4, cpus=8)]


@pytest.fixture
def config(tmp_path):
    return composed(f"output_dir={tmp_path}", "run_name=r", "trainer.wait_timeout=400")


def test_a_run_has_typed_nodes_and_the_counts_of_its_devices(config):
    run = resolve(config, machines=GPUS).run
    assert (run.trainer.ranks, run.inference.replicas) == (1, 2)
    assert run.inference.names == ["inference0", "inference1"]
    assert isinstance(run.trainer.wait_timeout, float)
    assert (run.transport.name, run.pushes_adapter, run.starts_vllm) == ("shm", False, True)
    expected = (config["sampler"]["temperature"], True)
    assert (run.sampler.temperature, run.sampler.uses_vllm) == expected
    four = [Host(devices=tuple("0123"), cores=4, cpus=8)]
    assert resolve(config, machines=four).run.trainer.ranks == 2
    debugged = {**config, "trainer": {**config["trainer"], "debug": True, "ranks": 2}}
    assert resolve(debugged, machines=four).run.trainer.ranks == 1
    supervised = run.with_values({"sampler": composed("sampler=demonstrations")["sampler"]})
    assert (supervised.sampler.temperature, supervised.starts_vllm) == (1.0, False)
    without = {"sampler": {"_target_": "pathlib.Path", "max_staleness": 0}}
    with pytest.raises(ValueError, match=r"Path has no temperature, .*: add an option or a cl"):
        _ = run.with_values(without).sampler.temperature


def test_a_saved_run_has_the_keys_of_the_command_line_and_its_format(config, tmp_path):
    run, path = resolve(config, machines=GPUS).run, tmp_path / "config.yaml"
    run.save(path)
    saved = yaml.safe_load(path.read_text())
    assert saved.pop("format") == 2
    assert saved.keys() == {*config, "learned"}
    assert saved.pop("learned") == {}  # until the dry call has ended
    assert saved == {**config, "trainer": saved["trainer"], "inference": saved["inference"]}
    assert Run.load(path) == run
    path.write_text(yaml.safe_dump(saved))  # format 1, which a report still reads
    assert Run.load(path) == run


def test_senders_between_gpus_are_refused_where_they_cannot_work(tmp_path):
    def resolved(*overrides, on):
        return resolve(composed(f"output_dir={tmp_path}", "run_name=r", *overrides), on).run

    one, none = [Host(devices=("0",), cores=4, cpus=8)], [Host(cores=4, cpus=8)]
    for name in ("nccl", "ipc"):
        assert resolved(f"sync={name}", on=GPUS).transport.name == name
        with pytest.raises(ConfigError, match=f"sync={name} .* the run has none: use sync=auto"):
            resolved(f"sync={name}", on=none)
        resolved(f"sync={name}", "loss=sft", "sampler=demonstrations", on=none)
    assert resolved("sync=ipc", on=one).transport.name == "ipc"
    shared = "sync=nccl, but trainer and vLLM share a GPU, and .*: use sync=ipc or sync=shm"
    with pytest.raises(ConfigError, match=shared):
        resolved("sync=nccl", on=one)
    with pytest.raises(ConfigError, match=shared):
        resolved("sync=nccl", "inference.devices=[0]", "trainer.devices=[1,0]", on=GPUS)


def test_an_adapter_that_vllm_cannot_load_into_a_mixture_is_refused_before_the_start(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    mixture = shape(sizes | {"vocab_size": 320, "num_experts": 4, "moe_intermediate_size": 32})

    def resolved(*overrides, on=None):
        given = ("model=hf", "model.path=a/b", f"output_dir={tmp_path}", "run_name=r")
        return resolve(composed(*given, *overrides), on or [Host()]).size_memory(mixture)

    with pytest.raises(ConfigError, match=r"adapter on a CPU: use sync=shm"):
        resolved()
    resolved("sync=shm")
    resolved(on=GPUS)
    for targets in ("[gate_proj]", "[layers.0.mlp.down_proj,q_proj]"):
        with pytest.raises(ConfigError, match=r"target_modules names \w+_proj, which are matrices"):
            resolved("sync=shm", f"adapter.target_modules={targets}")
    tiny = composed("model=tiny-moe", "adapter=lora", f"output_dir={tmp_path}", "run_name=r")
    assert not resolve(tiny, [Host()]).run.pushes_adapter  # sync=auto sends all weights


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        (["sync=shm"], (True, False)),
        (["sync=nccl"], (True, True)),  # between the trainer and vLLM
        (["sync=shm", "inference.tensor_parallel_size=2"], (True, True)),
        (["loss=sft", "sampler=demonstrations", "trainer.ranks=1"], (False, False)),
        (["loss=sft", "sampler=demonstrations", "trainer.ranks=2"], (False, True)),
    ],
)
def test_this_machine_must_suit_the_run(overrides, needs, config, monkeypatch):
    asked = []

    def problem(host, *, needs_vllm, uses_nccl):
        asked.append((host, needs_vllm, uses_nccl))
        return "a problem"

    (three,) = GPUS
    monkeypatch.setattr(module, "device_problem", problem)
    monkeypatch.setattr(module, "this_host", lambda: three)
    names = [f"{key}={config[key]}" for key in ("output_dir", "run_name")]
    with pytest.raises(ConfigError, match="a problem"):
        resolve(composed(*names, *overrides))
    assert asked == [(three, *needs)]
    resolve(composed(*names, *overrides), machines=[three])  # described machines are not checked


def test_a_run_reserves_the_gpus_and_the_cores_that_it_asks_of_ray(config):
    def reserved(*overrides, on=None):
        cores = ["cluster=ray", "cluster.cores_per_replica=7", "cluster.cores_per_rank=5"]
        names = [f"{key}={config[key]}" for key in ("output_dir", "run_name")]
        plan = resolve(composed(*names, *cores, *overrides), on).plan
        assert on is None or plan.idle == ()  # Ray may give them to other jobs
        return [[(p.devices, p.threads) for p in each] for each in (plan.inference, plan.ranks)]

    sizes = ["inference.tensor_parallel_size=2", "inference.replicas=2", "trainer.ranks=3"]
    ranks = [((str(gpu),), 5) for gpu in range(3)]
    assert reserved(*sizes) == [[(("3", "4"), None), (("5", "6"), None)], ranks]
    assert reserved() == [[(("1",), None)], ranks[:1]]
    assert reserved("cluster.gpus=false") == [[((), 7)], [((), 5)]]
    assert reserved("cluster.gpus=false", "trainer.num_threads=2")[1] == [((), 2)]
    reserved(on=GPUS)


def test_each_rank_of_a_ray_host_gets_one_gpu_of_that_host():
    """The ranks of a second host count from 0 again."""
    bundles = [Bundle(devices=(f"{name}0", f"{name}1")) for name in "abc"]
    bundles.append(Bundle(devices=("d0",)))
    ranks = [bundles[3], *(b for b in bundles[1:3] for _ in "01")]  # one rank, then two, then two
    hosts = Hosts(here=Bundle(devices=()), replicas=bundles[:1], ranks=ranks)
    place = Place(host=0, devices=("?",), threads=None)
    plan = with_devices(Plan(inference=(place,), ranks=(place,) * 5), hosts)
    assert plan.inference[0].devices == ("a0", "a1")
    assert [rank.devices for rank in plan.ranks] == [("d0",), ("b0",), ("b1",), ("c0",), ("c1",)]
    seen = [("d0",)] + [("b0", "b1")] * 2 + [("c0", "c1")] * 2
    assert [rank.visible for rank in plan.ranks] == seen
    assert [rank.local_rank for rank in plan.ranks] == [0, 0, 1, 0, 1]
