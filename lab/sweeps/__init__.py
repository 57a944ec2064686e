"""Run the jobs of a sweep: resume them, assign cores and GPUs, and print the progress."""
