"""Ask the hub of models once whether it answers, before its own client asks for files.

That client retries for half a minute, and waits for ever if a connection hangs.
"""

import httpx
from huggingface_hub import constants


def hub_problem() -> str | None:
    """Return why the hub cannot be reached; None if it answers, even with an error."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{constants.ENDPOINT} does not answer: {str(error) or type(error).__name__}"
    return None


def reason_of(error: Exception, problem: str | None) -> str:
    """Return what `hub_problem` has found, else the error of the hub's client."""
    return problem or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
