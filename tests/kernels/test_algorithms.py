"""gemm/algorithms: what is timed, which algorithm wins, what is saved for the next start, when a choice is used.

The real library is tested in tests/kernels/test_on_device_algorithms. Here torch computes the products on a CPU, names
stand for algorithms, and the tests give their seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from engine.kernels.activation import Activation
from engine.kernels.gemm import algorithms, cublaslt
from engine.kernels.gemm.algorithms import GAIN, TORCHS, Algorithms, Kind, Saved, quickest
from engine.kernels.gemm.cublaslt import ALGORITHM_BYTES, RefusedError
from engine.kernels.gemm.dense import DenseWeight
from engine.kernels.gemm.dispatch import is_vendors
from engine.kernels.gemm.split_k import Split
from engine.kernels.target import products_library
from engine.step.sizes import long_sizes

WIDE = Kind(1024, 2048, False, False, torch.bfloat16)
A, B = b"a" * ALGORITHM_BYTES, b"b" * ALGORITHM_BYTES


@dataclass
class Named:
    """A library with two algorithms, A and B, that records its launches."""

    version: int = 1

    def __post_init__(self) -> None:
        self.launched: list[tuple[int, bytes]] = []
        self.asked: list[int] = []

    def algorithms(self, shape):
        self.asked.append(shape.rows)
        return [A, B]

    def product(self, shape, algorithm):
        def launch(x, weight, added, out):
            self.launched.append((shape.rows, algorithm))
            y = x.float() @ weight.float().t()
            out.copy_(y if added is None else added + y)

        return launch


@pytest.fixture
def library(monkeypatch, tmp_path):
    made = Named()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(algorithms, "COLD", 1)
    monkeypatch.setattr(algorithms, "open_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(algorithms, "seconds", lambda runs, weights, times: [3.0 - k / 10 for k in range(len(runs))])
    return made


@pytest.fixture
def chosen() -> Algorithms:
    return Algorithms()


def operands(rows: int, kind: Kind = WIDE):
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, kind.depth, generator=made).to(kind.dtype)
    weight = torch.randn(kind.width, kind.depth, generator=made).to(kind.dtype)
    return x, weight, torch.zeros(rows, kind.width, dtype=kind.dtype)


def test_a_cpu_has_no_such_library(chosen):
    if not torch.cuda.is_available():
        assert products_library() is None
        assert cublaslt.open_library() is None
        chosen.autotune({WIDE: []}, lambda kind: [128])  # and so nothing is timed


@pytest.mark.parametrize(
    ("took", "winner"),
    [
        ({TORCHS: 10.0, A: 9.9, B: 9.85}, TORCHS),  # not enough faster
        ({TORCHS: 10.0, A: 9.7, B: 9.85}, A),
        ({TORCHS: 10.0, A: 12.0, B: 9.0}, B),
        ({TORCHS: 10.0}, TORCHS),
    ],
)
def test_a_choice_has_to_be_worth_it(took, winner):
    def nothing(weight):
        raise AssertionError("timed by the caller")

    runs = {key: (lambda weight, key=key: nothing(key)) for key in took}
    named = {run: key for key, run in runs.items()}
    assert quickest(runs, lambda rivals: [took[named[run]] for run in rivals], GAIN) == winner


def test_neither_a_slow_timing_nor_a_lucky_one_decides():
    runs = {way: (lambda weight, way=way: way) for way in (TORCHS, A, B)}
    named = {run: way for way, run in runs.items()}
    first = {TORCHS: 1.0, A: 1.05, B: 2.0}
    rounds = iter(
        [first, *({TORCHS: torchs, A: a} for torchs, a in ((1, 0.9), (1, 3), (0.5, 0.9), (1, 0.9), (1, 0.9)))]
    )

    def timed(rivals):
        took = next(rounds)
        assert {named[run] for run in rivals} == set(took), "what is far behind is not timed again"
        return [took[named[run]] for run in rivals]

    assert quickest(runs, timed, GAIN) == A
    assert next(rounds, None) is None


def test_the_quickest_algorithm_is_used_and_saved(library, chosen):
    x, weight, out = operands(96)
    chosen.autotune({WIDE: [weight]}, lambda kind: [64, 96, 128])
    assert library.asked == [96, 128], "up to 64 rows nothing is timed"
    library.launched.clear()
    assert chosen.run_chosen(x, weight, False, None, out)
    assert library.launched == [(96, B)]
    assert torch.allclose(out.float(), x.float() @ weight.float().t(), rtol=0.02, atol=0.5)
    assert not chosen.run_chosen(x[:72], weight, False, None, out[:72]), "a number of rows that was not timed"
    assert not chosen.run_chosen(x, weight, False, out, out), "another kind"
    assert not chosen.run_chosen(x.t()[:96].t(), weight[:, :96], False, None, out)

    library.asked.clear()
    chosen.chosen.clear()
    chosen.autotune({WIDE: [weight]}, lambda kind: [96, 128, 256])
    assert library.asked == [256], "the others were kept"
    assert chosen.chosen[WIDE] == {96: B, 128: B, 256: B}
    chosen.chosen.clear()
    chosen.autotune({WIDE: [weight]}, lambda kind: [128])
    assert chosen.chosen[WIDE] == {128: B}, "no more than this start loads kernels for"


def test_operands_that_the_library_could_not_read_are_torchs(library, chosen):
    x, weight, out = operands(96)
    chosen.autotune({WIDE: [weight]}, lambda kind: [96])
    room = torch.zeros(96 * WIDE.depth + 1, dtype=x.dtype)
    odd = room[1:].view(96, WIDE.depth)  # the address is odd by two bytes
    assert not chosen.run_chosen(odd, weight, False, None, out)
    assert not chosen.run_chosen(torch.cat([x, x], 1)[:, : WIDE.depth], weight, False, None, out), "rows with gaps"
    assert chosen.run_chosen(x, weight, False, None, out)


def test_a_long_step_takes_what_is_fastest_near_it(library, chosen):
    chosen.library = library
    chosen.chosen[WIDE] = {2048: TORCHS, 4096: A, 8192: TORCHS}
    taken = {rows: chosen.product(WIDE, rows) is not None for rows in (2048, 2049, 5000, 6000, 8000, 20000)}
    assert taken == {2048: False, 2049: True, 5000: True, 6000: False, 8000: False, 20000: False}


def test_a_length_that_the_library_refuses_is_left_to_torch(library, chosen, caplog):
    def refuse(shape, algorithm):
        def launch(*_operands):
            raise RefusedError("cublasLtMatmul returned 15")

        return launch

    kind = Kind(64, 32, False, False, torch.bfloat16)
    x, weight, out = operands(5000, kind)
    chosen.library = library
    chosen.chosen[kind] = {4096: A}
    library.product, real = refuse, library.product
    assert not chosen.run_chosen(x, weight, False, None, out)
    assert "5000 rows of 64 32 bfloat16 (cublasLtMatmul returned 15)" in caplog.text
    library.product = real
    assert not chosen.run_chosen(x, weight, False, None, out), "it is not asked again"
    assert chosen.run_chosen(x[:4097], weight, False, None, out[:4097])


def test_algorithms_of_long_steps_are_launched_at_start(library, chosen):
    _, weight, _ = operands(65)
    chosen.autotune({WIDE: [weight]}, lambda kind: [128, 4096])
    library.launched.clear()
    chosen.autotune({WIDE: [weight]}, lambda kind: [128, 4096])
    assert library.launched == [(4096, B)], "nothing is timed again, and no later step loads that kernel"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"x": 3}', '{"x": {"128": "zz"}}', '{"x": {"128": "abcd"}}', '{"x": {"128": 3}}']
)
def test_a_file_that_cannot_be_read_is_timed_again(library, chosen, text, caplog):
    _, weight, _ = operands(65)
    chosen.autotune({WIDE: [weight]}, lambda kind: [128])
    saved = Saved(library.version, "a card")
    saved.place.put(text, algorithms.FILE, binary=False)
    chosen.chosen.clear()
    library.asked.clear()
    chosen.autotune({WIDE: [weight]}, lambda kind: [128])
    assert library.asked == [128]
    assert "timed again" in caplog.text
    path = Saved(library.version, "a card").place.get_file(algorithms.FILE)
    with open(path) as file:
        assert json.load(file) == {"1024 2048 bfloat16": {"128": B.hex()}}


def test_two_engines_of_a_process_share_no_choice(library, chosen):
    x, weight, out = operands(96)
    other = Algorithms()
    chosen.autotune({WIDE: [weight]}, lambda kind: [96])
    with other.recording() as met:
        assert not other.run_chosen(x, weight, False, None, out)
        chosen.record(weight, False, False)
    assert not met
    assert chosen.run_chosen(x, weight, False, None, out)


def test_versions_and_cards_keep_their_own(library, chosen):
    _, weight, _ = operands(65)
    chosen.autotune({WIDE: [weight]}, lambda kind: [128])
    assert Saved(library.version, "a card").of(WIDE) == {128: B}
    assert not Saved(library.version + 1, "a card").of(WIDE)
    assert not Saved(library.version, "another").of(WIDE)


def test_a_library_that_cannot_be_opened_leaves_torchs_choice(library, chosen, monkeypatch, caplog):
    def refuse():
        raise RefusedError("cublasLtCreate returned 1")

    monkeypatch.setattr(algorithms, "open_library", refuse)
    x, weight, out = operands(128)
    chosen.autotune({WIDE: [weight]}, lambda kind: [128])
    assert "cublasLtCreate returned 1" in caplog.text
    assert not chosen.run_chosen(x, weight, False, None, out)


def test_what_the_library_refuses_to_launch_is_not_chosen(library, chosen, monkeypatch):
    def product(shape, algorithm):
        def launch(*_operands):
            raise RefusedError("cublasLtMatmul returned 15")

        return launch if algorithm == B else real(shape, algorithm)

    real = library.product
    monkeypatch.setattr(library, "product", product)
    chosen.autotune({WIDE: [operands(65)[1]]}, lambda kind: [128])
    assert chosen.chosen[WIDE] == {128: A}


def test_no_room_to_time_leaves_torchs_choice(library, chosen, monkeypatch, caplog):
    def out_of_memory(*_args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(algorithms, "_time", out_of_memory)
    x, weight, out = operands(128)
    chosen.autotune({WIDE: [weight]}, lambda kind: [128])
    assert "torch chooses" in caplog.text
    assert not chosen.run_chosen(x, weight, False, None, out)


def test_products_are_recorded_once_and_by_kind(chosen):
    weight = torch.zeros(1024, 2048, dtype=torch.bfloat16)
    packed, gated = DenseWeight(weight, None, chosen), DenseWeight(weight.clone(), None, chosen)
    small = DenseWeight(torch.zeros(64, 64, dtype=torch.bfloat16), None, chosen)
    biased = DenseWeight(weight.clone(), torch.zeros(1024, dtype=torch.bfloat16), chosen)
    x, y = torch.zeros(3, 2048, dtype=torch.bfloat16), torch.zeros(3, 1024, dtype=torch.bfloat16)
    with chosen.recording() as met:
        for _ in range(2):
            packed.linear(x)
            packed.linear(x, y, y)
            gated.gated(x, Activation.SILU)
            biased.linear(x)
            small.linear(x[:, :64])
    DenseWeight(weight.clone(), None, chosen).linear(x)
    assert {kind: len(weights) for kind, weights in met.items()} == {
        WIDE: 1, WIDE._replace(added=True): 1, WIDE._replace(gated=True): 1,
    }  # fmt: skip


def test_products_of_ours_are_not_timed(monkeypatch):
    few, gated = WIDE, WIDE._replace(gated=True)
    monkeypatch.setattr(
        "engine.kernels.gemm.dispatch.few_rows", lambda rows, *_: Split(16, 32, 2, 2, 4) if rows <= 64 else None
    )
    assert [is_vendors(few, rows) for rows in (64, 65)] == [False, True]
    assert [is_vendors(gated, rows) for rows in (64, 65)] == [False, True]


def test_some_of_the_steps_without_a_graph():
    assert long_sizes(2048) == []
    assert long_sizes(2049) == [2049]
    assert long_sizes(8192) == [4096, 8192]
    assert long_sizes(10000) == [4096, 8192, 10000]
