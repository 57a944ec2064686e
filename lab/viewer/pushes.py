"""How hard training moved each rollout, from the ranks' files of the token record."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pyarrow import parquet

_STRONG = 0.98  # quantile of the tokens with a gradient
_GRADIENT = ("grad", "slope")  # names of the column; the second in older runs


def pushes_of(paths: Iterable[Path]) -> tuple[dict[str, float], float | None]:
    """Return the push of each rollout of a step by id, and the |gradient| of a strong token.

    The push of a rollout is the sum of its tokens' |gradient|. If the step trained on nothing, its
    files have no such column.
    """
    pushes: dict[str, float] = defaultdict(float)
    sizes = [np.empty(0)]
    for path in paths:
        file = parquet.ParquetFile(path)
        for name in set(_GRADIENT) & set(file.schema_arrow.names):
            columns = file.read(columns=["id", name])
            for identity, gradients in zip(columns["id"], columns[name], strict=True):
                size = np.abs(gradients.values.drop_null().to_numpy().astype(np.float64))
                pushes[identity.as_py()] += float(size.sum())
                sizes.append(size)
    positive = np.concatenate(sizes)
    positive = positive[positive > 0]
    return pushes, float(np.quantile(positive, _STRONG)) if len(positive) else None
