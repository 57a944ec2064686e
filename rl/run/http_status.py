"""Which answers of a server are worth asking again for."""

from http import HTTPStatus

_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # and all of 5xx


def may_pass(status: int) -> bool:
    """Whether the same request may do better later: the server is at fault, or too busy."""
    return status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR
