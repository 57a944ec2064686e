"""Annotations for the usual ranges of options. The configuration check enforces the ranges.

    learning_rate: PositiveFloat
    max_tokens: PositiveInt | None

An option with another range has an annotation such as Annotated[float, Meta(gt=0, le=1)].
"""

from typing import Annotated

from msgspec import Meta

from envs.options import NonNegativeInt as NonNegativeInt
from envs.options import PositiveFloat as PositiveFloat
from envs.options import PositiveInt as PositiveInt
from envs.options import Probability as Probability

NonNegativeFloat = Annotated[float, Meta(ge=0)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
