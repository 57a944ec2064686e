"""How many files this process may have open: sockets, pipes, files; the usual limit is 1024."""

import resource

_MOST = 65_536  # tables of the kernel grow with it, and nobody needs more


def raise_open_files() -> int:
    """Raise the soft limit to the hard one, as everybody may; return how many files that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return open_files()


def open_files() -> int:
    """The soft limit of now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
