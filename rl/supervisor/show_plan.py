"""Where a run would go and what it would take, on this machine or on others; nothing is started."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import hf_hub_download

from rl.config.build import build
from rl.config.check import check
from rl.config.facts import spans_hosts
from rl.config.schema import refused
from rl.model.hub import hub_problem, reason_of
from rl.model.shape import GIB, Shape, shape, shape_of
from rl.placement.settings import settled
from rl.placement.sized import sized
from rl.run.devices import Host
from rl.supervisor.remote_plan import planned

PRETENDED = {"hosts": 1, "gpus": 0, "gpu_gib": None, "host_gib": None, "cores": 16}

_WHICH = (
    "hosts: those that are reserved, or where you start the parts; for a plan of such machines say "
    "what they have, as in +hosts=2 +gpus=8 +gpu_gib=80 +host_gib=512"
)


def show_plan(config: dict[str, Any], choices: Mapping[str, str]) -> str:
    """Return the page of a run's plan.

    Args:
        config: resolved configuration, perhaps with machines to pretend: `hosts`, and of each
            `gpus`, `gpu_gib`, `host_gib` and `cores`.
        choices: which file of each group was chosen.

    Raises:
        ConfigError: it cannot work, or does not fit.

    """
    said = {key: config.pop(key) for key in PRETENDED if key in config}
    check(config, choices=choices)
    with refused():
        machines = _pretended(**{**PRETENDED, **said}) if said else None
        plan, hosts = planned(config, machines)
        page = sized(settled(config, plan), plan, hosts, _sizes(config["model"]))[1]
    return f"{page}\n{_WHICH}" if spans_hosts(config["cluster"]) and not said else page


def _pretended(
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


def _sizes(model: Mapping[str, Any]) -> Shape | None:
    """The sizes of a model; of one on the hub nothing but its config.json is fetched."""
    path = model.get("path")
    if path is None:
        with TemporaryDirectory() as folder:
            return shape_of(build(model)().prepare(Path(folder, "model")))
    if (local := Path(path).expanduser()).exists():
        return shape_of(local)
    out_of_reach = hub_problem()
    try:
        file = hf_hub_download(
            path,
            "config.json",
            revision=model.get("revision"),
            local_files_only=out_of_reach is not None,
        )
    except (OSError, ValueError) as error:  # no network, no such model, one that is gated
        reason = reason_of(error, out_of_reach)
        raise ValueError(
            f"cannot get the sizes of {path} from the hub ({reason}): "
            "check the name, go online, or use model.path=<local folder>"
        ) from error
    return shape(json.loads(Path(file).read_text(encoding="utf-8")))
