"""Package of environments and their shared modules. It imports neither torch nor `rl`."""
