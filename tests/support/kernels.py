"""Another kernel, as a filter of system calls that a process lays on itself before it goes on.

python -m tests.support.kernels python train.py env=math-python      as if there were no Landlock
"""

import ctypes
import errno
import os
import struct
import sys

from envs.sandbox.confinement import ADD_RULE, CREATE_RULESET, PR_SET_SECCOMP, RESTRICT_SELF

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS = 38
# For the BOOT of a sandbox: its process lives on a kernel without Landlock.
FORGET_LANDLOCK = "from tests.support.kernels import forget_landlock; forget_landlock()"


def forget_landlock() -> None:
    """Landlock's calls are unknown from here on, in this process and all that it starts."""
    steps = [(LOAD, 0, 0, 0)]
    for number in (CREATE_RULESET, ADD_RULE, RESTRICT_SELF):
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    steps += [(RETURN, 0, 0, ALLOW)]
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    code = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, 2, pointer, 0, 0) == 0


if __name__ == "__main__":
    forget_landlock()
    os.execvp(sys.argv[1], sys.argv[1:])
