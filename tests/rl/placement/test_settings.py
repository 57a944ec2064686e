"""What is null in the YAML follows the devices."""

from rl.placement.placement import placement
from rl.placement.settings import settled, settled_inference
from rl.run.devices import Host
from tests.support.composing import composed

SAMPLER = {"_target_": "rl.sampling.sampler.PolicySampler", "seeded": False}
CPU = Host(cores=4, cpus=8)
GPUS = Host(devices=("0", "1", "2", "3"), cores=4, cpus=8)


def settled_on(host: Host, *overrides: str):
    config = composed("run_name=x", *overrides)
    return settled(config, placement(config, [host]))


def test_a_cpu_has_its_own_settings_and_a_gpu_vllms():
    on_cpu, on_gpus = settled_on(CPU), settled_on(GPUS)
    assert on_cpu["inference"]["args"] == {"enforce_eager": True, "max_num_seqs": 256}
    assert on_gpus["inference"]["args"] == {}
    assert (on_cpu["trainer"]["ranks"], on_gpus["trainer"]["ranks"]) == (1, 2)


def test_what_the_user_says_stays():
    args = ["inference.args.max_num_seqs=4", "inference.args.enforce_eager=false"]
    for host in (CPU, GPUS):
        assert settled_on(host, *args, "trainer.ranks=2")["inference"]["args"] == {
            "max_num_seqs": 4,
            "enforce_eager": False,
        }


def test_a_flag_counts_however_it_is_written():
    node = {"args": {"max-num-seqs": 4, "--no-enforce-eager": True, "enforce_eager": None}}
    args = {"max-num-seqs": 4, "--no-enforce-eager": True}
    assert settled_inference(node, SAMPLER, False)["args"] == args


def test_a_server_that_is_not_ours_to_start_is_left_alone():
    assert settled_inference({"url": "http://x"}, SAMPLER, False) == {"url": "http://x"}


def test_on_a_cpu_prompts_of_seeded_requests_come_in_one_piece():
    pieces = {"no_enable_chunked_prefill": True}
    on_cpu, on_gpus = (settled_on(host, "sampler.seeded=true") for host in (CPU, GPUS))
    assert pieces.items() <= on_cpu["inference"]["args"].items()
    assert on_gpus["inference"]["args"] == {}
    said = settled_on(CPU, "sampler.seeded=true", "+inference.args.enable_chunked_prefill=true")
    assert not pieces.keys() & said["inference"]["args"].keys()
