"""Call a run's components to learn facts about them, such as the inputs that the loss reads.

    configurations (pickle) -> import the targets, call them with made-up values -> facts (JSON)

child.py runs this module in a process of its own. The module calls no logger, and no `score` or
`reply` of an environment, because they may use a judge, a sandbox or the internet.
"""

import json
import os
import pickle
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envs.user_code import is_library
from rl.config.learned import Learned
from rl.config.schema import ConfigError, Run
from rl.dry_call.report import Report, unwrap
from rl.runtime.files import write_atomically

LIMIT_S = 60
Config = Mapping[str, Any]


def learn(config: Config) -> Learned:
    """Call the components and return the facts. Raise ConfigError if a component is unusable."""
    from rl.config.build import build, component
    from rl.dry_call import examples, rewards, tensors

    report, facts = Report(), dict[str, Any]()
    built = _build_components(report, config)
    if report.problems:
        raise ConfigError(report.problems)
    with report.calling("loss", built["loss"]):
        reads, corrects = tensors.check_loss(report, config["loss"], config["updates_per_batch"])
        facts |= {"loss_reads": sorted(reads), "loss_corrects": corrects}
    loss_module = sys.modules[unwrap(built["loss"]).__module__]
    facts["loss_weighs_sequences"] = bool(getattr(loss_module, "PER_SEQUENCE", False))
    facts["correction_is_neutral"] = tensors.check_correction(report, built["correction"])
    facts["divergence_is_linear"] = tensors.check_divergence(report, built["kl.estimator"])
    if "critic.estimator" in built:
        tensors.check_critic(report, built["critic.estimator"], built["critic.loss"])
    problems, read = examples.read_pools(config["env"])
    report.problems += problems
    pools = [pool for pool in read or () if len(pool.examples)]
    with report.calling("advantage", built["advantage"]):
        advantage, first = component(config["advantage"]), [pool.examples[0] for pool in pools[:1]]
        facts |= rewards.check_advantage(report, advantage, config["group_size"], *first)
    count = 5 if facts.get("advantage_by_token") else 1 + facts.get("advantage_by_turn", False)
    with report.calling("batch_credit", built["batch_credit"]):
        facts |= rewards.check_batch_credit(report, component(config["batch_credit"]), count)
    facts |= rewards.check_aggregation(report, built["aggregation"])
    with report.calling("reward", built["reward"]):
        shaping, longest = built["reward"](), config["max_seq_len"]
        facts |= rewards.check_truncation(report, built["truncation"], shaping, longest)
    sampler = config["sampler"]
    count = config["batch_size"] // config["group_size"]
    examples.check_buffer(report, config["buffer"], count, sampler.get("max_staleness") or 0)
    if pools:
        examples.check_order(report, config["order"], pools)
    examples.check_strategy(report, config["strategy"], config["group_size"], config["env"], pools)
    facts["selects_examples"] = examples.selects_by_rewards(config)
    examples.check_methods(report, unwrap(build(config["env"])))
    if report.problems:
        raise ConfigError(report.problems)
    return Learned(**facts)


def run_with_facts(config: Config) -> Run:
    """Return the run with facts that `learn` finds in this process, for benchmarks and tests."""
    return Run.of({**config, "learned": asdict(learn(config))})


def _build_components(report: Report, config: Config) -> dict[str, Any]:
    from rl.config.build import build

    algorithm = ("loss", "correction", "advantage", "batch_credit", "aggregation")
    called = {group: config[group] for group in (*algorithm, "truncation", "reward")}
    called["kl.estimator"] = config["kl"]["estimator"]
    if "estimator" in config["critic"]:
        called |= {f"critic.{name}": config["critic"][name] for name in ("estimator", "loss")}
    # Build `others` only to report errors. Skip targets in rl/: they are tested and import slowly.
    others = (
        *("env", "order", "strategy", "buffer", "client"),
        *("logger", "optim", "reference", "critic"),
    )
    nodes = {g: config[g] for g in others if not config[g]["_target_"].startswith("rl.")} | called
    built = {}
    for group, node in nodes.items():
        try:
            built[group] = build(node)
        except (ValueError, LookupError) as error:
            report.problems.append(f"{group}: {error}")
    return built


def own_files(configs: Sequence[Config]) -> list[str]:
    """Return the source files of the targets and of all imported modules except libraries."""
    targets = set(re.findall(r"'_target_': '([\w.]+)\.\w+'", repr(configs)))
    files = {name: getattr(m, "__file__", None) for name, m in list(sys.modules.items())}
    chosen = {file for name, file in files.items() if file and name in targets}
    return sorted(chosen | {file for file in files.values() if file and not is_library(file)})


def _make_answer(config: Config) -> dict[str, Any]:
    from rl.dry_call import examples

    # After LIMIT_S, repeat the alarm each second, because `Report.calling` catches the error.
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 1.0)
    try:
        _, pools = examples.read_pools(config["env"])
        return {"learned": asdict(learn(config)), "read_env": pools is not None}
    except ConfigError as error:
        return {"problems": error.problems}
    except Exception as error:  # noqa: BLE001 answer for the other configurations too
        return {"problems": [f"the dry call raised {type(error).__name__}: {error}"]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(*_: object) -> None:
    raise TimeoutError(f"a configuration's dry call took over {LIMIT_S} s: make components faster")


def main(configs: Sequence[Config], answer_file: Path) -> None:
    from rl.dry_call import tensors  # noqa: F401 import torch before the time limit starts

    signal.signal(signal.SIGALRM, _raise_timeout)
    answers = list[dict[str, Any]]()
    for config in configs:
        answers.append(_make_answer(config))
        # Write each answer at once, because a later configuration may end this process.
        write_atomically(answer_file, json.dumps([answers, own_files(configs)]))


if __name__ == "__main__":
    # Add the working folder, which python -P omits from sys.path, because users import from it.
    sys.path.append(os.getcwd())
    main(pickle.load(sys.stdin.buffer), Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # do not wait for an environment's thread that still loads data
