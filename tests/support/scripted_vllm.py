r"""Serve the routes of vLLM that a run uses, with scripted answers, on the same socket.

    python train.py sampler=sync sync.max_mismatch=1e9 model.warm_start=null \
        inference._target_=tests.support.scripted_vllm.ScriptedVLLM

An answer depends on the prompt, the index among the `n`, the policy version and the sampling
parameters, never on time or order, so a run with sampler=sync repeats bit for bit. All rollouts of
a group get the same answers after their first turn, so use advantage=none with several turns. This
file imports no torch and no module of this repository, so that it serves other checkouts, too.
`+inference.args.faults=<file>` adds faults (engine_faults.py).
"""

import argparse
import asyncio
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import xxhash
from aiohttp import web
from tokenizers import Tokenizer

DTYPES = {"BF16": "torch.bfloat16", "F16": "torch.float16", "F32": "torch.float32"}
TOOLS = (("search_pages", "query"), ("view_sections", "page_id"), ("read_section", "section_id"))


@dataclass(frozen=True, kw_only=True)
class ScriptedVLLM:
    """Replace VLLMServer with the same parameters; of `args` it uses only `faults`."""

    replicas: int | None
    listen: str
    startup_timeout: float
    devices: list[int | str] | None = None
    tensor_parallel_size: int = 1
    cpu_kv_cache_gib: int | None = None
    args: dict[str, Any]

    def command(self, model: Path, address: Any, policy: Any) -> list[str]:
        flags = {"model": model, "max-model-len": policy.max_seq_len}
        flags |= {name: value for name, value in self.args.items() if name == "faults"}
        network = {"host": address.host, "port": address.port}
        flags |= {"uds": address.path} if address.path else network
        words = (str(part) for name, value in flags.items() for part in (f"--{name}", value))
        return [sys.executable, __file__, *words]

    def environment(self, *, adapter: Any | None, key_file: Path | None = None) -> dict[str, str]:
        """Return the environment variable of the key file, as for vLLM."""
        return {"OFFBYONE_KEY_FILE": str(key_file)} if key_file else {}


class Engine:
    """Hold the state of the server: the loaded weights, and whether it is paused."""

    def __init__(self, model: Path, max_model_len: int, version: str = "0") -> None:
        self._max_model_len = max_model_len
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        config = json.loads((model / "tokenizer_config.json").read_text())
        self._template: str = config.get("chat_template", "")
        self._vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        self._names, self._version, self._updating, self._read = {"policy"}, version, False, ""
        self._live = asyncio.Event()
        self._live.set()

    async def generate(self, request: web.Request) -> web.Response:
        """Answer a request for tokens after the end of a pause."""
        body = await request.json()
        if body["model"] not in self._names:
            return _refused(f"there is no model {body['model']}")
        await self._live.wait()
        return web.json_response(self._generated(body))

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer with the prompt of the model's chat template."""
        body = await request.json()
        if "prompt" in body:
            ids = self._tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            return web.json_response({"tokens": ids})
        template = jinja2.Environment().from_string(self._template)
        asked = {"messages": body["messages"], "tools": body.get("tools")}
        ids = self._tokenizer.encode(template.render(**asked, add_generation_prompt=True)).ids
        answer = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}
        return web.json_response(answer)

    async def models(self, request: web.Request) -> web.Response:
        """Answer with the names of the served models."""
        return web.json_response({"data": [{"id": "policy", "max_model_len": self._max_model_len}]})

    async def control(self, request: web.Request) -> web.Response:
        """Handle the requests of a push, and refuse requests in the wrong order."""
        body = json.loads(await request.read() or b"{}")
        match request.path:
            case "/pause" if request.query["mode"] == "keep":
                self._live.clear()
            case "/resume":
                self._live.set()
            case "/init_weight_transfer_engine" if "init_info" in body:
                self._save_adapter(**body["init_info"].get("arguments", {}))
            case "/start_weight_update":
                self._updating = True
            case "/update_weights" if self._updating and not self._live.is_set():
                return self._receive(**body["update_info"])
            case "/finish_weight_update" if self._updating and "weight_version" in body:
                self._updating = False
                self._push(body["weight_version"])
            case "/update_weight_version" if "new_version" in body:
                self._push(body["new_version"])
            case _:
                return _refused(f"{request.path} at this point")
        return web.json_response({"message": "ok"})

    async def load_adapter(self, request: web.Request) -> web.Response:
        """Add a model name."""
        body = await request.json()
        if not fingerprints(Path(body["lora_path"])):
            return _refused(f"no adapter in {body['lora_path']}")
        self._names.add(body["lora_name"])
        return web.Response(text="Success: LoRA adapter added successfully.")

    def _save_adapter(self, folder: str = "", **facts: Any) -> None:
        """Write the matrices into the folder from which `load_adapter` reads them once."""
        if folder:
            Path(folder).mkdir(mode=0o700)
            content = Path(facts["source"]["path"]).read_bytes()
            (Path(folder) / "adapter_model.safetensors").write_bytes(content)

    def _receive(self, fingerprint: str, source: dict[str, str]) -> web.Response:
        self._read = content_fingerprint(Path(source["path"]).read_bytes())
        if fingerprint != self._read:
            return _refused(f"the trainer wrote {fingerprint}, vLLM read {self._read}")
        return web.json_response({"message": "Weights updated"})

    def _push(self, version: str) -> None:
        self._version = version
        print(f"version {version} has fingerprint {self._read}", flush=True)  # noqa: T201

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, sampling = body["token_ids"], body["sampling_params"]
        seed = json.dumps([prompt, self._version, sampling], sort_keys=True)
        randoms = [Random(f"{i}:{seed}") for i in range(sampling.get("n", 1))]
        choices = [self._choice(i, prompt, sampling, rng) for i, rng in enumerate(randoms)]
        answer: dict[str, Any] = {"choices": choices}
        if "prompt_logprobs" in sampling:
            rng = Random(seed)
            scored = [{str(token): {"logprob": self._logprob(rng)}} for token in prompt[1:]]
            answer["prompt_logprobs"] = [None, *scored]
        return answer

    def _choice(
        self, index: int, prompt: list[int], sampling: dict[str, Any], rng: Random
    ) -> dict[str, Any]:
        text = spoken(self._tokenizer.decode(prompt, skip_special_tokens=False), rng)
        ids = self._tokenizer.encode(text).ids + sampling.get("stop_token_ids", [])[:1]
        kept = ids[: sampling["max_tokens"]]
        sampled = [{"token_id": token, "logprob": self._logprob(rng)} for token in kept]
        return {
            "index": index,
            "token_ids": kept,
            "logprobs": {"content": [{**one, "top_logprobs": [one]} for one in sampled]},
            "weight_versions": [{"start": 0, "end": len(kept), "version": self._version}],
            "finish_reason": "stop" if len(kept) == len(ids) else "length",
            "stop_reason": None,
        }

    def _logprob(self, rng: Random) -> float:
        """Return about the logprob of an untrained network."""
        return rng.uniform(-1, 1) - self._vocabulary.bit_length() * 0.7


