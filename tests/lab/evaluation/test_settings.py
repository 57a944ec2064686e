"""conf/evaluate.yaml: every choice composes, and impossible settings are refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from lab.cli.launch import as_plain_dict
from lab.evaluation.served import chat_settings
from lab.evaluation.settings import check_evaluation
from rl.config.schema import ConfigError
from rl.inference.server import SERVED_AS
from rl.runtime.folder import RunFolder
from tests.support.composing import CONF

HUB = ["model.path=Qwen/Qwen3-0.6B"]
REMOTE = ["client=messages", "client.url=http://localhost:1/v1", "client.model=name"]
EXTERNAL = "inference=external is only for training: to use a server that already runs, set client="


@pytest.fixture
def evaluation(tmp_path):
    def evaluation(*overrides):
        with initialize_config_dir(str(CONF), version_base=None):
            lines = [*overrides, f"output_dir={tmp_path}"]
            config = compose("evaluate", lines, return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            return check_evaluation(as_plain_dict(config))

    return evaluation


def test_a_remote_model_needs_no_local_model_and_an_adapter_its_base_model(evaluation, tmp_path):
    remote = evaluation(*REMOTE)
    assert remote.model is remote.inference is None
    described = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    found = evaluation(f"model.path={tmp_path}")
    assert (found.model["path"], found.adapter_path) == ("Qwen/Qwen3-0.6B", str(tmp_path))


def test_an_impossible_evaluation_is_refused(evaluation, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    (tmp_path / "mine" / "summary.json").touch()
    for overrides, said in (
        ([], "model.path has no value: set model.path=..."),
        (["model=tiny"], "this program trains nothing, so it needs a trained model"),
        (["model=tiny-words"], "this program trains nothing"),  # random weights
        ([*HUB, "sampler=demonstrations"], "this program samples from the policy"),
        ([*HUB, "adapter_path=/nowhere"], "adapter_path=/nowhere contains no adapter_config.json"),
        ([*HUB, "run_name=../up"], 'run_name="../up" names no folder below'),
        ([*HUB, "inference=external", "inference.urls=[http://a:1]"], EXTERNAL),
        ([*HUB, "sampler.max_tokens=4096"], "sampler.max_tokens=4096 leaves no room for the prom"),
        ([*REMOTE, "client.url=http://me:secret@host/v1"], "client.url contains a password or key"),
        ([*HUB, "inference.replicas=2"], "inference.replicas=2, but only train.py starts several"),
        ([*HUB, "run_name=mine"], "tmp_path/mine already holds a run: choose another run_name"),
    ):
        with pytest.raises(ConfigError) as caught:
            evaluation(*overrides)
        (problem,) = caught.value.problems
        assert problem.startswith(said.replace("tmp_path", str(tmp_path)))


def test_vllm_and_its_client_get_the_settings_of_the_evaluation_and_the_model(evaluation, tmp_path):
    at = [*HUB, "max_seq_len=512", "sampler.max_tokens=64", "+inference.args.max_num_seqs=7"]
    settings, folder = evaluation(*at), RunFolder(tmp_path)
    folder.set_model(tmp_path / "hf")
    for adapter, several in ((None, True), ("adapter", False)):
        env = SimpleNamespace(is_multi_turn=several)
        chat = chat_settings(replace(settings, adapter_path=adapter), folder, env)
        assert (chat.max_seq_len, chat.num_seqs, chat.is_multi_turn) == (512, 7, several)
        assert chat.served_as == SERVED_AS[adapter is not None]
        assert (chat.model, chat.sampler.max_tokens) == (tmp_path / "hf", 64)
    # Rows are no longer than the model was built for.
    assert evaluation(*HUB).max_seq_len == 4096
    for name, positions, length in (("short", 2048, 2048), ("long", 32768, 4096)):
        (tmp_path / name).mkdir()
        form = json.dumps({"max_position_embeddings": positions})
        (tmp_path / name / "config.json").write_text(form)  # only a check can read this model
        assert evaluation(f"model.path={tmp_path}/{name}").max_seq_len == length
