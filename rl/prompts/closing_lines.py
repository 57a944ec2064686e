"""What a search says at its end: what it found, how sure that is, and the commands that use it."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rl.prompts.outputs import PROMPT, Candidates
from rl.run.failure import printable
from rl.run.folder import RunFolder
from rl.run.typed import key_of

# What says which policy plays what, for another program.
_POLICY = ("env", "model", "sampler", "max_seq_len", "inference", "client")
_MOST_CAUSES = 3
_LONGEST_CAUSE = 160  # characters
_MORE = 10  # times as many examples to look again


def closing_lines(
    candidates: Candidates,
    ended_by: str,
    failures: Counter[str],
    run_folder: RunFolder,
    overrides: Sequence[str],
    choices: Mapping[str, str],
) -> RenderableType:
    """All of it."""
    best, count = candidates.best, len(candidates.scores[0])
    start_score, best_score = candidates.means[0], candidates.means[best]
    gain, error = candidates.gain()
    lines = [Text(), Text(f"ended: {ended_by}, {candidates.num_calls} calls", "dim")]
    if best == 0:
        lines.append(
            Text(
                f"no prompt of {len(candidates.prompts)} did better than the one it began with: "
                f"{start_score:.3f} on {count} validation examples"
            )
        )
    else:
        sure = math.isfinite(error)  # not of a single example
        margin = f" ± {error:.3f}" if sure else ""
        lines.append(
            Text(
                f"validation score {start_score:.3f} -> {best_score:.3f} on {count} examples "
                f"({gain:+.3f}{margin}), prompt {best} of {len(candidates.prompts)}",
                "bold",
            )
        )
        chosen = "it was chosen by this very score, so look again on other examples:"
        what = "± is one standard error over the examples; " if sure else ""
        lines.append(Text(f"{what}{chosen}", "dim"))
    for cause, times in failures.most_common(_MOST_CAUSES):
        lines.append(
            Text(
                f"! {times} rollouts could not be scored: {printable(cause)[:_LONGEST_CAUSE]}",
                "red",
            )
        )
    if best:
        lines += [Text(f"  {line}") for line in commands(run_folder, overrides, choices, count)]
    files = f"{PROMPT}, results.jsonl, pareto_frontier.jsonl, metadata.json, rollouts.jsonl"
    lines.append(Text(f"{run_folder}/  {files}", "dim"))
    return Group(*lines)


def commands(
    run_folder: RunFolder, overrides: Sequence[str], choices: Mapping[str, str], num_seen: int
) -> list[str]:
    """The commands that evaluate the prompt, and train with it where that can be.

    `num_seen`: validation examples, which an evaluation of more of them begins with.
    """
    kept = [item for item in overrides if _is_of_policy(item)]
    chosen = {key_of(item) for item in kept}
    # Spelled out: an experiment may have chosen them, and train.py has other defaults.
    groups = [f"{g}={choices[g]}" for g in ("env", "model") if g in choices and g not in chosen]
    prompt = f"env.system_prompt={run_folder.path / PROMPT}"
    more = f"num_examples={num_seen * _MORE}"
    remote = choices.get("client") == "messages"
    if remote:
        groups = [group for group in groups if not group.startswith("model=")]
    lines = [shlex.join(["python", "evaluate.py", *groups, *kept, prompt, more])]
    if not remote:  # whose words cannot be trained on
        kept = [item for item in kept if key_of(item) != "adapter_path"]
        lines.append(shlex.join(["python", "train.py", *groups, *kept, prompt]))
    return lines


def _is_of_policy(override: str) -> bool:
    key = key_of(override)
    named = key.partition("@")[0].partition(".")[0]
    return named in (*_POLICY, "adapter_path") and key != "env.system_prompt"
