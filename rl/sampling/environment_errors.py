"""Convert an exception of an environment's code into a one-line error with its file and line."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from envs.protocol import Environment
from envs.user_code import format_location
from rl.inference.completion import GenerationError


class EnvironmentFailed(Exception):
    """Error in an environment's own code. The message is one line, with file and line."""


@contextmanager
def as_environment_error(env: Environment, method: str) -> Iterator[None]:
    """Convert exceptions to EnvironmentFailed, except server errors and the task's cancellation."""
    try:
        yield
    except GenerationError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # user code may raise anything
        # If the player's task is not being cancelled, the environment cancelled a task of its own.
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        text = " ".join(str(error).split())[:300]
        text = f"{type(error).__name__}: {text}{format_location(error, type(env).__module__)}"
        raise EnvironmentFailed(f"{type(env).__name__}.{method} raised {text}") from error
