"""Show the devices and memory of a run, on this machine or on machines that the user describes."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl.config.build import build
from rl.config.initial import initial_checkpoint
from rl.config.schema import ConfigError, Run, as_config_error
from rl.config.shipped import SHIPPED
from rl.config.signatures import did_you_mean
from rl.dry_call.child import DryCall
from rl.model.pretrained import local_folder
from rl.model.shape import GIB, Shape, read_sizes, shape
from rl.runtime.devices import Host
from rl.runtime.folder import RunFolder
from rl.supervisor.resolve import resolve

# Sizes of the models in conf/model, so that a plan for such a model downloads no config.json.
_SIZES = SHIPPED / "models" / "sizes.json"
# (has fewer than 1e8 parameters, trains LoRA) -> lowest and highest usual learning rate
_USUAL_RATES = {
    (True, False): (1e-4, 1e-2),
    (True, True): (1e-3, 1e-1),
    (False, False): (1e-6, 1e-5),
    (False, True): (1e-5, 1e-4),
}
# Optional keys, with defaults, that describe the machines to plan for. All machines are equal.
DESCRIBED = {"hosts": 1, "gpus": 0, "gpu_gib": None, "host_gib": None, "cores": 16}

_HOSTS_NOTE = (
    "hosts: Ray chooses them when the run starts. To plan for certain machines, describe them: "
    "+hosts=2 +gpus=8 +gpu_gib=80 +host_gib=512"
)


def show_plan(config: dict[str, Any]) -> str:
    """Return the plan of a run as text. `config` may describe other machines (DESCRIBED)."""
    described = {key: config.pop(key) for key in DESCRIBED if key in config}
    machines = _described_hosts(**{**DESCRIBED, **described}) if described else None
    known = [*Run.__dataclass_fields__, *DESCRIBED]
    if hints := [f"there is no key {k}{did_you_mean(k, known)}" for k in config if k not in known]:
        raise ConfigError(hints)
    resolved = resolve(config, machines)
    with DryCall([config]) as dry_call:
        dry_call.learned()
    with as_config_error():
        sizes = _model_shape(resolved.run)
    note = f"\n{_HOSTS_NOTE}" if resolved.run.cluster.spans_hosts and not described else ""
    return f"{resolved.size_memory(sizes)[1]}{_learning_rate_note(resolved.run, sizes)}{note}"


def _learning_rate_note(run: Run, sizes: Shape | None) -> str:
    rate = run.optim.get("learning_rate")
    if sizes is None or rate is None:
        return ""
    lora = not str(run.adapter["_target_"]).endswith("NoAdapter")
    low, high = _USUAL_RATES[sizes.parameters < 1e8, lora]
    advice = "" if low <= rate <= high else " (docs/troubleshooting.md, instability)"
    size = f"{sizes.parameters / 1e6:,.1f} M parameters"
    trained = f"LoRA on a model of {size}" if lora else f"all of {size}"
    return f"\nlearning rate: {rate:g}; usual for {trained}: {low:g} to {high:g}{advice}"


def _described_hosts(
    *, hosts: int, gpus: int, gpu_gib: float | None, host_gib: float | None, cores: int
) -> list[Host]:
    host = Host(
        devices=tuple(map(str, range(gpus))),
        cores=cores,
        cpus=cores,
        memory=int(host_gib * GIB) if host_gib else None,
        device_memory=int(gpu_gib * GIB) if gpu_gib else None,
    )
    return [host] * hosts


def _model_shape(run: Run) -> Shape | None:
    if checkpoint := initial_checkpoint(vars(run)):
        return read_sizes(RunFolder.export_of(checkpoint))
    model = run.model
    if model.path is None:
        with TemporaryDirectory() as folder:
            return read_sizes(build(model)().prepare(Path(folder, "model")))
    if sizes := json.loads(_SIZES.read_text()).get(model.path):
        return shape(sizes)
    return read_sizes(local_folder(model.path, model.get("revision"), "model", config_only=True))
