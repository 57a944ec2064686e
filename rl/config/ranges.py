"""The usual ranges of options, as annotations that the configuration check enforces.

learning_rate: PositiveFloat                 another range: Annotated[float, Meta(gt=0, le=1)]
max_tokens: PositiveInt | None
"""

from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Probability = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
