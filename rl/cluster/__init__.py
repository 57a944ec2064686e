"""Where the processes of a run are started: on this machine, on nodes of Ray, or by hand."""
