"""What is null in the YAML follows the devices."""

from rl.config.schema import Run
from rl.placement.settings import with_device_flags
from rl.runtime.devices import Host
from rl.supervisor.resolve import assign_devices
from tests.support.composing import composed

SAMPLER = {"_target_": "rl.sampling.sampler.PolicySampler", "seeded": False}
CPU = Host(cores=4, cpus=8)
GPUS = Host(devices=("0", "1", "2", "3"), cores=4, cpus=8)


def placed_on(host: Host, *overrides: str) -> Run:
    return assign_devices(Run.of(composed("run_name=x", *overrides)), [host]).run


def test_a_cpu_gets_its_own_flags_and_a_gpu_the_defaults_of_vllm():
    on_cpu, on_gpus = placed_on(CPU), placed_on(GPUS)
    assert on_cpu.inference.args == {"enforce_eager": True, "max_num_seqs": 256}
    assert on_gpus.inference.args == {}
    assert (on_cpu.trainer.ranks, on_gpus.trainer.ranks) == (1, 2)


def test_flags_of_the_user_have_priority():
    args = ["inference.args.max_num_seqs=4", "inference.args.enforce_eager=false"]
    for host in (CPU, GPUS):
        assert placed_on(host, *args, "trainer.ranks=2").inference.args == {
            "max_num_seqs": 4,
            "enforce_eager": False,
        }


def test_a_flag_counts_however_it_is_written():
    node = {"args": {"max-num-seqs": 4, "--no-enforce-eager": True, "enforce_eager": None}}
    args = {"max_num_seqs": 4, "no_enforce_eager": True}  # names by which the run finds its values
    assert with_device_flags(node, SAMPLER, False)["args"] == args
    inner = {"compilation-config.cudagraph_mode": "NONE"}
    named = with_device_flags({"args": inner}, SAMPLER, True)["args"]
    assert named == {"compilation_config.cudagraph_mode": "NONE"}


def test_the_node_of_an_external_server_is_unchanged():
    assert with_device_flags({"url": "http://x"}, SAMPLER, False) == {"url": "http://x"}


def test_on_a_cpu_seeded_prompts_are_not_split():
    pieces = {"no_enable_chunked_prefill": True}
    on_cpu, on_gpus = (placed_on(host, "sampler.seeded=true") for host in (CPU, GPUS))
    assert pieces.items() <= on_cpu.inference.args.items()
    assert on_gpus.inference.args == {}
    said = placed_on(CPU, "sampler.seeded=true", "+inference.args.enable_chunked_prefill=true")
    assert not pieces.keys() & said.inference.args.keys()
