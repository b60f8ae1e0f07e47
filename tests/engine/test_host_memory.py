"""Memory limit and free memory of a process: both cgroup versions, parent groups, a container's own root (S44)."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.device.host_memory import available_memory, machine_memory, memory_limit, resident_memory

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
V1, V2 = "4:memory:/jobs/one\n2:cpu,cpuacct:/jobs\n0::/\n", "0::/jobs/one\n"


@pytest.fixture
def kernel(tmp_path):
    """Files as the kernel writes them: kernel(lines of /proc/self/cgroup, {path below cgroup: text})."""

    def make(groups: str, files: dict[str, str]) -> tuple[Path, Path]:
        for path, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        for path, text in files.items():
            (tmp_path / "cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "cgroup" / path).write_text(f"{text}\n")
        return tmp_path / "proc", tmp_path / "cgroup"

    return make


def v2(folder: str, limit: object, used: int = 0, cached: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cached}\nactive_file 0\n"
    return {f"{folder}memory.max": str(limit), f"{folder}memory.current": str(used), f"{folder}memory.stat": stat}


def v1(folder: str, limit: int, used: int = 0) -> dict[str, str]:
    return {f"memory/{folder}memory.limit_in_bytes": str(limit), f"memory/{folder}memory.usage_in_bytes": str(used)}


@pytest.mark.parametrize(
    ("groups", "files", "limit", "free"),
    [
        ("", {}, 16 * GIB, 8 * GIB),
        (V2, v2("jobs/one/", "max"), 16 * GIB, 8 * GIB),
        (V2, v2("jobs/one/", 4 * GIB, 3 * GIB), 4 * GIB, GIB),
        (V2, v2("jobs/one/", 4 * GIB, 3 * GIB, cached=2 * GIB), 4 * GIB, 3 * GIB),  # the kernel can drop cached pages
        (V2, {**v2("jobs/one/", "max"), **v2("jobs/", 2 * GIB, GIB)}, 2 * GIB, GIB),  # the limit of the parent group
        (V2, v2("", 3 * GIB, GIB), 3 * GIB, 2 * GIB),  # a container's own group is its root
        (V2, v2("unified/jobs/one/", 4 * GIB, 3 * GIB), 4 * GIB, GIB),
        (V1, v1("jobs/one/", 1 << 63, GIB), 16 * GIB, 8 * GIB),  # this number means "no limit" in version 1
        (V1, v1("jobs/one/", 4 * GIB, 5 * GIB), 4 * GIB, 0),
        (V1, v1("", 4 * GIB, GIB), 4 * GIB, 3 * GIB),
        (V1, {**v1("jobs/one/", 1 << 63), **v1("jobs/", 5 * GIB, GIB)}, 5 * GIB, 4 * GIB),
    ],
)
def test_s44_the_tightest_limit_holds(kernel, groups, files, limit, free):
    where = kernel(groups, files)
    assert memory_limit(*where) == limit
    assert available_memory(*where) == free


def test_s44_this_process_has_less_than_its_machine():
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * (len(held) >> 12)
    before = resident_memory()
    assert len(held) < before < memory_limit() <= machine_memory()
    del held
    assert resident_memory() < before
    assert resident_memory((2**22 + 1,)) < before  # no process has this number
