"""The command line of compare_losses.py."""

import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import torch
from pandas import DataFrame
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.losses.arms import CHANGEABLE, Arm, arms_of
from lab.losses.page import write_page
from lab.losses.recorded import RecordedBatch, recorded_batches, recorded_steps, token_table
from lab.viewer.token_record import tokenizer_of
from rl.config.limits import num_returned_tokens
from rl.config.schema import ConfigError
from rl.runtime.folder import RunFolder, step_of
from rl.runtime.metrics import read_metrics
from rl.runtime.start_record import program
from rl.runtime.text import printable

USAGE = f"""\
Compute other losses on the batches that a run recorded, without a model:

    python compare_losses.py outputs/run loss=gspo,dapo           every recorded step
    python compare_losses.py outputs/run loss=mine steps=40..60   some steps
    python compare_losses.py outputs/run loss.clip_high=0.2,0.4 correction=none,tis_token

Keys that can be compared: {", ".join(CHANGEABLE)} and their options

    steps=40..60      first and last step; 40.. ends at the last recorded step (default: all)
    tokens=10         tokens to print for each loss
    out=losses.html   the page (default: in the run's folder)
    step=true         from a checkpoint, train one batch with each loss (takes minutes)

docs/compare-losses.md explains each number."""
COLUMNS = ("loss", "objective", "cosine", "norm", "agree", "opposite", "only run", "only this")
_OPTIONS = ("steps=", "tokens=", "out=", "step=")


