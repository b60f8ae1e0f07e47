"""Fence: restrictions that a helper sets up for itself before it reads a client's bytes. Linux.

One thread, at start. The helper dies with its server. Its memory, descriptors, files and the processor time of each
file are bounded, and it writes no core dump. A filter of system calls (seccomp, which needs no privileges) refuses
sockets, programs, new processes, access to other processes, signals to them and changes of their limits, and files
except for reading. If the kernel does not support such a filter, or the processor is neither x86-64 nor arm64, the
helper runs without the filter and reports this to its server. Landlock (Linux 5.13) closes /proc, where the server's
memory and environment, which may hold keys, are visible: for helpers of an ordinary user; if the user is root, the
environment stays readable.

Numbers of system calls: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. The form
of the filter: Documentation/userspace-api/seccomp_filter.rst. Landlock: Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # 13: EACCES, 38: ENOSYS
_ALLOW, _REFUSE, _UNKNOWN, _KILL = 0x7FFF0000, 0x00050000 | 13, 0x00050000 | 38, 0x80000000  # 13: EACCES, 38: ENOSYS
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC  # flags that open a file for more than reading
_CLONE_THREAD = 0x10000
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # system calls of Landlock, equal on every processor
_CHANGES = 0x1FF3  # all rights of Landlock's first version except reading files and folders
_MOST_FILES = 64


@dataclass(frozen=True, slots=True)
class Calls:
    """Numbers of system calls on one kind of processor."""

    architecture: int  # the kernel's number for filters
    seccomp: int
    opening: tuple[tuple[int, int], ...]  # open, openat: (number, index of the argument with the flags)
    own: tuple[int, ...]  # tgkill, prlimit64: allowed only on the helper itself
    clone: int  # allowed for threads
    clone3: int  # fails with ENOSYS, so that the C library calls clone: a filter cannot read the flags of clone3
    refused: tuple[int, ...]


# socket socketpair connect bind listen accept accept4, execve execveat ptrace process_vm_readv process_vm_writev kill
# tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd, unshare setns mount umount2 bpf
# perf_event_open userfaultfd io_uring_setup keyctl, unlinkat renameat renameat2 mkdirat linkat symlinkat mknodat fchmod
# fchmodat fchmodat2 fchown fchownat setxattr lsetxattr fsetxattr truncate openat2, and of x86-64 fork vfork creat
# unlink rename mkdir rmdir link symlink mknod chmod chown lchown
_CALLS = {
    "x86_64": Calls(
        0xC000003E, 317, ((2, 1), (257, 2)), (234, 302), 56, 435,
        (41, 53, 42, 49, 50, 43, 288, 59, 322, 101, 310, 311, 62, 200, 129, 297, 434, 424, 438, 272, 308, 165, 166, 321,
         298, 323, 425, 250, 263, 264, 316, 258, 265, 266, 259, 91, 268, 452, 93, 260, 188, 189, 190, 76, 437, 57, 58,
         85, 87, 82, 83, 84, 86, 88, 133, 90, 92, 94),
    ),
    "aarch64": Calls(
        0xC00000B7, 277, ((56, 2),), (131, 261), 220, 435,
        (198, 199, 203, 200, 201, 202, 242, 221, 281, 117, 270, 271, 129, 130, 138, 240, 434, 424, 438, 97, 268, 40, 39,
         280, 241, 282, 425, 219, 35, 38, 276, 34, 37, 36, 33, 52, 53, 452, 55, 54, 5, 6, 7, 45, 437),
    ),
}  # fmt: skip
_OTHER_ABI = 0x40000000  # x32's numbers on x86-64


def die_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends, for any reason; exit at once if it has ended
    already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent by a terminal or a service manager: the server decides
        signal.signal(number, signal.SIG_IGN)


def stand_apart() -> bool:
    """Restrict this thread and its future threads with Landlock: they cannot change files or inspect processes. Returns
    whether this succeeded.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    rights = ctypes.create_string_buffer(struct.pack("Q", _CHANGES), 8)
    ruleset = libc.syscall(_CREATE_RULESET, rights, ctypes.c_size_t(8), 0)
    if ruleset < 0 or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    try:
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def set_limits(memory_bytes: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, memory_bytes),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def allow_seconds(seconds: float) -> None:
    """Limit the processor time from now on, summed over all threads; the kernel kills the process beyond the limit."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used + seconds * (os.cpu_count() or 1)) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def refuse_calls() -> bool:
    """Install the filter of system calls for all threads. Returns whether this succeeded."""
    calls = _CALLS.get(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    if calls is None or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    program = filter_of(calls, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    return bool(libc.syscall(calls.seccomp, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(header)) == 0)


def filter_of(calls: Calls, process: int) -> bytes:
    """The filter as a BPF program. An instruction has a code, two jumps (numbers of instructions to skip) and a
    word.
    """

    def instruction(code: int, word: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_so, if_not, word)

    steps = [
        instruction(_LOAD, _ARCHITECTURE_AT),
        instruction(_EQUAL, calls.architecture, 1),
        instruction(_RETURN, _KILL),
        instruction(_LOAD, _NUMBER_AT),
        instruction(_AT_LEAST, _OTHER_ABI, 0, 1),
        instruction(_RETURN, _REFUSE),
    ]
    for number, argument in calls.opening:
        steps += [
            instruction(_EQUAL, number, 0, 5),
            instruction(_LOAD, _ARGUMENTS_AT + 8 * argument),
            instruction(_AND, _WRITES),
            instruction(_EQUAL, 0, 1),
            instruction(_RETURN, _REFUSE),
            instruction(_RETURN, _ALLOW),
        ]
    for number in calls.own:
        steps += [
            instruction(_EQUAL, number, 0, 5),
            instruction(_LOAD, _ARGUMENTS_AT),
            instruction(_EQUAL, 0, 1, 0),
            instruction(_EQUAL, process, 0, 1),
            instruction(_RETURN, _ALLOW),
            instruction(_RETURN, _REFUSE),
        ]
    steps += [
        instruction(_EQUAL, calls.clone, 0, 5),
        instruction(_LOAD, _ARGUMENTS_AT),
        instruction(_AND, _CLONE_THREAD),
        instruction(_EQUAL, 0, 0, 1),
        instruction(_RETURN, _REFUSE),
        instruction(_RETURN, _ALLOW),
        instruction(_EQUAL, calls.clone3, 0, 1),
        instruction(_RETURN, _UNKNOWN),
    ]
    for number in calls.refused:
        steps += [instruction(_EQUAL, number, 0, 1), instruction(_RETURN, _REFUSE)]
    return b"".join([*steps, instruction(_RETURN, _ALLOW)])
