"""Confine the calling process, so that it can only compute and read Python's library.

    out of memory     the kernel ends this process before all other processes
    resource limits   limit memory; forbid core dumps, writes to files and child processes
    capabilities      are all dropped, even if the user is root
    Landlock          allows reading only libraries (`readable_paths`); forbids tracing
    seccomp           allows a list of system calls: no network, no child or thread, no exec,
                      no signal to other processes, no change to any file

No layer needs root, a namespace or a daemon, so all layers work in an unprivileged container and on
a laptop. Seccomp is required. Landlock (Linux 5.13 or newer) is required, too, unless
allow_without_landlock=true. Without Landlock, a Python audit hook limits reading to the same files.
The hook stops accidents, but not attacks: it does not see files that readline, sqlite3 or the C
library open.

This module imports only the standard library, because the sandbox starts without site-packages.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# Name, x86_64 number and aarch64 number of each allowed call. aarch64 does not have the calls of
# the last line. On x86_64, old C libraries make these calls.
ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, lseek 8 62, close 3 57,
    fstat 5 80, newfstatat 262 79, statx 332 291, getdents64 217 61, readlinkat 267 78,
    faccessat 269 48, faccessat2 439 439, getcwd 79 17, dup 32 23, dup3 292 24,
    pselect6 270 72, ppoll 271 73, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226,
    madvise 28 233, mincore 27 232, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135,
    rt_sigreturn 15 139, sigaltstack 131 132, futex 202 98, membarrier 324 283, rseq 334 293,
    set_robust_list 273 99, sched_yield 24 124, sched_getaffinity 204 123, getrandom 318 278,
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
    gettimeofday 96 169, times 100 153, getrusage 98 165, sysinfo 99 179, uname 63 160,
    getpid 39 172, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176,
    getegid 108 177, exit 60 93, exit_group 231 94,
    stat 4 -, lstat 6 -, access 21 -, readlink 89 -, poll 7 -, select 23 -, dup2 33 -
"""
MACHINES = {  # (column of ALLOWED, architecture number, numbers of calls with special rules)
    "x86_64": (1, 0xC000003E, {"openat": 257, "fcntl": 72, "ioctl": 16}),
    "aarch64": (2, 0xC00000B7, {"openat": 56, "fcntl": 25, "ioctl": 29}),
}
FCNTL = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC are allowed
OPEN_TO_CHANGE = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_ASYNC

# Instructions, return values and offsets of a classic BPF program, which seccomp runs.
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # byte offsets in struct seccomp_data

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers of Landlock's system calls
READ_FILE, READ_DIR = 4, 8
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of file rights by Landlock version (5 and newer: 16)

NO_LANDLOCK = (
    "this kernel has no Landlock (it needs Linux 5.13 or newer and must be switched on), so the "
    "policy could read your files: use another machine, or set allow_without_landlock=true in "
    "the config section that contains memory_mb"
)

_libc = ctypes.CDLL(None, use_errno=True)


def _call_libc(function: str, *args: object) -> int:
    result = getattr(_libc, function)(*args)
    if result < 0:
        code = ctypes.get_errno()
        called = f"system call {args[0]}" if function == "syscall" else function
        raise OSError(code, f"{called}: {os.strerror(code)}")
    return result


def limit_resources(memory_mb: int) -> None:
    """Limit address space to `memory_mb` MiB. Forbid core dumps, file writes and new processes."""
    limits = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_NOFILE: 64,
        **dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC), 0),
    }
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def readable_paths(packages: Sequence[str]) -> list[str]:
    """Return the paths that code may read: Python's library, system libraries and `packages`."""
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"]
    python = [sysconfig.get_path("stdlib"), os.path.join(sys.base_prefix, "lib")]
    paths = [*python, *system, "/etc/ld.so.cache", *packages]
    return sorted({os.path.realpath(path) for path in paths if os.path.exists(path)})


def drop_capabilities() -> None:
    """Drop all capabilities irreversibly, and set no_new_privs."""
    _call_libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _call_libc("capset", header, no_capabilities)


