"""python plan.py: the places and the memory of a run, here or on pretended machines."""

import pytest

from lab.plan import show_plan
from rl.config.build import build
from rl.config.schema import ConfigError, Run
from rl.runtime.folder import RunFolder
from tests.support.composing import composed


def test_the_plan_of_this_machine_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    page = show_plan(composed(f"output_dir={tmp_path}", "run_name=r"))
    first, vllm, trainer, others, memory, rate = page.splitlines()
    assert first.split() == ["runs", "on", "GiB", "at", "its", "peak"]
    assert vllm.startswith("vLLM     ")
    assert trainer.startswith("trainer  ")
    assert others.startswith("others   ")
    assert memory.startswith("host needs ")
    assert rate == "learning rate: 0.0005; usual for all of 0.8 M parameters: 0.0001 to 0.01"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("adapter", "rate", "said"),
    [
        ("lora", "1e-4", "0.0001; usual for LoRA beside 4,022.3 M parameters: 1e-05 to 0.0001"),
        ("lora", "1e-3", "1e-05 to 0.0001 (docs/troubleshooting.md, instability)"),
        ("none", "1e-5", "usual for all of 4,022.3 M parameters: 1e-06 to 1e-05"),
    ],
)
def test_the_usual_learning_rates_are_shown(adapter, rate, said, tmp_path):
    chosen = ["model=qwen3-4b-instruct", f"adapter={adapter}", f"optim.learning_rate={rate}"]
    config = composed(*chosen, f"output_dir={tmp_path}", "run_name=r")
    page = show_plan(config | {"gpus": 8, "gpu_gib": 640, "host_gib": 2048})
    assert page.endswith(said)


def test_other_machines_can_be_planned_for(tmp_path):
    config = composed(f"output_dir={tmp_path}", "run_name=r", "trainer.ranks=9")
    page = show_plan(config | {"hosts": 2, "gpus": 8, "gpu_gib": 24, "host_gib": 100})
    assert "trainer x8  host 0, GPU 0 1 2 3 4 5 6 7" in page
    assert "trainer     host 1, GPU 0 " in page
    assert "of 100.0 GiB; each GPU has 24.0" in page


def test_a_plan_that_does_not_fit_is_refused(tmp_path):
    config = composed(f"output_dir={tmp_path}", "run_name=r", "trainer.ranks=2")
    with pytest.raises(ConfigError, match="2 of 2 GPUs are for training and 0 for vLLM"):
        show_plan(config | {"gpus": 2})


@pytest.mark.parametrize(("model", "gib"), [("qwen3-0.6b", "1.1"), ("qwen3-4b-instruct", "7.5")])
def test_the_shipped_models_are_planned_without_the_hub(model, gib, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    overrides = [f"output_dir={tmp_path}", "run_name=r", f"model={model}"]
    assert f"weights {gib}" in show_plan(composed(*overrides) | {"gpus": 2, "gpu_gib": 80})


def test_a_model_without_sizes_is_refused_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    overrides = [f"output_dir={tmp_path}", "run_name=r", "model=hf", "model.path=nobody/nothing"]
    with pytest.raises(
        ConfigError, match=r"cannot get nobody/nothing .*model\.path=<local folder>"
    ):
        show_plan(composed(*overrides))


def test_a_cluster_is_planned_as_it_will_be_reserved(tmp_path):
    config = composed(f"output_dir={tmp_path}", "run_name=r", "cluster=ray", "trainer.ranks=2")
    vllm, trainer, memory, _, hosts = show_plan(dict(config)).splitlines()[1:]
    assert vllm.startswith("vLLM        GPU 2 ")
    assert trainer.startswith("trainer x2  GPU 0 1 ")
    assert " of " not in memory  # the machines are not known yet
    assert "+hosts=2 +gpus=8" in hosts
    pretended = show_plan(config | {"hosts": 2, "gpus": 4})
    assert "unused" not in pretended
    assert "vLLM        host " in pretended  # one replica, the default of a cluster


def test_the_plan_of_a_run_from_a_checkpoint_has_the_sizes_of_that_checkpoint(tmp_path):
    parent = RunFolder(tmp_path / "first")
    wide = composed("model.hidden_size=256")
    build(Run.of(wide).model)().prepare(parent.export_of(parent.checkpoint(3)))
    plan = show_plan(composed(f"output_dir={tmp_path}", "run_name=r", "init_from=first"))
    assert "usual for all of 2." in plan
