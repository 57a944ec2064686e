"""The stages of benchmarks/first_hour.sh fit today's code, so that no time of a GPU is lost."""

from importlib import import_module

import pytest

from benchmarks.first_hour.__main__ import STAGES
from benchmarks.first_hour.update import config
from rl.dry_call.learn import run_with_facts
from rl.model.shape import GIB, shape
from rl.placement.memory import trainer_need
from tests.support.composing import composed


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_is_a_function(stage):
    module, _, name = STAGES[stage].rpartition(".")
    assert callable(getattr(import_module(f"benchmarks.first_hour.{module}"), name))


@pytest.mark.parametrize(
    ("size", "adapter", "how", "length", "measured"),  # in GiB, on an H100 (docs/cuda.md)
    [
        *(("0.6b", "lora", "plain", 1024, 17.2), ("0.6b", "none", "plain", 1024, 28.8)),
        *(("1.7b", "lora", "plain", 1024, 27.4), ("1.7b", "none", "plain", 1024, 57.0)),
        *(("4b", "lora", "plain", 1024, 53.0), ("4b", "lora", "checkpointed", 1024, 12.9)),
        *(("moe", "lora", "plain", 1024, 18.8), ("moe", "none", "plain", 1024, 67.9)),
        *(("0.6b", "lora", "compiled", 1000, 11.6), ("0.6b", "none", "compiled", 1000, 19.2)),
        *(("1.7b", "lora", "compiled", 1000, 19.6), ("4b", "lora", "compiled", 1000, 39.3)),
    ],
)
def test_the_plan_is_within_15_percent_of_the_measured_peak(size, adapter, how, length, measured):
    run = run_with_facts(
        composed(
            *(f"adapter={adapter}", f"trainer.compile={str(how == 'compiled').lower()}"),
            f"trainer.gradient_checkpointing={str(how == 'checkpointed').lower()}",
            *("batch_size=8", "group_size=8", "model.dtype=bfloat16", f"max_seq_len={length}"),
            *(f"trainer.tokens_per_micro_batch={8 * length}", "trainer.share_prefixes=false"),
        )
    )
    sizes = shape(config(size, tiny=False).to_dict())
    plan = trainer_need(run, sizes, ranks=1, first=False, on_gpu=True).on_device / GIB
    assert plan == pytest.approx(measured, rel=0.15)
