"""The last lines that a prompt search prints: its result and the commands that use the prompt."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lab.evaluation.table import dash_for_nan
from lab.prompts.outputs import PROMPT, Candidates
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import program
from rl.runtime.text import key_of, printable

# Keys of the policy and the environment. train.py has all of these keys except adapter_path.
_POLICY = ("env", "model", "sampler", "max_seq_len", "inference", "client", "adapter_path")
_MAX_CAUSES = 3
_LONGEST_CAUSE = 160  # maximum number of characters of an error text
_EVALUATION_FACTOR = 10  # the printed evaluate.py command uses this many times num_val examples


def closing_lines(
    candidates: Candidates,
    ended_by: str,
    failures: Counter[str],
    run_folder: RunFolder,
    overrides: Sequence[str],
    choices: Mapping[str, str],
) -> RenderableType:
    """Return the result of a prompt search, the commands to run next, and frequent errors."""
    best, count = candidates.best, len(candidates.scores[0])
    before, after = candidates.means[0], candidates.means[best]
    gain, error = candidates.gain()
    lines = [("", ""), (f"ended: {ended_by}, {candidates.num_calls} calls", "dim")]
    if best == 0:
        result = (
            f"none of {len(candidates.prompts)} prompts scored higher than the first: {before:.3f}"
        )
        lines.append((f"{result} on {count} validation examples", ""))
    else:
        gained = dash_for_nan(f"{gain:+.3f} ± {error:.3f}")  # `error` is NaN for one example
        result = f"validation score {before:.3f} -> {after:.3f} on {count} examples ({gained})"
        advice = "the prompt was chosen by this score, so evaluate it on other examples, too:"
        lines += [
            (f"{result}, prompt {best} of {len(candidates.prompts)}", "bold"),
            (advice, "dim"),
        ]
        commands = next_commands(run_folder, overrides, choices, count)
        lines += [(f"  {line}", "") for line in commands]
    for cause, times in failures.most_common(_MAX_CAUSES):
        shown = printable(cause)[:_LONGEST_CAUSE]
        lines.append((f"! {times} rollouts have no reward: {shown}", "red"))
    lines.append((f"{run_folder}/  {PROMPT}, results.jsonl, rollouts.jsonl", "dim"))
    return Group(*(Text(text, style) for text, style in lines))


def next_commands(
    run_folder: RunFolder, overrides: Sequence[str], choices: Mapping[str, str], num_seen: int
) -> list[str]:
    """Return the commands that evaluate the prompt and, unless client=messages, train with it.

    `num_seen`: number of validation examples, which are also the first evaluated examples.
    """
    remote = choices.get("client") == "messages"  # this client gets no token ids for training
    names = {item: key_of(item) for item in overrides}
    kept = [
        item
        for item, key in names.items()
        if key.partition("@")[0].partition(".")[0] in _POLICY and key != "env.system_prompt"
    ]
    # These choices may come from experiment=..., which is not in `kept`, so they are written out.
    groups = ["env"] if remote else ["env", "model"]
    chosen = [f"{g}={choices[g]}" for g in groups if g in choices and g not in names.values()]
    prompt = f"env.system_prompt={run_folder.path / PROMPT}"
    more = f"num_examples={num_seen * _EVALUATION_FACTOR}"
    lines = [[*program("evaluate"), *chosen, *kept, prompt, more]]
    if not remote:
        trained = [item for item in kept if names[item] != "adapter_path"]
        lines.append([*program("train"), *chosen, *trained, prompt])
    return [shlex.join(line) for line in lines]
