"""Package that assigns GPUs and CPU cores to a run's processes and estimates their memory."""
