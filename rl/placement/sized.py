"""A configuration, what it runs on and the model's sizes, brought together."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl.model.shape import Shape
from rl.placement.budget import fitted, parts_of
from rl.placement.page import plan_page
from rl.placement.placement import Plan
from rl.run.devices import Host


def sized(
    config: Mapping[str, Any], plan: Plan, hosts: Sequence[Host], sizes: Shape | None
) -> tuple[dict[str, Any], str]:
    """Return the configuration with what follows the memory that there is, and the page of a plan.

    Raises:
        ConfigError: it does not fit.

    """
    if sizes is None:
        return dict(config), plan_page(plan, None, hosts)
    config = fitted(config, plan, sizes, hosts)
    return config, plan_page(plan, parts_of(config, plan, sizes), hosts)
