"""A taskset that brings no harness."""

import verifiers.v1 as vf

__all__ = ["PlainTaskset"]


class PlainTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield vf.Task(vf.TaskData(prompt="hi"))
