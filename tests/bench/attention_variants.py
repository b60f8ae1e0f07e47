"""Variants of attention over FP8 pages, for one run on a card to judge: gpu_codes times them beside what is served.

A scale of a token and head may multiply scores and weights, as served, or the token's numbers as they are widened. Each
thread of a prompt's tile has the scores of all keys, and so loads all keys' scales in each round (36 copies and 18
loads of 894 instructions on sm_90, 242 registers); it widens the numbers of few keys, and loads as few scales:

    operand   numbers times their scale after they were widened                       661 instructions, 172 registers
    folded    the scale inside the factor by which they are widened (E4M3_FOURS)      633, 174; e5m2, without: 624, 158

Both are exact, and have the bits of what is served, where scales are powers of two; a float's code loses no digit by
such a scale. Others are rounded to bfloat16 here.

Decode has one warp for each of an H100's schedulers, of some 1,600 instructions for 32 keys, so nothing hides what they
wait for. LAUNCHES are other numbers of programs on a unit, of warps and of stages; none changes a bit.

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
SCALED_FOURS = '''
SET = "odd, factor, zero; mov.b32 factor, 0x7b807b80;"
SCALED_FOURS = tl.constexpr(getattr(FOURS, "value", FOURS).replace(SET, "odd, zero;").replace("factor", "$3"))


@triton.jit
def scaled_fours(codes, scale):
    """widen8 in fours, times scale [keys, 1] float32, a power of two up to 2^7."""
    factor = (tl.zeros(codes.shape, tl.float32) + scale * 1.329227995784916e36).to(tl.bfloat16)  # 2^120
    return tl.inline_asm_elementwise(
        SCALED_FOURS, "=r,=r,r,r,r", [codes, factor], dtype=tl.bfloat16, is_pure=True, pack=4
    )


'''
FOLDED = (
    *ON_NUMBERS,
    ("from engine.kernels.float8 import widen8", "from engine.kernels.float8 import FOURS, widen8"),
    ("LOG2E = math.log2(math.e)\n", f"LOG2E = math.log2(math.e)\n{SCALED_FOURS}"),
    (f"        if CODES:\n            {WIDENED}", "        if MADE and CODES == 4:\n"
     "            keys, values = scaled_fours(keys, key_scale), scaled_fours(values, value_scale)\n"
     f"        elif CODES:\n            {WIDENED}            if MADE:\n                {TIMES}"),
)  # fmt: skip
TEXTS = {"operand": OPERAND, "folded": FOLDED}
# Name -> programs on a unit, warps, stages.
LAUNCHES = {"8 programs": (8, 1, 3), "2 warps": (4, 2, 4), "8 programs, 2 warps": (8, 2, 3)}


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
    share, warps, stages = LAUNCHES[name]

    def tuned(*given: object) -> tuple[int, int, dict[str, int]]:
        _, lead, _ = TUNED(*given)
        return share, lead, {"num_warps": warps, "num_stages": stages}

    return tuned
