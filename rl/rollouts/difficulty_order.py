r"""An order with three queues. The mean reward of an example's last group chooses its queue.

    mean reward of the group >= easy_threshold  ->  easy    \
                             <= hard_threshold  ->  hard     >  each drawn by its weight
    between, and unplayed examples              ->  normal  /

Only the last group of an example counts, because older rewards are those of an older policy. A
group that is played again after a resume counts once. The example that was played longest ago comes
next in its queue, so no example repeats before all others of its queue were played.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

from envs.protocol import Pool
from rl.config.ranges import NonNegativeFloat
from rl.records import Group
from rl.rollouts.example_order import ExampleOrder, Place

_LEVELS = ("easy", "normal", "hard")

_Queue = OrderedDict[int, None]  # positions of examples, first the one played longest ago


class DifficultyOrder(ExampleOrder):
    """Draws an environment of a mixture, then one of its three queues, each by its weight."""

    ORDERED: ClassVar[tuple[str, ...]] = ("hard_threshold", "easy_threshold")  # first must be lower

    def __init__(
        self,
        *,
        easy_threshold: float,
        hard_threshold: float,
        easy_weight: NonNegativeFloat,
        normal_weight: NonNegativeFloat,
        hard_weight: NonNegativeFloat,
    ) -> None:
        self.easy_threshold, self.hard_threshold = easy_threshold, hard_threshold
        self.weights = {"easy": easy_weight, "normal": normal_weight, "hard": hard_weight}

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        super().begin(pools, seed)
        self.load({})

    def next(self, index: int) -> Place:
        # One RNG per draw, so that checkpoints need not store RNG state.
        rng = random.Random(f"{self.seed}:{index}")
        (pool,) = rng.choices(range(len(self.pools)), [pool.weight for pool in self.pools])
        filled = {level: queue for level, queue in self._queues[pool].items() if queue}
        weights = [self.weights[level] for level in filled]
        # If all non-empty queues have weight 0, draw from them equally, so that the run continues.
        (level,) = rng.choices(list(filled), weights if any(weights) else None)
        position = next(iter(filled[level]))
        filled[level].move_to_end(position)
        # In `normal`, unplayed examples come first, so this one was unplayed if any are left.
        if level == "normal" and self._num_unplayed[pool]:
            self._num_unplayed[pool] -= 1
        return pool, position

    def observe(self, place: Place, group: Group) -> None:
        if not group.rewards:
            return
        pool, position = place
        queues, mean = self._queues[pool], sum(group.rewards) / len(group.rewards)
        is_hard = mean <= self.hard_threshold
        level = "easy" if mean >= self.easy_threshold else "hard" if is_hard else "normal"
        if position not in queues[level]:
            for queue in queues.values():
                queue.pop(position, None)
            queues[level][position] = None

    def state(self) -> dict[str, Any]:
        """Return pool sizes and played examples. `load` shuffles unplayed examples by the seed."""
        played = [
            {
                level: list(queue)[unplayed if level == "normal" else 0 :]
                for level, queue in queues.items()
            }
            for queues, unplayed in zip(self._queues, self._num_unplayed, strict=True)
        ]
        return {"sizes": [len(pool.examples) for pool in self.pools], "played": played}

    def load(self, state: dict[str, Any]) -> None:
        sizes = [len(pool.examples) for pool in self.pools]
        if state.get("sizes", sizes) != sizes:
            raise ValueError(
                f"the environment's pools had {state['sizes']} examples at the checkpoint, but "
                f"have {sizes} now: resume with the same data, or start a new run"
            )
        played = state.get("played") or [{level: [] for level in _LEVELS} for _ in sizes]
        self._queues: list[dict[str, _Queue]] = []
        self._num_unplayed: list[int] = []
        for pool, levels in enumerate(played):
            was_played = {position for level in _LEVELS for position in levels[level]}
            positions = list(range(sizes[pool]))
            random.Random(f"{self.seed}:{pool}").shuffle(positions)
            unplayed = [position for position in positions if position not in was_played]
            queues = {level: OrderedDict.fromkeys(levels[level]) for level in _LEVELS}
            queues["normal"] = OrderedDict.fromkeys([*unplayed, *levels["normal"]])
            self._queues.append(queues)
            self._num_unplayed.append(len(unplayed))

    def metrics(self) -> dict[str, float]:
        """Return the share of each queue among all examples, and the number of played examples."""
        counts = {level: sum(len(queues[level]) for queues in self._queues) for level in _LEVELS}
        total = sum(counts.values())  # excludes examples that the env has added since `load`
        shares = {level: count / total for level, count in counts.items()}
        return {**shares, "seen": float(total - sum(self._num_unplayed))}
