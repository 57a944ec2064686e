"""What vLLM is told: its command line, its environment, and the path and body of every request."""

import json
import re

import yaml

from rl.inference.client import VLLMClient
from rl.inference.replica import Replica
from rl.inference.router import Router
from rl.inference.server import AdapterLimits, ServedPolicy, VLLMServer, vllm_command
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from tests.rl.weights.test_pusher import OnePolicy, Scorer, pusher, two_rows
from tests.support import golden as stored
from tests.support import receiving
from tests.support.scripted import tiny_model


def test_commands_and_environments(tmp_path, monkeypatch):
    """The cases of tests/golden/inference/cases.yaml: options of server, policy and place."""
    for name in ("OMP_NUM_THREADS", "VLLM_PLUGINS", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "cache"))
    folder, found = RunFolder(tmp_path), {}
    folder.set_model(tiny_model(tmp_path))
    cases = yaml.safe_load((stored.FOLDER / "inference" / "cases.yaml").read_text())
    for name, (options, policy, address, place) in cases.items():
        limits = AdapterLimits(**policy.pop("adapter")) if "adapter" in policy else None
        replica = Replica("inference", Address.parse(address), key="secret")
        server, served = VLLMServer(**options), ServedPolicy(**policy, adapter=limits)
        command, env = vllm_command(server, folder, replica, served, place)
        text = json.dumps([command[1:], env]).replace(str(tmp_path.resolve()), "<run>")
        found[name] = json.loads(text)
    stored.golden("inference/commands", found)


CHANGING = re.compile(
    r'(?<=port": )\d+|/[^" ]+/offbyone-adapter-\w+|/proc/\d+/fd/\d+|\b[0-9a-f]{16}\b|[0-9a-f]{8}-v'
)


class Noted(receiving.FakeVLLM):
    """Note each path and body, without what differs from run to run."""

    def answer(self, body):
        noted = json.loads(CHANGING.sub("0", json.dumps(body)))
        noted.get("init_info", {}).get("arguments", {}).pop("form", None)  # depends on peft
        self.server.noted.append([self.command, self.path, noted])
        if self.path == "/tokenize":
            return {"tokens": [1, 2]}
        logprobs = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
        choice = {"token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "length"}
        choice |= {"weight_versions": [{"start": 0, "end": 2, "version": "4"}], "stop_reason": "x"}
        made, n = super().answer(body), body.get("sampling_params", {}).get("n", 1)
        return made if isinstance(made, bytes) else made | {"choices": [choice] * n}


async def test_requests_of_a_push_and_of_sampling(tmp_path, monkeypatch):
    """Two pushes and a probe of three transports, then prompts, scores and a template."""
    monkeypatch.setattr(receiving, "FakeVLLM", Noted)
    policy, found = OnePolicy(tmp_path / "model"), {}
    for sync in ("shm", "gloo", "adapter"):
        with receiving.replica(tmp_path / f"{sync}.sock") as vllm:
            vllm.server.noted = noted = found[sync] = []
            push = pusher(sync, vllm)
            for version in (3, 4):
                push.push(policy, version, must_differ=version > 3)
                policy.step()
            found[f"{sync} probe"] = push.probe(Scorer(0.03125), two_rows(), 4)
            noted[-2:] = sorted(noted[-2:], key=str)  # two threads
            router = Router.with_replicas(vllm.receiver.replica)
            async with VLLMClient(router, model="policy", timeout=5.0) as client:
                with client.group() as group:
                    sampling = {"temperature": 0.5, "stop": ["x"], "max_tokens": 2}
                    made = await group.generate([1, 2], sampling, n=2, version=4)
                    scored = await group.score([1, 2, 3], 2, version=3)
                    tools, options = [{"name": "f"}], {"thinking": False}
                    ids = await group.tokenize([{"role": "user"}], tools, options)
            (route,) = router.routes
            counts = [route.num_completions, route.num_tokens, route.num_pending, route.num_groups]
        found[f"{sync} answers"] = [made, scored, ids, counts, len(noted)]
    stored.golden("inference/requests", found)
