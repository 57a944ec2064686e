"""A vLLM plugin that replaces a tensor, or only its first row or expert, by its previous value.

`write` writes it as an installed package into a folder; VLLM_PLUGINS names it.
"""

from pathlib import Path

NAME = "stale"

# The first push (version 0) is number 0. The tensors that our plugin compares are not changed.
SHM = """
from rl.weights.vllm_plugin import WholeWeightsEngine as Engine

receive, last, numbers = Engine.receive_weights, {{}}, iter(range(10**6))

def stale(self, info):
    load, number = type(self.model).load_weights, next(numbers)
    def with_an_old_one(weights):
        weights = dict(weights)
        fresh = weights[{tensor!r}].clone()
        if number == {push}:
            stale = fresh.clone()
            stale[0] = last["tensor"][0]
            weights[{tensor!r}] = stale
        last["tensor"] = fresh
        return load(self.model, weights.items())
    self.model.load_weights = with_an_old_one
    try:
        receive(self, info)
    finally:
        del self.model.load_weights

def register():
    Engine.receive_weights = stale
"""
ADAPTER = """
from vllm.lora.lora_model import LoRAModel
from rl.weights.vllm_plugin import AdapterEngine as Engine

receive, make = Engine.receive_weights, LoRAModel.from_lora_tensors
last, numbers = {{}}, iter(range(10**6))

def stale(self, info):
    number = next(numbers)
    def with_an_old_one(*args, tensors, **knobs):
        (name,) = [name for name in tensors if {tensor!r} in name]
        fresh = tensors[name].clone()
        if number == {push}:
            tensors = {{**tensors, name: last["tensor"]}}
        last["tensor"] = fresh
        return make(*args, tensors=tensors, **knobs)
    LoRAModel.from_lora_tensors = staticmethod(with_an_old_one)
    try:
        receive(self, info)
    finally:
        LoRAModel.from_lora_tensors = make

def register():
    Engine.receive_weights = stale
"""


def write(folder: Path, code: str, tensor: str, push: int) -> dict[str, str]:
    """Write the plugin into a folder; return the environment in which vLLM loads it."""
    module = f"stale_plugin_{push}"
    (folder / f"{module}.py").write_text(code.format(tensor=tensor, push=push))
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{NAME} = {module}:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": str(folder), "VLLM_PLUGINS": f"offbyone,{NAME}"}
