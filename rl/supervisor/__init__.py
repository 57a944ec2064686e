"""Package of the supervisor, which prepares a run, starts its processes and watches them."""
