"""A stand-in for CUDA's runtime (runtime.c), compiled once per test session, and a launcher that uses the stand-in.

A `Rig` holds the records, ring buffers and graphs that the engine would make, all in host memory.
"""

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from _fast.launcher import Launcher
from _fast.layout import SLOT_WORDS, GraphKind, SlotWord, declarations, record_len
from _fast.params import SlotParams
from _fast.plan import StepPlan

GRAPH, COPY, RECORD, SYNC, QUERY, ELAPSED = range(6)
CALLS = (
    "GraphLaunch", "MemcpyAsync", "EventCreateWithFlags", "EventDestroy", "EventRecord", "EventQuery",
    "EventSynchronize", "EventElapsedTime", "GetErrorString",
)  # fmt: skip
BODIES = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@cache
def library() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="omniloop-runtime-"))
    path = folder / "libcudart.so.0"
    source = Path(__file__).with_name("runtime.c")
    names = re.findall(r"^    (\w+) = (-?\d+)$", declarations(), re.MULTILINE)
    (folder / "layout.h").write_text("enum { " + ", ".join(f"{name} = {value}" for name, value in names) + " };\n")
    subprocess.run(["cc", "-I", folder, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, source], check=True)
    loaded = ctypes.CDLL(str(path))
    atexit.register(shutil.rmtree, folder)  # other tests must not find the library, so its file is deleted
    for name in ("set_step_ns", "set_faulty_step"):
        getattr(loaded, name).argtypes = [ctypes.c_int64]
    loaded.set_bodies.argtypes = [BODIES]
    for name in ("get_fault", "get_num_events", "take_calls"):
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def addresses() -> dict[str, int]:
    return {name: ctypes.cast(getattr(library(), f"cuda{name}"), ctypes.c_void_p).value for name in CALLS}


def seed_words(slot: int, prompt_len: int, seed: int, most: int = 0) -> np.ndarray:
    """Words of a slot. `most`: maximal length, which the stand-in reads in place of a sampling parameter."""
    words = np.zeros(SLOT_WORDS, np.int32)
    words[[SlotWord.SLOT, SlotWord.PROMPT_LEN, SlotWord.SEED_LOW, SlotWord.TOP_K]] = slot, prompt_len, seed, most
    return words


class Rig:
    """Memory, graphs and a launcher for one scheduler's limits."""

    def __init__(
        self,
        rows,
        tokens,
        updates,
        max_slots,
        *,
        records=3,
        graphs=True,
        whole=True,
        width=1,
        run_width=0,
        rests=False,
    ):
        self.lib = library()
        size = record_len(rows, tokens, updates, run_width)
        self.records = [np.full(size, -99, np.int32) for _ in range(records)]
        self.ring = [np.full(rows * width, -77, np.int32) for _ in range(records)]
        self.plans = [
            StepPlan(rows, tokens, updates, record, k, width, run_width) for k, record in enumerate(self.records)
        ]
        self.params = SlotParams(max_slots)
        self.turn = np.full(1, records - 1, np.int32)  # the device's record index
        lines, places = ([array.ctypes.data for array in arrays] for arrays in (self.ring, self.records))
        pointers = [(ctypes.c_void_p * records)(*found) for found in (lines, places)]
        self.lib.setup(rows, tokens, *pointers, records, ctypes.c_void_p(self.turn.ctypes.data), width)
        self.launcher = Launcher(addresses(), 1, places, self.turn.ctypes.data, lines, rows)
        if graphs:
            self.set_graphs(rows, tokens, whole, rows * width if width > 1 else 0, rests)

    def set_graphs(self, rows, tokens, whole, lines=0, rests=False):
        """`rests`: variant 1 has drafts, and variant 0 has none."""
        plain = 100000 * rests
        self.launcher.set_graph(GraphKind.PREP, 0, 1, 1000)
        for size in sorted({1, 2, 4, *range(8, rows, 8), rows}, reverse=True):
            self.launcher.set_graph(GraphKind.DECODE, 0, size, 20000 + size)
            self.launcher.set_graph(GraphKind.SAMPLE, 0, size, 40000 + size + plain)
            if whole:
                self.launcher.set_graph(GraphKind.STEP, 0, size, 50000 + size + plain)
        for size in sorted(range(rows + 1, lines + 1) if not rests else (), reverse=True):
            self.launcher.set_graph(GraphKind.SAMPLE, 0, size, 40000 + size)
        if rests:  # the graphs of before are those without drafts
            for kind, handle in ((GraphKind.SAMPLE, 40000), *[(GraphKind.STEP, 50000)] * whole):
                for size in sorted({1, 2, 4, *range(8, rows, 8), rows, *range(rows + 1, lines + 1)}, reverse=True):
                    if size <= rows or kind == GraphKind.SAMPLE:
                        self.launcher.set_graph(kind, 1, size, handle + size)
        for size in sorted({*range(16, tokens, 16), tokens}, reverse=True):
            self.launcher.set_graph(GraphKind.MIXED, 0, size, 30000 + size)

    def take_calls(self) -> list[tuple[int, int]]:
        into = np.zeros((1 << 16, 2), np.int32)
        count = self.lib.take_calls(ctypes.c_void_p(into.ctypes.data), ctypes.c_int64(len(into)))
        return [tuple(line) for line in into[:count].tolist()]

    def draw(self, seed, place):
        return self.lib.draw(seed, place)

    @property
    def fault(self):
        """Bits for wrong numbers that the stand-in found in a step's record (runtime.c); 0: all numbers were right."""
        return self.lib.get_fault()
