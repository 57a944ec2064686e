"""Converts exceptions of an environment's code into one line with the source location."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from envs.protocol import Environment
from envs.user_code import place_of
from rl.inference.completion import GenerationError

_MAX_ERROR_LENGTH = 300  # maximum number of characters of the original error text


class EnvironmentFailed(Exception):
    """Exception of an environment's own code; the message is one line with the location."""


@contextmanager
def as_environment_error(env: Environment, what: str) -> Iterator[None]:
    """Raise EnvironmentFailed if the block raises, except for cancellation and server errors."""
    try:
        yield
    except GenerationError:
        raise
    except asyncio.CancelledError as error:
        # If this task was not cancelled, the environment has cancelled one of its own tasks.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EnvironmentFailed(_explain(env, what, error)) from error
    except Exception as error:  # user code may raise anything
        raise EnvironmentFailed(_explain(env, what, error)) from error


def _explain(env: Environment, what: str, error: BaseException) -> str:
    text = " ".join(str(error).split())[:_MAX_ERROR_LENGTH]
    place = place_of(error, type(env).__module__)
    return f"{type(env).__name__}.{what} raised {type(error).__name__}: {text}{place}"
