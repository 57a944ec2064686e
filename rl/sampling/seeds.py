"""A seed for every request, so that a run can be repeated: `sampler.seeded`.

    run seed, group index, rollout, attempt, turn ---> seed of the request, of its completion j: + j

Neither time nor order goes in, so a request draws the same whenever it is made and whatever is
sampled beside it. Whether it also gets the same logits is the server's affair (conf/sampler).
"""

from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass
class RequestSeeds:
    """Those of one attempt at a rollout: each turn that is asked for gets the next one.

    A copy (`replace`) begins at the first turn.

    Attributes:
        seed: of the run; None: no request has one, and the server draws as it likes.

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
        # 56 bits: a group's completions count up from here, and vLLM takes 63.
        return int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "big")
