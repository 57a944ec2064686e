"""Sample rollouts from the policy in training, in its own process and without vLLM.

This is slow, but fast enough for a few short rollouts. The environment scores the groups, and the
code of a run computes their credit, filters them with the buffer and plans the batch.
"""

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from renderers import Renderer

from envs.episode import Episode, Example, StopReason, rewards_by_name
from envs.protocol import Environment
from rl.config.build import build, component
from rl.config.facts import fact
from rl.config.learned import Learned
from rl.config.schema import Run
from rl.dry_call.learn import run_with_facts
from rl.inference.completion import Completion
from rl.learner.learner import Learner
from rl.learner.ranks import Ranks
from rl.model.tokenizer import load_renderer
from rl.records import Group, RankBatch, Rollout
from rl.rollouts.batch_credit import apply_batch_credit
from rl.rollouts.credit import GroupCredit
from rl.rollouts.plan import plan_batch
from rl.runtime.folder import RunFolder
from rl.sampling.renderer_chat import render
from rl.sampling.row_builder import RowBuilder
from tests.support.composing import composed

_WARM_STEPS, _TEACHER_STEPS = 50, 60
_MOST_GROUPS = 240  # groups sampled for one batch at most


class Playground:
    """Teach a tiny model for each environment, and make batches of its rollouts."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self._ranks = folder, ranks
        self._models: dict[str, Path] = {}

    def model(self, env: dict[str, Any]) -> Path:
        """Return the folder of a tiny model taught this environment; the first call teaches it."""
        name = _name(env)
        if name not in self._models:
            self._models[name] = self._teach(env, self.folder / name)
        return self._models[name]

    def _teach(self, env: dict[str, Any], folder: Path) -> Path:
        overrides = [
            *("loss=sft", "sampler=demonstrations", "model.warm_start=null", "model.dtype=float32"),
            *("batch_size=64", "group_size=1", f"max_steps={_TEACHER_STEPS}"),
            *("optim.learning_rate=3e-3", "trainer.num_threads=1", "run_name=taught"),
        ]
        run = replace(run_with_facts(composed(*overrides)), env=env)
        run_folder = RunFolder(folder / "run")
        run_folder.path.mkdir(parents=True)
        untaught = build(run.model)().prepare(folder / "untaught")
        # `batch` below calls `model`, which would start to teach again without this entry.
        self._models[_name(env)] = untaught
        run_folder.set_model(untaught)
        learner = Learner(run, run_folder, self._ranks)
        for step in range(_TEACHER_STEPS):
            if step == _WARM_STEPS:
                learner.policy.export(folder / "taught", untaught)
            learner.update(self.batch(run, learner, step))
        learner.policy.export(folder / "teacher", untaught)
        return folder / "taught"

    def teacher(self, env: dict[str, Any]) -> Path:
        """Return the folder of a model that was taught for some more steps."""
        return self.model(env).with_name("teacher")

    def transcripts(self, env: dict[str, Any]) -> Path:
        """Return a file of conversations in this environment."""
        path = self.folder / f"{_name(env)}.jsonl"
        conversations = islice(build(env)().demonstrations(Random(0)), 64)
        path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
        return path

    def batch(self, run: Run, learner: Learner, step: int) -> RankBatch:
        """Return a batch for one step, sampled from the current policy."""
        env: Environment = build(run.env)()
        renderer = load_renderer(self.model(run.env), build(run.model)().renderer)
        sampler, lengths = build(run.sampler)(), (run.group_size, run.max_seq_len)
        if step == 0:
            self._buffer = build(run.buffer)()  # kept, because it may replay groups
        buffer = self._buffer
        if shown := getattr(buffer, "demonstrations", None):
            buffer.demonstrate = lambda seed, _: tuple(
                shown.group(env, renderer, Random(seed), *lengths)
            )
        credit = GroupCredit.of(run, lambda _: env.reward_weights)
        order = build(run.order)()
        order.begin(env.pools("train"), run.seed)
        for first in range(0, _MOST_GROUPS, run.groups_per_step):
            indices = [step * _MOST_GROUPS + first + i for i in range(run.groups_per_step)]
            places = [order.next(index) for index in indices]
            examples = [order.example(place) for place in places]
            if sampler.uses_vllm:
                torch.manual_seed(run.seed + indices[0])
                played = play(run, learner, env, renderer, examples, step)
            else:
                seeds = [Random(f"{run.seed}:{i}") for i in indices]
                played = [sampler.group(env, renderer, seed, *lengths) for seed in seeds]
            drawn = zip(indices, places, examples, played, strict=True)
            for index, place, example, rollouts in drawn:
                credits = credit(example, rollouts)
                group = Group(index, example, step, tuple(rollouts), credits)
                order.observe(place, group)
                buffer.add(group)
            if len(buffer) >= buffer.num_new(run.groups_per_step):
                break
        groups = buffer.draw(step, run.groups_per_step, _MOST_GROUPS, [])
        assert groups, f"{_MOST_GROUPS} groups, rejected: {dict(buffer.rejected)}"
        (share,) = plan_batch(
            apply_batch_credit(groups, component(run.batch_credit)),
            build(run.aggregation),
            step=step,
            ranks=1,
            tokens_per_micro_batch=1024,
            metrics={},
            per_turn=Learned.of(run).aggregation_takes_turns,
            whole_groups=fact(run.loss["_target_"], "whole_groups", False),
        )
        return share


def _name(env: dict[str, Any]) -> str:
    return env["_target_"].rpartition(".")[2]


def play(
    run: Run,
    learner: Learner,
    env: Environment,
    renderer: Renderer,
    examples: list[Example],
    step: int,
) -> list[list[Rollout]]:
    """Return a group of rollouts of each example, all generated together."""
    prompts = [render(renderer, example.messages) for example in examples]
    stops, limit = renderer.get_stop_token_ids(), run.sampler["max_tokens"]
    repeated = [prompt for prompt in prompts for _ in range(run.group_size)]
    model, rollouts = learner.policy.engine.module.model, []
    completions = sample(model, repeated, limit, stops, run.sampler.temperature)
    for i, (tokens, logprobs) in enumerate(completions):
        example, cut_off = examples[i // run.group_size], tokens[-1] not in stops
        reason = StopReason.MAX_TOKENS if cut_off else StopReason.STOP
        message = {"role": "assistant", "content": renderer.parse_response(tokens).content}
        messages = [*example.messages, message]
        episode = Episode(example, messages, turns=1, stop_reason=reason)
        rewards, _ = rewards_by_name(asyncio.run(env.score(episode)), episode.turns)
        rows = RowBuilder()
        rows.add_turn(Completion(tokens, logprobs, [step] * len(tokens), cut_off, repeated[i]))
        total = sum(w * rewards.get(name, 0.0) for name, w in env.reward_weights.items())
        rollouts.append(
            Rollout(rows.freeze(), messages, total, rewards, reason, 1, 0.0, turn_limit=limit)
        )
    return [rollouts[i : i + run.group_size] for i in range(0, len(rollouts), run.group_size)]


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], limit: int, stops: list[int], temperature: float
) -> list[tuple[list[int], list[float]]]:
    """Return a completion of each prompt, at most `limit` tokens long, and its logprobs."""
    width = max(map(len, prompts))
    # Pad on the left, so that all completions begin in the same column.
    ids = torch.tensor([[stops[0]] * (width - len(p)) + p for p in prompts])  # [B, width]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # shared prefixes have no cache of keys and values
    model.eval()
    made = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=limit,
        eos_token_id=stops,
        pad_token_id=stops[0],
        return_dict_in_generate=True,
        output_scores=True,  # logits after the temperature, as for vLLM's logprobs
    )
    model.train()
    model.set_attn_implementation(attention)
    chosen = model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
    new = made.sequences[:, width:]  # [B, new], as `chosen`
    completions = []
    for tokens, logprobs in zip(new.tolist(), chosen.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        completions.append((tokens[:end], logprobs[:end]))
    return completions
