"""The hub of models: asked once whether it answers, before its own client asks for files.

That client asks again and again for half a minute, and waits for ever on a connection that hangs.
"""

import httpx
from huggingface_hub import constants


def hub_problem() -> str | None:
    """Return why nothing can be fetched from the hub; None if it answers, whatever it says."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{constants.ENDPOINT} does not answer: {str(error) or type(error).__name__}"
    return None


def reason_of(error: Exception, problem: str | None) -> str:
    """Why nothing came: what `hub_problem` had found, else what the hub's client says."""
    return problem or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
