"""The last lines of a search: its result, the standard error, and commands that use the prompt."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lab.prompts.outputs import PROMPT, Candidates
from rl.runtime.folder import RunFolder
from rl.runtime.text import key_of, strip_escapes

# The keys of the policy and the environment, which evaluate.py and train.py share.
_POLICY = ("env", "model", "sampler", "max_seq_len", "inference", "client")
_MOST_CAUSES = 3
_LONGEST_CAUSE = 160  # characters
_MORE = 10  # the evaluation takes this many times the validation examples


def closing_lines(
    candidates: Candidates,
    ended_by: str,
    failures: Counter[str],
    run_folder: RunFolder,
    overrides: Sequence[str],
    choices: Mapping[str, str],
) -> RenderableType:
    """Return the lines."""
    best, count = candidates.best, len(candidates.scores[0])
    start_score, best_score = candidates.means[0], candidates.means[best]
    gain, error = candidates.gain()
    lines = [("", ""), (f"ended: {ended_by}, {candidates.num_calls} calls", "dim")]
    if best == 0:
        lines.append(
            (
                f"none of {len(candidates.prompts)} prompts did better than the first: "
                f"{start_score:.3f} on {count} validation examples",
                "",
            )
        )
    else:
        has_error = math.isfinite(error)  # a single example has none
        margin = f" ± {error:.3f}" if has_error else ""
        meaning = "± is one standard error over the examples; " if has_error else ""
        result = (
            f"validation score {start_score:.3f} -> {best_score:.3f} on {count} examples "
            f"({gain:+.3f}{margin}), prompt {best} of {len(candidates.prompts)}"
        )
        advice = f"{meaning}this score chose the prompt, so evaluate it on other examples:"
        lines += [(result, "bold"), (advice, "dim")]
    for cause, times in failures.most_common(_MOST_CAUSES):
        shown = strip_escapes(cause)[:_LONGEST_CAUSE]
        lines.append((f"! {times} rollouts could not be scored: {shown}", "red"))
    if best:
        lines += [(f"  {line}", "") for line in commands(run_folder, overrides, choices, count)]
    files = f"{PROMPT}, results.jsonl, pareto_frontier.jsonl, metadata.json, rollouts.jsonl"
    lines.append((f"{run_folder}/  {files}", "dim"))
    return Group(*(Text(text, style) for text, style in lines))


def commands(
    run_folder: RunFolder, overrides: Sequence[str], choices: Mapping[str, str], num_seen: int
) -> list[str]:
    """Return the commands that evaluate the prompt and, unless client=messages, train with it.

    `num_seen`: the number of validation examples. They are the first examples of the evaluation.
    """
    kept = [item for item in overrides if _is_of_policy(item)]
    chosen = {key_of(item) for item in kept}
    # Always in the command, because an experiment may have chosen them.
    groups = [f"{g}={choices[g]}" for g in ("env", "model") if g in choices and g not in chosen]
    prompt = f"env.system_prompt={run_folder.path / PROMPT}"
    more = f"num_examples={num_seen * _MORE}"
    remote = choices.get("client") == "messages"
    if remote:
        groups = [group for group in groups if not group.startswith("model=")]
    lines = [shlex.join(["python", "evaluate.py", *groups, *kept, prompt, more])]
    if not remote:  # a remote server returns no tokens to train on
        kept = [item for item in kept if key_of(item) != "adapter_path"]
        lines.append(shlex.join(["python", "train.py", *groups, *kept, prompt]))
    return lines


def _is_of_policy(override: str) -> bool:
    key = key_of(override)
    named = key.partition("@")[0].partition(".")[0]
    return named in (*_POLICY, "adapter_path") and key != "env.system_prompt"
