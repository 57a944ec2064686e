"""Derives a seed for every request, so that a run can be repeated: `sampler.seeded`.

    run seed, group index, rollout, attempt, turn ---> seed of the request, of its completion j: + j

The seed depends on neither time nor order. The server decides whether the logits are the same, too
(conf/sampler).
"""

from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass
class RequestSeeds:
    """The seeds of one attempt at a rollout, one per turn.

    A copy (`replace`) begins at the first turn.

    Attributes:
        seed: of the run; None: requests have no seed.

    """

    seed: int | None
    group: int = 0
    rollout: int = 0
    attempt: int = 0
    _turns: int = field(default=0, init=False)

    def next(self) -> int | None:
        """Return the seed of the next turn."""
        if self.seed is None:
            return None
        key = f"{self.seed}:{self.group}:{self.rollout}:{self.attempt}:{self._turns}"
        self._turns += 1
        # 56 bits, because a group's completions count up from here and vLLM accepts 63 bits.
        return int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "big")
