"""cublasLt's products with an algorithm chosen by the caller: y [M, N] = x [M, K] w [N, K]^T, optionally added.

Thread: any; a product holds only descriptors. torch asks the library for one algorithm and takes it. The library orders
its algorithms by undocumented rules; the second or eighth is often the fastest. The algorithms used here need no
workspace, so products of several streams share nothing.

The library is column-major: it sees y as [N, M] = w^T x, without any copy. Constants and structures are from its
header, cublasLt.h. The bytes of an algorithm may be saved and used again by the same version.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from ctypes import addressof, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.target import products_library

TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
FLOAT, COMPUTE_FLOAT = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
TRANSPOSE_A, TRANSPOSED = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
MOST_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
TILE, SWIZZLE, CLUSTER = (1, 4), (4, 4), (8, 2)  # CUBLASLT_ALGO_CONFIG_*: attribute number, size in bytes
SUGGESTIONS = 8  # algorithms requested from the library
VARIED = 2  # the first VARIED algorithms are also tried with other tiles, clusters and swizzles
# cublasLtMatmulTile_t, as outputs by rows: 64 x 128, 128 x 64, 128 x 128, 128 x 256, 256 x 128, 192 x 128, 128 x 192.
TILES = (17, 18, 20, 23, 24, 31, 32)
CLUSTERS = (3, 5)  # cublasLtClusterShape_t: two tiles of neighbouring outputs or rows share loads
SWIZZLES = (1, 2)  # orders of tiles, which decide which operand stays in the device's cache
MANY_ROWS = 1024  # from this number of rows on the order of tiles matters more than their size
ALIGNMENT = 16  # bytes; alignment of operands that loads by descriptors need


@dataclass(frozen=True, slots=True)
class Shape:
    """A product: x [rows, depth] times w [width, depth]^T; `added`: added to a tensor."""

    rows: int
    width: int
    depth: int
    added: bool
    dtype: torch.dtype


ALGORITHM_BYTES = 64


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * (ALGORITHM_BYTES // 8)),)


class _Suggestion(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


class RefusedError(RuntimeError):
    """The library refused a call."""


class Product:
    """A product of one shape with one algorithm, ready to launch."""

    __slots__ = ("_after", "_before", "_beta", "_launch", "_layouts", "_library", "algorithm")

    def __init__(self, library: Library, shape: Shape, algorithm: _Algorithm) -> None:
        self._layouts: tuple[c_void_p, ...] = ()
        self._library = library
        self.algorithm = algorithm
        self._layouts = library.layouts(shape)
        self._beta = c_float(shape.added)
        self._launch = library.calls.cublasLtMatmul
        self._before = library.handle.value, library.transposed.value, addressof(library.one)
        self._after = addressof(algorithm), None, 0

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None, out: torch.Tensor) -> None:
        """Launches out = x weight^T (+ added) on the current stream; operands must be contiguous, aligned, and of the
        shape."""
        w, rows, y = self._layouts
        target = out.data_ptr()
        code = self._launch(
            *self._before, weight.data_ptr(), w, x.data_ptr(), rows, addressof(self._beta),
            target if added is None else added.data_ptr(), y, target, y,
            *self._after, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        _check(code, "cublasLtMatmul")

    @property
    def fits(self) -> bool:
        """Whether the library can multiply so, without a workspace."""
        return self._library.fits(self.algorithm, *self._layouts)

    def __del__(self) -> None:
        for layout in self._layouts:
            self._library.calls.cublasLtMatrixLayoutDestroy(layout)


class Library:
    """The library that torch has loaded."""

    def __init__(self, path: str) -> None:
        self.calls: Any = ctypes.PyDLL(path)  # calls take microseconds; releasing the GIL would take longer
        self.calls.cublasLtGetVersion.restype = c_size_t
        self.version = int(self.calls.cublasLtGetVersion())
        self.handle, self.transposed, self._preference = c_void_p(), c_void_p(), c_void_p()
        self.one = c_float(1)
        calls = self.calls
        calls.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]  # plain ints convert fastest
        _check(calls.cublasLtCreate(byref(self.handle)), "cublasLtCreate")
        _check(calls.cublasLtMatmulDescCreate(byref(self.transposed), COMPUTE_FLOAT, FLOAT), "cublasLtMatmulDescCreate")
        way, none = c_int(TRANSPOSED), c_size_t(0)
        code = calls.cublasLtMatmulDescSetAttribute(self.transposed, TRANSPOSE_A, byref(way), c_size_t(4))
        _check(code, "cublasLtMatmulDescSetAttribute")
        _check(calls.cublasLtMatmulPreferenceCreate(byref(self._preference)), "cublasLtMatmulPreferenceCreate")
        code = calls.cublasLtMatmulPreferenceSetAttribute(self._preference, MOST_WORKSPACE, byref(none), c_size_t(8))
        _check(code, "cublasLtMatmulPreferenceSetAttribute")

    def layouts(self, shape: Shape) -> tuple[c_void_p, c_void_p, c_void_p]:
        """Layout descriptors of w, x and y; the caller must destroy them."""
        kind, made = TYPES[shape.dtype], []
        for inner, outer in ((shape.depth, shape.width), (shape.depth, shape.rows), (shape.width, shape.rows)):
            layout = c_void_p()
            code = self.calls.cublasLtMatrixLayoutCreate(
                byref(layout), kind, c_uint64(inner), c_uint64(outer), c_int64(inner)
            )
            _check(code, "cublasLtMatrixLayoutCreate")
            made.append(layout)
        return made[0], made[1], made[2]

    def algorithms(self, shape: Shape) -> list[bytes]:
        """The library's suggestions, in its order, then variations of the first ones with other tiles, clusters or
        orders."""
        found, count = (_Suggestion * SUGGESTIONS)(), c_int()
        w, x, y = self.layouts(shape)
        try:
            code = self.calls.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.transposed, w, x, y, y, self._preference, SUGGESTIONS, found, byref(count)
            )
            if code or not count.value:  # a shape that it has no algorithm for
                return []
            suggested = [bytes(one.algorithm) for one in found[: count.value] if not one.status]
            varied = [
                self._reordered(one) if shape.rows >= MANY_ROWS else self._recut(one) for one in suggested[:VARIED]
            ]
            others = [bytes(one) for one in itertools.chain(*varied) if self.fits(one, w, x, y)]
            return list(dict.fromkeys(suggested + others))
        finally:
            for layout in (w, x, y):
                self.calls.cublasLtMatrixLayoutDestroy(layout)

    def product(self, shape: Shape, algorithm: bytes) -> Product | None:
        """The product with an algorithm from `algorithms`, for this or a similar shape; None: not supported."""
        made = Product(self, shape, _Algorithm.from_buffer_copy(algorithm))
        return made if made.fits else None

    def _recut(self, algorithm: bytes) -> Iterator[_Algorithm]:
        for tile, cluster in itertools.product(TILES, CLUSTERS):
            made = _Algorithm.from_buffer_copy(algorithm)
            if self._set(made, TILE, tile) and self._set(made, CLUSTER, cluster):
                yield made

    def _reordered(self, algorithm: bytes) -> Iterator[_Algorithm]:
        for order in SWIZZLES:
            made = _Algorithm.from_buffer_copy(algorithm)
            if self._set(made, SWIZZLE, order):
                yield made

    def _set(self, algorithm: _Algorithm, attribute: tuple[int, int], value: int) -> bool:
        number, size = attribute
        chosen = c_uint64(value)
        code = self.calls.cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), number, byref(chosen), c_size_t(size))
        return not code

    def fits(self, algorithm: _Algorithm, w: c_void_p, x: c_void_p, y: c_void_p) -> bool:
        """Whether the library can multiply so, without a workspace."""
        answer = _Suggestion()
        code = self.calls.cublasLtMatmulAlgoCheck(
            self.handle, self.transposed, w, x, y, y, byref(algorithm), byref(answer)
        )
        return not code and not answer.workspace


def open_library() -> Library | None:
    """cublasLt; None: the device's vendor has no cublasLt."""
    path = products_library()
    return None if path is None else Library(path)


def _check(code: int, call: str) -> None:
    if code:
        raise RefusedError(f"{call} returned {code} (a cublasStatus_t), 0 is expected")
