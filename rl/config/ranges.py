"""Annotations for the usual ranges of options. The configuration check enforces the ranges.

    learning_rate: PositiveFloat
    max_tokens: PositiveInt | None

An option with another range has an annotation such as Annotated[float, Meta(gt=0, le=1)].
"""

from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Probability = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
