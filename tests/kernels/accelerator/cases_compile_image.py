"""The picture kernels compile for every target."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.image import patches_kernel, planes_kernel
from tests.kernels.accelerator.targets import cases, compiles

SIZES = ("height", "width", "new_height", "new_width", "taps")
PLANES = {"planes": "*u8", "pixels": "*u8", "table": "*i32", **dict.fromkeys(SIZES, "i32")}
NORMAL = [f"{colour}_{what}" for what in ("scale", "shift") for colour in ("red", "green", "blue")]
PATCHES = {
    "planes": "*u8", "table": "*i32", "frames": "i32", **dict.fromkeys(SIZES, "i32"), **dict.fromkeys(NORMAL, "fp32")
}  # fmt: skip
CUT = {"PATCH": 14, "MERGE": 2, "TEMPORAL": 2}
KERNELS = {
    **{
        f"planes, rows {rows}": (planes_kernel, PLANES, {"ROWS": rows, "BLOCK": 256, "OVERLAP": True})
        for rows in (False, True)
    },
    **{
        f"{dtype} patches, rows {rows}": (
            patches_kernel, {"patches": f"*{dtype}", **PATCHES}, {"ROWS": rows, **CUT, "BLOCK": 256, "OVERLAP": True}
        )
        for dtype in ("bf16", "fp32")
        for rows in (False, True)
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name], {"num_warps": 4})