def main(words: list[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(USAGE.replace("python compare_losses.py", program("compare_losses")))  # noqa: T201
        return 0 if words else 2
    folder, *rest = words
    options = dict(word.split("=", 1) for word in rest if word.startswith(_OPTIONS))
    arms = [word for word in rest if not word.startswith(_OPTIONS)]
    console = Console(highlight=False)
    if not console.is_terminal:
        # If stdout is not a terminal, rich assumes 80 columns and would cut numbers.
        console = Console(highlight=False, width=160)
    try:
        _print_comparison(RunFolder(Path(folder)), arms, options, console)
    except (ValueError, OSError) as error:
        text = str(error) if isinstance(error, ConfigError) else f"- {error}"
        print(f"these losses cannot be compared:\n{printable(text)}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _chosen_steps(folder: RunFolder, text: str | None) -> list[int]:
    steps = recorded_steps(folder)
    if not folder.config.is_file() or not steps:
        what = "has no token record" if folder.config.is_file() else "is not the folder of a run"
        raise ValueError(f"{folder} {what}: name a run that trained with record=all")
    if text is None:
        return steps
    first, is_range, last = text.partition("..")
    last = last or (str(steps[-1]) if is_range else first)
    if not first.isdecimal() or not last.isdecimal():
        raise ValueError(
            f"steps={text}: give a step or a range, such as steps=40..60 or steps=40.."
        )
    chosen = [step for step in steps if int(first) <= step <= int(last)]
    if not chosen:
        raise ValueError(f"steps={text}: choose from the recorded steps {steps[0]} to {steps[-1]}")
    return chosen


def _print_comparison(
    folder: RunFolder, words: list[str], options: dict[str, str], console: Console
) -> None:
    steps = _chosen_steps(folder, options.get("steps"))
    count = options.get("tokens", "10")
    if not count.isdecimal():
        raise ValueError(f"tokens={count}: give the number of tokens to print")
    if (is_step := options.get("step", "false")) not in ("true", "false"):
        raise ValueError(
            f"step={is_step}: write step=true or false, or steps=40..60 to choose steps"
        )
    if is_step == "true":
        return _print_steps(folder, words, steps, console)
    arms = arms_of(folder, words)
    batches = [batch for step in steps for batch in recorded_batches(folder, step)]
    if not batches:
        raise ValueError(
            f"{folder} has no trained token in steps {steps[0]} to {steps[-1]}: choose other steps"
        )
    betas = {row["step"]: row.get("train/kl_beta", 0.0) for row in read_metrics(folder)}
    rows, grads = [], list[Tensor]()
    for arm in arms:
        found = [arm.gradient(batch, betas.get(batch.step, 0.0)) for batch in batches]
        grads.append(torch.cat([gradient for _, gradient in found]))
        objective = sum(value for value, _ in found) / len(found)
        rows.append((arm.name, f"{objective:.5g}", *difference(grads[0], grads[-1])))
    basis = _describe_batches(batches, grads[0])
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(basis, table, sep="\n\n", markup=False)
    tokens = token_table(batches, tokenizer_of(folder)[0])
    for arm, own in zip(arms[1:], grads[1:], strict=True):
        compared = tokens.assign(base=grads[0].numpy(), own=own.numpy())
        _print_tokens(console, arm, compared, int(count))
    page = Path(options.get("out") or folder.path / "losses.html")
    shown = {"run": folder.name, "basis": basis, "columns": COLUMNS, "rows": rows}
    write_page(page, arms, tokens, grads, **shown)
    console.print(f"\npage    {page}", markup=False)


def _print_steps(
    folder: RunFolder, words: list[str], steps: Sequence[int], console: Console
) -> None:
    """Print how an optimizer step with each loss changes the logprobs of the next batch's answers.

    Every loss starts from the newest checkpoint whose next two steps were recorded.
    """
    from lab.losses.step import COLUMNS, take_steps  # imports DeepSpeed

    arms, usable = arms_of(folder, words, has_model=True), {*steps} & {step - 1 for step in steps}
    found = [path for path in folder.complete_checkpoints() if step_of(path) in usable]
    base = arms[0].run
    is_sharded = base.deepspeed["zero_optimization"]["stage"] > 0 and base.trainer.ranks != 1
    penalised = any("estimator" in a.run.critic or a.run.kl["place"] == "reward" for a in arms)
    # With sampler.top_k, logprobs are normalised over the returned tokens, which the record lacks.
    remedies = {
        "a checkpoint whose next two steps were recorded (record=all trainer.checkpoint_every=10 "
        "max_steps=22)": not found,
        "neither a critic nor a KL penalty in the reward (critic=none kl.place=loss)": penalised,
        "no ZeRO over several ranks (trainer.ranks=1)": is_sharded,
        "no sampler.top_k (sampler.top_k=-1)": num_returned_tokens(base.sampler) > 0,
    }
    if needed := ", ".join(remedy for remedy, is_needed in remedies.items() if is_needed):
        raise ValueError(f"{folder}: step=true needs a run with {needed}")
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in take_steps(folder, arms, found[-1]):
        table.add_row(*row)
    console.print(f"a step from {found[-1].name} changes log pi of the next batch by:", table)


def difference(base: Tensor, arm: Tensor) -> list[str]:
    """Compare two gradients [N] of the same tokens. Return the cells of COLUMNS from cosine on."""
    base, arm = base.double(), arm.double()
    if not (base + arm).isfinite().all():
        return ["not finite", *["-"] * (len(COLUMNS) - 3)]
    norms = base.norm(), arm.norm()
    total = ((base != 0) | (arm != 0)).sum()
    shares = (base * arm > 0, base * arm < 0, (base != 0) & (arm == 0), (base == 0) & (arm != 0))
    cosine, norm = base @ arm / (norms[0] * norms[1]), norms[1] / norms[0]
    return [f"{cosine:.4f}", f"{norm:.4g}", *(f"{100 * x.sum() / total:.1f} %" for x in shares)]


def _describe_batches(batches: Sequence[RecordedBatch], grad: Tensor) -> str:
    recorded = torch.cat([batch.grads for batch in batches])
    peak, gap = recorded.abs().max().item(), (grad - recorded).abs().max().item()
    # Every update of a step counts the same untrained rows, so count them once per step.
    untrained = sum({batch.step: batch.num_untrained for batch in batches}.values())
    left = f" {untrained} recorded rows were not trained and are left out." if untrained else ""
    error = f"{gap / peak:.1g} of the largest gradient" if peak else f"{gap:.1g} (all are 0)"
    error = error if isfinite(gap) else "NaN or infinity, because some gradients are not finite"
    return (
        f"{len(grad)} tokens of {len(batches)} updates, steps {batches[0].step} to "
        f"{batches[-1].step}.{left} Recomputed and recorded gradients differ by up to {error}."
    )


def _print_tokens(console: Console, arm: Arm, tokens: DataFrame, count: int) -> None:
    changes = ", ".join(arm.changed_keys) or "nothing"
    ignored = f"; the comparison ignores its {', '.join(arm.ignored)}" if arm.ignored else ""
    console.print(f"\n{arm.name} changes {changes}{ignored}", markup=False)
    heads = ("step", "rollout", "turn", "at", "token", "stale", "pi/anchor", "advantage")
    table = Table(*heads, "recorded grad", "grad", box=None, pad_edge=False)
    gaps = (tokens.own - tokens.base).abs().fillna(float("inf"))  # NaN counts as the largest gap
    for token in tokens.loc[gaps[gaps > 0].nlargest(count).index].itertuples():
        where = (token.step, token.rollout, token.turn, token.at, printable(repr(token.text)))
        numbers = (token.ratio, token.advantage, token.base, token.own)
        table.add_row(*map(str, (*where, token.stale)), *(f"{x:.3g}" for x in numbers))
    if table.rows:
        console.print("the tokens whose gradients differ most:", table, sep="\n", markup=False)
