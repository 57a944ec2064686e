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
from rl.supervisor.resolve import Resolved, resolve, with_devices
from tests.support.composing import composed

CPU, ONE = [Host(cores=4, cpus=8)], [Host(devices=("0",), cores=4, cpus=8)]
GPUS = [Host(devices=("0", "1", "2"), cores=4, cpus=8)]
SFT = ("loss=sft", "sampler=demonstrations")


@pytest.fixture
def resolved(tmp_path):
    """Return a function that resolves a run with these overrides on these machines."""

    def resolve_run(*overrides: str, on: list[Host] | None = None) -> Resolved:
        return resolve(composed(f"output_dir={tmp_path}", "run_name=r", *overrides), on)

    return resolve_run


def test_a_run_has_typed_nodes_and_the_counts_of_its_devices(resolved):
    run = resolved("trainer.wait_timeout=400", on=GPUS).run
    assert (run.trainer.ranks, run.inference.replicas) == (1, 2)
    assert run.inference.names == ["inference0", "inference1"]
    assert isinstance(run.trainer.wait_timeout, float)
    assert (run.transport.name, run.pushes_adapter, run.starts_vllm) == ("shm", False, True)
    four = [Host(devices=tuple("0123"), cores=4, cpus=8)]
    assert resolved(on=four).run.trainer.ranks == 2
    assert resolved("trainer.debug=true", "trainer.ranks=2", on=four).run.trainer.ranks == 1
    supervised = resolved(*SFT, on=GPUS).run
    assert (supervised.sampler.temperature, supervised.starts_vllm) == (1.0, False)


def test_a_saved_run_has_the_keys_of_the_command_line_and_its_format(tmp_path):
    config = composed(f"output_dir={tmp_path}", "run_name=r")
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


def test_senders_between_gpus_are_refused_where_they_cannot_work(resolved):
    for name in ("nccl", "ipc"):
        assert resolved(f"sync={name}", on=GPUS).run.transport.name == name
        with pytest.raises(ConfigError, match=f"sync={name} .* the run has none: use sync=auto"):
            resolved(f"sync={name}", on=CPU)
        resolved(f"sync={name}", *SFT, on=CPU)
    assert resolved("sync=ipc", on=ONE).run.transport.name == "ipc"
    both = ("inference.devices=[0]", "trainer.devices=[1,0]")
    for shared, machines in (((), ONE), (both, GPUS)):
        with pytest.raises(ConfigError, match="sync=nccl, but trainer and vLLM share a GPU, and"):
            resolved("sync=nccl", *shared, on=machines)


def test_an_adapter_that_vllm_cannot_load_into_a_mixture_is_refused_before_the_start(resolved):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    mixture = shape(sizes | {"vocab_size": 320, "num_experts": 4, "moe_intermediate_size": 32})
    hf = ("model=hf", "model.path=a/b")
    with pytest.raises(ConfigError, match=r"adapter on a CPU: use sync=shm"):
        resolved(*hf, on=CPU).size_memory(mixture)
    resolved(*hf, "sync=shm", on=CPU).size_memory(mixture)
    resolved(*hf, on=GPUS).size_memory(mixture)
    experts = (*hf, "sync=shm", "adapter.target_modules=[layers.0.mlp.down_proj,q_proj]")
    with pytest.raises(ConfigError, match=r"target_modules names \w+_proj, which are matrices"):
        resolved(*experts, on=CPU).size_memory(mixture)


def test_this_machine_must_suit_the_run(resolved, monkeypatch):
    monkeypatch.setattr(module, "device_problem", lambda host, **needs: f"{host.devices} {needs}")
    monkeypatch.setattr(module, "this_host", lambda: GPUS[0])
    for overrides, needs_vllm, uses_nccl in (
        (["sync=shm"], True, False),
        (["sync=nccl"], True, True),  # between the trainer and vLLM
        (["sync=shm", "inference.tensor_parallel_size=2"], True, True),
        ([*SFT, "trainer.ranks=1"], False, False),
        ([*SFT, "trainer.ranks=2"], False, True),
    ):
        with pytest.raises(ConfigError) as caught:
            resolved(*overrides)
        needs = {"needs_vllm": needs_vllm, "uses_nccl": uses_nccl}
        assert caught.value.problems == [f"{GPUS[0].devices} {needs}"]
        resolved(*overrides, on=GPUS)  # described machines are not checked


def test_a_run_reserves_the_gpus_and_the_cores_that_it_asks_of_ray(resolved):
    def reserved(*overrides):
        cores = ["cluster=ray", "cluster.cores_per_replica=7", "cluster.cores_per_rank=5"]
        plan = resolved(*cores, *overrides).plan
        return [[(p.devices, p.threads) for p in each] for each in (plan.inference, plan.ranks)]

    sizes = ["inference.tensor_parallel_size=2", "inference.replicas=2", "trainer.ranks=3"]
    ranks = [((str(gpu),), 5) for gpu in range(3)]
    assert reserved(*sizes) == [[(("3", "4"), None), (("5", "6"), None)], ranks]
    assert reserved() == [[(("1",), None)], ranks[:1]]
    assert reserved("cluster.gpus=false") == [[((), 7)], [((), 5)]]
    assert reserved("cluster.gpus=false", "trainer.num_threads=2")[1] == [((), 2)]
    assert resolved("cluster=ray", on=GPUS).plan.idle == ()  # Ray may give them to other jobs


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