def apply_landlock(paths: Sequence[str]) -> bool:
    """Forbid file access, except reading `paths`. Return False if Landlock is unavailable."""
    try:
        version = _call_libc("syscall", CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return False
        raise
    # Forbid all file rights that this Landlock version knows. The loop then allows reading `paths`.
    forbidden = struct.pack("Q", (1 << RIGHTS.get(version, 16)) - 1)
    ruleset = _call_libc("syscall", CREATE_RULESET, forbidden, ctypes.c_size_t(8), 0)
    for path in paths:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        _call_libc("syscall", ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    _call_libc("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return True


def restrict_reading(paths: Sequence[str]) -> None:
    """Install an audit hook in place of Landlock. It forbids ctypes and files outside `paths`."""
    roots = tuple(f"{path.rstrip('/')}/" for path in paths)
    realpath, fsdecode, startswith = os.path.realpath, os.fsdecode, str.startswith

    def refuse_access(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith("ctypes."):
            raise PermissionError("ctypes is not available in the sandbox")
        if event in ("open", "os.listdir", "os.scandir") and not isinstance(args[0], int):
            path = realpath(fsdecode(args[0] or "."))
            if not startswith(path + "/", roots):
                raise PermissionError(errno.EACCES, "Permission denied", path)

    sys.addaudithook(refuse_access)


def _seccomp_program(machine: str) -> bytes:
    column, architecture, restricted = MACHINES[machine]
    numbers = [row.split()[column] for row in ALLOWED.split(",")]
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        # Kill the process at a call of another architecture, because its call numbers differ.
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    for number in numbers:
        if number != "-":
            steps += [(EQUAL, 0, 1, int(number)), (RETURN, 0, 0, ALLOW)]
    # Refuse ioctl with ENOTTY. Python calls ioctl for every file that it opens, and expects this
    # error for regular files.
    steps += [(EQUAL, 0, 1, restricted["ioctl"]), (RETURN, 0, 0, REFUSE | errno.ENOTTY)]
    # Allow openat for reading only. Landlock checks the path, which a seccomp filter cannot read.
    steps += [
        (EQUAL, 0, 4, restricted["openat"]),
        (LOAD, 0, 0, ARGUMENTS + 8 * 2),  # the flags of openat
        (ANY_BIT, 0, 1, OPEN_TO_CHANGE),
        (RETURN, 0, 0, REFUSE | errno.EACCES),
        (RETURN, 0, 0, ALLOW),
    ]
    steps += [(EQUAL, 0, 2 + 2 * len(FCNTL), restricted["fcntl"]), (LOAD, 0, 0, ARGUMENTS + 8)]
    for command in FCNTL:
        steps += [(EQUAL, 0, 1, command), (RETURN, 0, 0, ALLOW)]
    # A refused fcntl command reaches the first `refuse`. Other refused calls jump to the second.
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, refuse, refuse])


def apply_seccomp() -> None:
    """Install the filter of system calls, which nothing can remove. Raise OSError if this fails."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(f"the sandbox supports {' and '.join(MACHINES)}, but not {machine}")
    program = _seccomp_program(machine)
    code = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _call_libc("prctl", PR_SET_SECCOMP, 2, pointer, 0, 0)


def confine(*, memory_mb: int, packages: Sequence[str], allow_without_landlock: bool) -> None:
    """Apply all restrictions in the necessary order. Raise OSError if a required one fails."""
    # Make the kernel kill this process when the thread that started it ends.
    _call_libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Make the kernel end this process first if memory runs out. This needs a writable /proc.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    limit_resources(memory_mb)
    drop_capabilities()  # also sets no_new_privs, which the next layers need
    paths = readable_paths(packages)
    landlocked = apply_landlock(paths)
    if not landlocked and not allow_without_landlock:
        raise OSError(NO_LANDLOCK)
    apply_seccomp()  # must follow Landlock, because the filter refuses Landlock's calls
    if not landlocked:
        restrict_reading(paths)  # last, because it disables ctypes, which the other layers use
