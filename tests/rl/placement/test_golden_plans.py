"""The plan of several models on several machines (tests/golden/placement/cases.yaml)."""

from dataclasses import replace

import yaml

from rl.config.schema import ConfigError, Run
from rl.model.shape import GIB, shape
from rl.placement.budget import process_memory
from rl.runtime.devices import Host
from rl.supervisor.resolve import assign_devices
from tests.rl.placement.test_budget import gpus
from tests.rl.placement.test_devices_and_models import MODELS
from tests.support import golden as stored
from tests.support.composing import with_choices

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
CPU = Host(cores=8, cpus=16, memory=64 * GIB, free_memory=20 * GIB)
MACHINES = {
    "cpu": [CPU], "small": [replace(CPU, memory=3 * GIB)],
    "two": [CPU, Host(cores=4, cpus=4, memory=16 * GIB)],
    "unknown": [Host(devices=("0",), memory=64 * GIB)],
}  # fmt: skip


def test_plans(config):
    """Page, places, MiB by purpose, and the options of vLLM of each case, or its refusal."""
    found, shapes = (
        {},
        {name: sizes for name, (sizes, _) in MODELS.items()} | {"tiny": shape(SIZES)},
    )
    cases = yaml.safe_load((stored.FOLDER / "placement" / "cases.yaml").read_text())
    for name, (model, machine, changes) in cases.items():
        hosts = MACHINES.get(machine) or gpus(*map(int, machine.split("x")))
        try:
            given = with_choices(config, {"trainer.tokens_per_micro_batch": 2048, **changes})
            resolved = assign_devices(Run.of(given), hosts)
            resolved, page = resolved.size_memory(shapes[model])
        except ConfigError as error:
            found[name] = error.problems
            continue
        run = resolved.run
        needs = [
            [each.name, each.place, each.place.environment(),
             *({p: b / 2**20 for p, b in part.items()} for part in vars(each.need).values())]
            for each in process_memory(run, resolved.plan, shapes[model])
        ]  # fmt: skip
        vllm = {key: run.inference.get(key) for key in ("replicas", "args", "cpu_kv_cache_gib")}
        found[name] = {"page": page.split("\n"), "needs": needs, "vllm": vllm}
    stored.golden("placement/plans", found)
    found = {}
    for change in (
        {}, {"num_key_value_heads": 2, "head_dim": 9}, {"intermediate_size": 9}, {"num_experts": 4},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {"tie_word_embeddings": True}, {"text_config": {"hidden_size": 32}}, {"head_dim": [1]},
    ):  # fmt: skip
        made = shape(SIZES | change)
        more = made and [made.embedding, made.largest_weight, made.row_cache_bytes(9, "bfloat16")]
        found[str(change)] = made and [made, more, made.cache_gib(10**7, "x"), made.linear_layers()]
    stored.golden("placement/sizes", found)
