"""The assignment of devices and CPU cores to the processes of a run, and their estimated memory."""
