"""Sample rollouts of an evaluation as one HTML page that needs nothing from outside.

For each environment the worst, the median and the best rollouts, of different examples. Everything
that anybody said is escaped, whatever its shape: a rollout may well contain HTML, and messages of
other people's servers and environments anything. Should something slip through, the page's policy
lets nothing be run or loaded.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rl.evaluation.summary import Played, Summary
from rl.evaluation.table import measured
from rl.records import Rollout
from rl.run.json_lines import plain

_EACH = 3  # rollouts of a kind
_LONGEST_INFO = 500  # characters of what is known of an example
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; } td { padding: .1rem 1.5rem .1rem 0; }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
td + td.long { text-align: left; overflow-wrap: anywhere; }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .6rem 0; }
details { padding: .5rem 1rem; }
summary { cursor: pointer; } summary b { font-variant-numeric: tabular-nums; }
.message { border-left: .3rem solid var(--role); padding: .2rem .8rem; margin: .6rem 0; }
.role { color: var(--role); font-size: .8rem; font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; }
pre { font: 13px/1.45 ui-monospace, monospace; }
.system { --role: #8b8b8b; } .user { --role: #2f7fd6; } .assistant { --role: #2d9d58; }
.tool { --role: #c07a1c; } .other { --role: #9a5bc4; }
.call { background: #c07a1c1a; border-radius: .3rem; padding: .3rem .6rem; }
.thinking { color: var(--quiet); font-style: italic; }
.quiet { color: var(--quiet); } .error { color: #cc3b3b; }
"""


def page(title: str, played: Sequence[Played], summary: Summary, facts: Mapping[str, str]) -> str:
    """Return the whole page; `facts` say by name what was evaluated, and how."""
    by_env: dict[str, list[tuple[Played, Rollout]]] = defaultdict(list)
    for one in played:
        by_env[one.example.env] += [(one, rollout) for rollout in one.rollouts]
    body = [f"<h1>{escape(title)}</h1>", *_numbers(summary, facts)]
    for name, pairs in by_env.items():
        body.append(f"<h2>{escape(name)}</h2>")
        for kind, chosen in _samples(pairs).items():
            if chosen:
                body.append(f"<h3>{kind}</h3>")
                body += [_rollout(one, rollout) for one, rollout in chosen]
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
    return re.sub("[\ud800-\udfff]", "\ufffd", text)  # halves of a pair, which no file can hold


def _numbers(summary: Summary, facts: Mapping[str, str]) -> Iterator[str]:
    rows = {
        "reward": f"{summary.reward:.3f} ± {summary.reward_standard_error:.3f}",
        **{f"pass@{k}": f"{share:.1%}" for k, share in summary.passes.items()},
        "examples": str(summary.num_examples),
        "rollouts": str(summary.num_rollouts),
        "mean length": f"{summary.mean_length:.1f} tokens",
    }
    yield "<table>"
    for label, text in facts.items():
        yield f'<tr><td>{escape(label)}</td><td class="long">{escape(text)}</td></tr>'
    for label, text in rows.items():
        yield f"<tr><td>{escape(label)}</td><td>{escape(measured(text))}</td></tr>"
    yield "</table>"


Pair = tuple[Played, Rollout]


def _samples(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Return rollouts by kind, none of them twice; of one kind no two of the same example."""
    failed = [pair for pair in pairs if pair[1].reward is None]
    scored = sorted((p for p in pairs if p[1].reward is not None), key=lambda p: p[1].reward or 0.0)
    if len(scored) <= 3 * _EACH:
        return {"all, the worst first": scored, "not scored": failed[:_EACH]}
    worst = _different(scored)
    best = _different([p for p in reversed(scored) if p not in worst])
    start = (len(scored) - _EACH) // 2
    middle = [p for p in scored[start:] + scored[:start][::-1] if p not in [*worst, *best]]
    median = _different(middle)
    median.sort(key=lambda p: p[1].reward or 0.0)
    return {"worst": worst, "median": median, "best": best, "not scored": failed[:_EACH]}


def _different(pairs: Sequence[Pair]) -> list[Pair]:
    """The first few of different examples."""
    chosen: dict[int, Pair] = {}
    for played, rollout in pairs:
        chosen.setdefault(id(played), (played, rollout))
    return list(chosen.values())[:_EACH]


def _rollout(one: Played, rollout: Rollout) -> str:
    reward = "not scored" if rollout.reward is None else f"reward {rollout.reward:.3f}"
    named = ", ".join(f"{name} {value:.3f}" for name, value in rollout.rewards.items())
    facts = [
        f"example {one.example.id}",
        f"stopped: {rollout.stop_reason}",
        f"{rollout.num_completion} tokens",
        *([f"{rollout.turns} turns"] if rollout.turns > 1 else []),
        *([f"tool calls: {rollout.tool_calls}"] if rollout.tool_calls else []),
        *([named] if named else []),
    ]
    error = f'<p class="error">{escape(rollout.error)}</p>' if rollout.error else ""
    messages = "".join(map(_message, rollout.messages))
    return (
        f"<details open><summary><b>{escape(reward)}</b> "
        f'<span class="quiet">{escape(" · ".join(facts))}</span></summary>'
        f"{_known(one.example.info)}{error}{messages}</details>"
    )


def _known(info: Mapping[str, Any]) -> str:
    """What would have been right; where the environment names no answer, all that it knows."""
    if not info:
        return ""
    label = "right answer" if "answer" in info else "known of the example"
    text = _text(info["answer"] if "answer" in info else dict(info))[:_LONGEST_INFO]
    return f'<p class="quiet">{label}: {escape(text)}</p>'


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return f'<div class="message other"><pre>{escape(_text(message))}</pre></div>'
    role = _text(message.get("role", ""))
    style = role if role in ("system", "user", "assistant", "tool") else "other"
    parts = [f'<div class="role">{escape(role)}</div>']
    if thinking := message.get("reasoning_content"):
        parts.append(f'<pre class="thinking">{escape(_text(thinking))}</pre>')
    if content := message.get("content"):
        parts.append(f"<pre>{escape(_text(content))}</pre>")
    calls = message.get("tool_calls") or []
    parts += map(_call, calls if isinstance(calls, list) else [calls])
    return f'<div class="message {style}">{"".join(parts)}</div>'


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return f'<pre class="call">{escape(_text(call))}</pre>'
    name, arguments = _text(function.get("name")), _text(function.get("arguments", ""))
    problem = call.get("error")
    error = f'<span class="error"> {escape(_text(problem))}</span>' if problem else ""
    return f'<pre class="call">{escape(name)}({escape(arguments)}){error}</pre>'


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
