"""Host memory as the kernel counts it: this process's limit, its use, and the memory still available.

Owner: none; each call reads files of /proc and of cgroups (tens of microseconds). A container's limit is the lowest
limit of its cgroup and the groups above it, in version 2 or 1 of cgroups; without any, the machine's memory is the
limit. Page cache counts as free, because the kernel drops it before it ends a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 writes a number near 2^63
# For version 2 and version 1: the files of limit and use, and the names of the page cache's sizes in memory.stat.
FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def memory_limit(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that this process may use before the kernel ends a process."""
    return min([machine_memory(proc), *(limit for limit, _ in _limits(proc, groups))])


def available_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that can be allocated without swapping: MemAvailable, within the cgroups' limits."""
    free = _lines(proc / "meminfo").get("MemAvailable:", machine_memory(proc) // 2)
    return max(0, min([free, *(limit - used for limit, used in _limits(proc, groups))]))


def machine_memory(proc: Path = PROC) -> int:
    """Bytes of memory of the machine."""
    return _lines(proc / "meminfo").get("MemTotal:") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_memory(pids: tuple[int, ...] = (), proc: Path = PROC) -> int:
    """Bytes of this process and of processes `pids` that the kernel cannot drop: all pages but pages of files."""
    total = 0
    for name in ("self", *map(str, pids)):
        held = _lines(proc / name / "status")
        total += held.get("RssAnon:", 0) + held.get("RssShmem:", 0)
    return total


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(limit, use without page cache) of each cgroup above this process that has a limit."""
    for controller, group in _groups(proc):
        limit_name, used_name, cached = FILES[controller]
        # Inside a container the process's own group may be mounted as the root, whatever its path is.
        for folder in (groups / controller, groups / "unified") if not controller else (groups / controller,):
            for place in (group, *group.parents):
                found = folder / str(place).lstrip("/")
                limit = _number(found / limit_name)
                if limit is not None and limit < UNLIMITED:
                    held = _lines(found / "memory.stat", unit=1)
                    used = (_number(found / used_name) or 0) - sum(held.get(name, 0) for name in cached)
                    yield limit, max(used, 0)


def _groups(proc: Path) -> Iterator[tuple[str, Path]]:
    """(controller, path) of the cgroups that count this process's memory; "" is version 2."""
    try:
        text = (proc / "self" / "cgroup").read_text()
    except OSError:
        return
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield "", Path(path)
        elif "memory" in controllers.split(","):
            yield "memory", Path(path)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _lines(path: Path, unit: int = 1024) -> dict[str, int]:
    """First word of each line -> the number after it, times `unit`; /proc counts in KiB."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) * unit for line in words if len(line) > 1 and line[1].isdigit()}
