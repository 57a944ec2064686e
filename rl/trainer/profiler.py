"""Record the operations of some steps with torch.profiler (option trainer.profile)."""

from torch.profiler import profile, schedule

from rl.runtime.folder import RunFolder


def start_profiler(run_folder: RunFolder, rank: int, num_steps: int) -> profile | None:
    """Start a profiler that records `num_steps` steps after the first. Return None for 0 steps."""
    if not num_steps:
        return None

    def write(recorded: profile) -> None:
        path = run_folder.profile / f"rank{rank}.json.gz"
        path.parent.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(path))
        device = "cuda" if recorded.use_device == "cuda" else "cpu"
        table = recorded.key_averages().table(f"self_{device}_time_total", row_limit=30)
        path.with_name(f"rank{rank}.txt").write_text(table)

    once = schedule(wait=0, warmup=1, active=num_steps, repeat=1)
    profiler = profile(schedule=once, on_trace_ready=write)
    profiler.start()
    return profiler
