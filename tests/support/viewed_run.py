"""Write a small made-up run with turns, tools, thinking, a fork and a rejected group.

The token record is of its real form. What is in it obeys a clipped surrogate: the grad of a token
is -weight * advantage * ratio, and 0 where the ratio is beyond 1 +- 0.2 on the advantage's side.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny-wiki"
HOSTILE = '<img src=x onerror="window.broken = true"><script>window.broken = true</script>'
CLIP = 0.2
FORK = (1, 1)  # index of the group in a step and of the rollout whose history is rewritten
COUNTRIES = ("Norland", "Estavia", "Quill", "Marrow", "Tessel", "Ostrand", "Velia", "Harrow")
CAPITALS = ("Vik", "Sorn", "Penna", "Dunmere", "Alba", "Kestrel", "Ombra", "Tarn")


@dataclass(frozen=True)
class Viewed:
    """Hold the size of a made-up run.

    Attributes:
        record: whether to write a token record.
        unrecorded: indices of the groups of a step without a record (record=sample).
        evaluations: the evaluated versions.
        going: whether the last file ends in half a line, as while a run writes it.

    """

    steps: int = 3
    groups: int = 3
    group_size: int = 4
    record: bool = True
    unrecorded: tuple[int, ...] = ()
    evaluations: tuple[int, ...] = (0, 2)
    going: bool = False
    seed: int = 0

    def write(self, path: Path) -> Path:
        """Write the run into a folder and return it."""
        random = Random(self.seed)
        for name in ("rollouts", "evaluations", *(("tokens",) if self.record else ())):
            (path / name).mkdir(parents=True, exist_ok=True)
        (path / "model.txt").write_text(f"{TOKENIZER}\nfingerprint\n")
        (path / "config.yaml").write_text(
            "loss:\n  _target_: losses.ppo_clip.ppo_clip\n  clip_low: 0.2\n  clip_high: 0.2\n"
        )
        for step in range(self.steps):
            self.write_step(path, step, random)
        for version in self.evaluations:
            lines = [
                _line(_episode(random, question, version, self.steps), example=question, step=None)
                for question in range(4)
                for _ in range(self.group_size)
            ]
            _write(path / "evaluations" / f"version_{version:06d}.jsonl", lines)
        if self.going:
            with (path / "rollouts" / f"step_{self.steps - 1:06d}.jsonl").open("a") as file:
                file.write('{"group": 99, "example": 1, "env": "wi')
        return path

    def write_step(
        self, path: Path, step: int, random: Random | None = None, num_ranks: int = 2
    ) -> None:
        """Write one more step; in every second step the last group is rejected."""
        random = random or Random(self.seed + 1000 + step)
        lines: list[dict[str, Any]] = []
        sampled: list[dict[str, Any]] = []
        trained: list[dict[str, Any]] = []
        for place in range(self.groups):
            group = step * self.groups + place
            used = not (step % 2 and place == self.groups - 1)
            question = random.randrange(len(COUNTRIES))
            episodes = [
                _episode(
                    random,
                    question,
                    step,
                    self.steps,
                    hostile=group == 1 and k == 0,
                    forked=(place, k) == FORK,
                )
                for k in range(self.group_size)
            ]
            mean = float(np.mean([e["reward"] for e in episodes]))
            for k, episode in enumerate(episodes):
                identity = f"{group:06d}.{k}"
                advantage = episode["reward"] - mean
                rows = _rows(random, episode, step, fork=(place, k) == FORK)
                lines.append(
                    _line(
                        episode,
                        example=question,
                        step=step,
                        used=used,
                        advantage=advantage,
                        id=identity,
                        group=group,
                        num_rows=len(rows),
                    )
                )
                for number, row in enumerate(rows if place not in self.unrecorded else ()):
                    sampled.append({"id": identity, "row": number, **row})
                    if used:
                        number_of = {"id": identity, "row": number}
                        trained.append({**number_of, **_trained(random, row, advantage)})
        _write(path / "rollouts" / f"step_{step:06d}.jsonl", lines)
        if self.record:
            name = f"step_{step:06d}"
            _parquet(path / "tokens" / f"{name}.rollouts.parquet", sampled)
            for rank in range(num_ranks):  # rows of one group are on several ranks
                part = [r for i, r in enumerate(trained) if i % num_ranks == rank]
                _parquet(path / "tokens" / f"{name}.trainer.rank{rank}.parquet", part)


def _episode(
    random: Random,
    question: int,
    version: int,
    last: int,
    *,
    hostile: bool = False,
    forked: bool = False,
) -> dict[str, Any]:
    """Return one episode: search for a country, then answer. Later versions are better."""
    country, capital = COUNTRIES[question], CAPITALS[question]
    right = random.random() < 0.25 + 0.6 * version / max(1, last)
    answer = capital if right else random.choice([c for c in CAPITALS if c != capital])
    hasty = random.random() < 0.2 and not forked  # answers without looking
    search = {"name": "search", "arguments": {"query": country}}
    page = f"{country} lies on the northern coast. Its capital is {capital}, its river the Ane."
    call: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "reasoning_content": f"I should look up {country} before I answer.",
        "tool_calls": [{"id": "call_0", "type": "function", "function": search}],
    }
    final = f"The capital of {country} is {answer}."
    if hostile:
        final = HOSTILE
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer from the pages that you find. Be brief."},
        {"role": "user", "content": f"What is the capital of {country}?"},
    ]
    if not hasty:
        messages += [call, {"role": "tool", "tool_call_id": "call_0", "content": page}]
    messages.append({"role": "assistant", "content": final})
    reward = float(answer == capital and not hostile)
    turns = 1 if hasty else 2
    return {
        "messages": messages,
        "reward": reward,
        "rewards": {"exact": reward, "found": float(not hasty)},
        "turn_rewards": {"found": [0.0] if hasty else [1.0, 0.0]},
        "turns": turns,
        "stop_reason": "max_tokens" if random.random() < 0.05 else "stop",
        "tool_calls": turns - 1,
    }


def _line(episode: dict[str, Any], *, example: int, step: int | None, **known: Any) -> dict:
    tokens = sum(len(_encode(_said(m))) + 1 for m in episode["messages"] if _sampled(m))
    line = {"example": example, "env": "wiki-search", **episode, "tokens": tokens, "error": ""}
    if step is not None:
        line |= {"shaped_reward": episode["reward"], "versions": [max(0, step - 1)], **known}
    return line


def _sampled(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant"


def _said(message: dict[str, Any]) -> str:
    """Return the text of a message in ChatML with Qwen3's markup."""
    parts = []
    if thinking := message.get("reasoning_content"):
        parts.append(f"<think>\n{thinking}\n</think>\n\n")
    parts.append(message["content"])
    for call in message.get("tool_calls", []):
        parts.append(f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>")
    return "".join(parts)


def _rows(random: Random, episode: dict[str, Any], step: int, *, fork: bool) -> list[dict]:
    """Return the rows that the server saw: one, or one per turn with a fork."""
    rows: list[dict[str, list]] = []
    row: dict[str, list] = {name: [] for name in ("token_ids", "mask", "mu", "version", "turns")}
    turn = 0

    def extend(text: str, sampled: bool) -> None:
        ids = _encode(text)
        row["token_ids"] += ids
        row["mask"] += [sampled] * len(ids)
        row["mu"] += [-random.expovariate(2) if sampled else float("nan") for _ in ids]
        row["version"] += [max(0, step - 1) if sampled else -1] * len(ids)
        row["turns"] += [turn if sampled else -1] * len(ids)

    for message in episode["messages"]:
        if not _sampled(message):
            extend(f"<|im_start|>{message['role']}\n{_said(message)}<|im_end|>\n", False)
            continue
        extend("<|im_start|>assistant\n", False)
        extend(f"{_said(message)}<|im_end|>", True)
        extend("\n", False)
        turn += 1
        if fork and turn == 1:
            rows.append(row)
            row = {name: [] for name in row}
    rows.append(row)
    return [row for row in rows if any(row["mask"])]


def _trained(random: Random, row: dict[str, list], advantage: float) -> dict[str, Any]:
    """Return the columns that a rank writes, with a number for each sampled token."""
    mu = np.array([x for x, m in zip(row["mu"], row["mask"], strict=True) if m], np.float32)
    noise = [random.gauss(0, 0.12) for _ in mu]
    pi = np.minimum(mu + np.array(noise, np.float32), 0).astype(np.float32)
    ratio = np.exp(pi - mu)
    high, low = (advantage > 0) & (ratio > 1 + CLIP), (advantage < 0) & (ratio < 1 - CLIP)
    weight = np.full_like(mu, 1 / 400)
    grad = np.where(high | low, 0, -weight * advantage * ratio).astype(np.float32)
    columns = {
        "pi": pi,
        "entropy": np.array([random.expovariate(1.5) for _ in mu], np.float32),
        "correction": np.ones_like(mu),
        "advantage": np.full_like(mu, advantage),
        "weight": weight,
        "loss": (-advantage * ratio).astype(np.float32),
        "grad": grad,
        "kept": np.ones_like(mu),
        "metric_clip_fraction": (high | low).astype(np.float32),
        "metric_clip_fraction_high": high.astype(np.float32) * np.ones_like(mu),
    }
    return {name: values.tolist() for name, values in columns.items()}


_ENCODER = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def _encode(text: str) -> list[int]:
    return _ENCODER.encode(text, add_special_tokens=False).ids


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


_TYPES = {
    "id": pa.string(),
    "row": pa.int32(),
    **{name: pa.list_(pa.int32()) for name in ("token_ids", "version", "turns")},
    "mask": pa.list_(pa.bool_()),
}


def _parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]) if rows else ["id", "row", "grad"]
    fields = [pa.field(name, _TYPES.get(name, pa.list_(pa.float32()))) for name in names]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(fields)), path)
