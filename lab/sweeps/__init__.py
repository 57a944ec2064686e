"""Sweeps: resumable jobs, cores and GPUs for parallel jobs, and their progress in lines."""
