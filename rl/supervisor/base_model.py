"""Find or build a run's base model, check it, and download reference models."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import httpx

from rl.config.build import build
from rl.config.facts import fact, needs_reference
from rl.config.limits import num_returned_tokens
from rl.config.rules import nodes_in
from rl.config.schema import ConfigError, Run, as_config_error
from rl.model.folder import fingerprint, vocabulary_of
from rl.model.pretrained import local_folder
from rl.runtime.folder import RunFolder

_CONNECT_S = 10.0


def model_of(run_folder: RunFolder, prepare: Callable[[], Path]) -> Path:
    """Return the local folder of the base model, which `prepare` builds or downloads.

    A resumed run uses the model of its first start, because its checkpoints fit no other model,
    such as a newer commit on the hub. Raise ConfigError if the model's content has changed.
    """
    is_resumed = bool(run_folder.complete_checkpoints())
    with as_config_error():
        before = run_folder.initial_model() if is_resumed else None
        expected = run_folder.model_fingerprint() if is_resumed else ""
    model = before if before and before.is_dir() else prepare()
    if expected and fingerprint(model) != expected:
        problem = (
            f"the weights, config, tokenizer or chat template in {model} differ from those with "
            f"which {run_folder} started, so its checkpoints do not fit: restore {before}, or set "
            "a new run_name"
        )
        raise ConfigError([problem])
    return model


def check_model(run: Run, model: Path) -> None:
    """Raise ConfigError if sampler.top_k or the chat format does not fit the model."""
    returned, size = num_returned_tokens(run.sampler), vocabulary_of(model)
    if size and returned > size:
        fits = num_returned_tokens({**run.sampler, "top_k": size // 2}) <= size
        remedy = f"top_k={size // 2} or less" if fits else "allow_biased_ratio=true"
        problem = (
            f"with sampler.top_k={run.sampler['top_k']} vLLM would return {returned} tokens at "
            f"each position, but the model has only {size}: set sampler.{remedy}"
        )
        raise ConfigError([problem])
    if run.model.path:
        # This imports `renderers`, which takes 0.5 s.
        from rl.model.tokenizer import chat_template, load_parser, load_renderer, parse_template

        renders = fact(run.client["_target_"], "renders", False) or not run.sampler.uses_vllm
        vllm_flags = run.inference.args or {}
        load = load_renderer if renders else load_parser
        with as_config_error():
            made = build(run.model)()
            load(model, made.renderer, made.renderer_options)
            if run.starts_vllm and not renders and "chat_template" not in vllm_flags:
                parse_template(chat_template(model))


def make_cache_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"the cache of warm starts, {folder}, is not writable ({error.strerror})"
        remedy = "set the environment variable OFFBYONE_CACHE to a writable folder"
        raise ConfigError([f"{problem}: {remedy}"]) from error


def fetch_references(run: Run) -> list[Path]:
    """Return the folders of reference models, downloaded if necessary, or raise ConfigError."""
    folders: list[Path] = []
    with as_config_error():
        for path, node in nodes_in(run.reference) if needs_reference(run.plain()) else ():
            if fact(node["_target_"], "same_tokens", False):
                folders.append(local_folder(node["path"], node["revision"], "reference"))
            # If the run spans hosts, this host may have no access to the teacher.
            elif fact(node["_target_"], "over_http", False) and not run.cluster.spans_hosts:
                _require_connection(f"reference{path}.url", node["url"])
    return folders


def _require_connection(key: str, url: str) -> None:
    try:
        httpx.get(url, timeout=_CONNECT_S)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, ImportError) as error:
        problem = f"{key}={url} cannot be reached ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}: start the server, or correct this URL") from error
    except httpx.HTTPError:  # the server is busy, which is no problem
        pass
