"""Variants of attention over FP8 pages, for one run on a card to judge: gpu_codes times them beside what is served.

A scale of a token and head may multiply scores and weights, as served, or the token's numbers as they are widened
("operand"). Each thread of a prompt's tile has the scores of all keys, and so loads all keys' scales in each round (36
copies and 18 loads of 894 instructions on sm_90, 242 registers); it widens the numbers of few keys, and loads as few
scales (661 instructions, 172 registers; e5m2, without scales: 624, 158). It is exact, and has the bits of what is
served, where scales are powers of two; a float's code loses no digit by such a scale. Others are rounded to bfloat16.

Decode is one warp to a program, of some 1,600 instructions for 32 keys, so what they wait for is hidden by other
programs of the unit alone. LAUNCHES are other numbers of parts and programs for a unit, and of stages.

A variant is made of the engine's text, so it is what is served but for the lines below; a text that has changed fails.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import engine.kernels.attention
from engine.kernels.attention import decode as served

TUNED = served.tuned
FOLDER = Path(engine.kernels.attention.__file__).parent
SCALES = "tl.load(k_scale + factor)[{0}], tl.load(v_scale + factor)[{0}]"
WIDENED = "keys, values = widen8(keys, query.dtype, CODES), widen8(values, query.dtype, CODES)\n"
TIMES = "keys, values = keys * key_scale.to(query.dtype), values * value_scale.to(query.dtype)\n"
ON_NUMBERS = (
    (SCALES.format("None, :"), SCALES.format(":, None")),
    *((f"if k_scale is not None:\n            {name} =", f"if k_scale is not None and not MADE:\n            {name} =")
      for name in ("score", "weight")),
)  # fmt: skip
OPERAND = (*ON_NUMBERS, (WIDENED, f"{WIDENED}        if MADE:\n            {TIMES}"))
TEXTS = {"operand": OPERAND}
# Name -> parts and programs of a unit, stages.
LAUNCHES = {"2 parts": (2, 4, 4), "4 parts": (4, 4, 4), "8 parts, 2 stages": (8, 8, 2), "12 parts": (12, 12, 2)}


@functools.cache
def attention(name: str) -> ModuleType:
    """engine.kernels.attention with the replacements of TEXTS[name]; its paged, decode and prefill are loaded."""
    package, root = f"attention_{name}", Path(tempfile.mkdtemp(prefix="attention-variant-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / package).mkdir()
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        for old, new in TEXTS[name] if path.name == "attend.py" else ():
            assert text.count(old) == 1, f"attend.py has another text than {old!r}: bring the variant up to date"
            text = text.replace(old, new)
        (root / package / path.name).write_text(text.replace("engine.kernels.attention", package))
    sys.path.append(str(root))
    found = importlib.import_module(package)
    for part in ("paged", "decode", "prefill"):
        importlib.import_module(f"{package}.{part}")
    return found


def launched(name: str) -> Callable[..., object]:
    """`tuned` of the decode kernel with the launch LAUNCHES[name]."""
    _, share, stages = LAUNCHES[name]

    def tuned(*given: object) -> tuple[int, int, dict[str, int]]:
        _, lead, options = TUNED(*given)
        return share, lead, {**options, "num_stages": stages}

    return tuned