def spoken(prompt: str, rng: Random) -> str:
    """Return an answer, sometimes correct in reverse-text, alphabet-sort and wiki-search."""
    last = prompt.split("<|im_start|>")[-2].partition("\n")[2]
    last = re.sub(r"<\|im_end\|>|</?tool_response>", "", last).strip()
    results = prompt.count("<tool_response>")
    if ("?" in last or results) and results < len(TOOLS) and rng.random() < 0.8:
        name, parameter = TOOLS[results]
        call = {"name": name, "arguments": {parameter: rng.choice(last.split("\n"))}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    words = re.findall(r"\w+", last.rpartition(": ")[2]) or ["nothing"]
    backwards, in_order = words[-1][::-1], " ".join(sorted(words))
    return rng.choice([backwards, in_order, " ".join(rng.sample(words, min(3, len(words))))])


def fingerprints(folder: Path) -> dict[str, str]:
    """Return the fingerprint of each file with weights in a folder."""
    return {
        p.name: content_fingerprint(p.read_bytes()) for p in sorted(folder.glob("*.safetensors"))
    }


def content_fingerprint(content: bytes) -> str:
    """Return the fingerprint of the tensors of a safetensors file (rl/weights/fingerprint.py)."""
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    tensors.pop("__metadata__", None)
    parts = []
    for name, form in sorted(tensors.items()):
        first, end = form["data_offsets"]
        data = xxhash.xxh3_64_hexdigest(content[start + first : start + end])
        parts.append(f"{name}:{tuple(form['shape'])}:{DTYPES[form['dtype']]}:{data};")
    return xxhash.xxh3_64_hexdigest("".join(parts).encode())


def _refused(why: str) -> web.Response:
    return web.json_response({"error": {"message": why, "code": 500}}, status=500)


def asking_for(key: str) -> Any:
    """Return a middleware that refuses requests without the key."""

    @web.middleware
    async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401)
        return await handler(request)

    return guarded


async def _app(arguments: argparse.Namespace) -> web.Application:
    engine = Engine(arguments.model, arguments.max_model_len, "default")  # as vLLM before a push
    app = web.Application(client_max_size=2**26)
    if key_file := os.environ.get("OFFBYONE_KEY_FILE"):
        app.middlewares.append(asking_for(Path(key_file).read_text()))
    if arguments.faults:
        from engine_faults import middleware, read_faults  # this file is started by its path

        app.middlewares.append(middleware(read_faults(arguments.faults)))
    app.router.add_get("/health", engine.models)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/inference/v1/generate", engine.generate)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_post("/v1/load_lora_adapter", engine.load_adapter)
    app.router.add_post("/{path:.*}", engine.control)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag, kind in (("model", Path), ("max-model-len", int), ("faults", Path)):
        parser.add_argument(f"--{flag}", type=kind)
    for flag, kind in (("uds", str), ("host", str), ("port", int)):
        parser.add_argument(f"--{flag}", type=kind)
    chosen = parser.parse_args()
    where = {"path": chosen.uds} if chosen.uds else {"host": chosen.host, "port": chosen.port}
    web.run_app(_app(chosen), **where, print=None, backlog=2048)  # the backlog of uvicorn and vLLM
