"""The complete text of refusals, and what the check reads about the shipped choices."""

from pathlib import Path

import yaml

from rl.config.annotations import takes_only_int
from rl.config.schema import ConfigError
from rl.config.signatures import options_of
from rl.config.transport import adapter_obstacle, transport
from tests.support import golden as stored
from tests.support.composing import CONF, check_all, with_choices


def test_every_refusal(config):
    """The problems of tests/golden/config/cases.yaml, and none for values at the limits."""
    cases = yaml.safe_load((stored.FOLDER / "config" / "cases.yaml").read_text())
    found = {}
    for name, changes in cases.items():
        try:
            check_all(with_choices(config, changes))
            found[name] = []
        except ConfigError as error:
            found[name] = [line.replace(str(Path.cwd()), "") for line in error.problems]
    stored.golden("config/problems", found)


def test_what_the_check_reads_about_the_shipped_choices(config):
    """Options (! required, # whole numbers), the sender of sync=auto, and obstacles of adapters."""
    found = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        if isinstance(target := (yaml.safe_load(path.read_text()) or {}).get("_target_"), str):
            options = options_of(target).items()
            found[f"{path.parent.name}={path.stem}"] = [
                f"{k}{'!' * o.required}{'#' * takes_only_int(o)}" for k, o in options
            ]
    for changes in (
        {"adapter": "=none"}, {}, {"model": "=tiny-moe"}, {"cluster": "=ray"}, {"sync": "=nccl"},
        {"adapter.rank": 513}, {"adapter.modules_to_save": ["a"]}, {"model.warm_start": None},
    ):  # fmt: skip
        given = with_choices(with_choices(config, {"adapter": "=lora"}), changes)
        made, why = transport(given), adapter_obstacle(given["adapter"], given["model"])
        found[str(changes)] = [made.name, made.adapter_only, why]
    stored.golden("config/choices", found)
