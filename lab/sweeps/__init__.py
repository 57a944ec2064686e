"""Sweeps: resumable jobs, cores and GPUs for jobs that run at the same time, and their screen."""
