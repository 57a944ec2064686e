"""Sweeps: resumable jobs, cores and GPUs for parallel jobs, and printed progress."""
