"""Typical mistakes of readers of quantised files: with each mistake in our reader, the oracle's comparison fails.

A trap is a variant of tests/quant/written.py and a function that puts one mistake into engine/quant or kernels/gemm.
Without the mistake the same variant passes in test_dialects.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.base.errors import ConfigError
from engine.kernels.gemm import codes, pack
from engine.quant import awq, base, compressed, compressed_integers, floats8, gptq, online, stored
from engine.quant.checks import Checks
from tests.models.harness import load
from tests.quant.compared import check_weights
from tests.quant.written import VARIANTS, write

Patch = pytest.MonkeyPatch
TRAPS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def trap(*variants: str):
    """Registers a mistake in TRAPS, once for each variant that it must break."""

    def remaining(mistake: Callable[[Patch], None]) -> Callable[[Patch], None]:
        for variant in variants:
            TRAPS[f"{mistake.__name__.replace('_', ' ')}: {variant}"] = variant, mistake
        return mistake

    return remaining


def reads(patch: Patch, stored_as: type, changed: Callable) -> None:
    """Patches the reader `stored_as` so that it reads with the form and tensors that `changed` returns."""
    original = stored_as.read

    def read(self, tensors, checks):
        return original(*changed(self, dict(tensors)), checks)

    patch.setattr(stored_as, "read", read)


@trap("gptq v2")
def version_two_is_read_as_version_one(patch):
    reads(patch, gptq.PackedGptq, lambda self, tensors: (replace(self, older=True), tensors))


@trap("gptq asymmetric", "gptq 8 asymmetric", "gptq act asymmetric")
def version_one_is_read_as_version_two(patch):
    reads(patch, gptq.PackedGptq, lambda self, tensors: (replace(self, older=False), tensors))


@trap("gptq asymmetric")
def one_is_added_to_a_whole_word_and_carries(patch):
    def changed(self, tensors):
        ones = torch.tensor(0x11111111, dtype=torch.int32)
        return replace(self, older=False), {**tensors, "qzeros": tensors["qzeros"] + ones}

    reads(patch, gptq.PackedGptq, changed)


@trap("gptq 32", "gptq 8", "auto-round gptq")
def zeros_of_a_symmetric_checkpoint_are_read(patch):
    reads(patch, gptq.PackedGptq, lambda self, tensors: (replace(self, symmetric=False), tensors))


@trap("gptq act", "gptq act unlike")
def the_order_of_columns_is_not_read(patch):
    patch.setattr(gptq, "column_order", lambda groups, columns, group: None)


@trap("gptq act", "gptq act asymmetric")
def the_order_of_columns_is_turned_round(patch):
    patch.setattr(
        gptq, "column_order", lambda groups, columns, group: torch.argsort(torch.argsort(groups, stable=True))
    )


@trap("ct w4 g_idx")
def the_order_of_packed_columns_is_not_read(patch):
    patch.setattr(compressed_integers, "column_order", lambda groups, columns, group: None)


@trap("gptq act unlike")
def joined_matrices_take_the_order_of_the_first(patch):
    patch.setattr(pack, "alike", lambda pieces: True)


@trap("ct nvfp4", "modelopt nvfp4")
def the_scale_of_the_matrix_points_the_other_way(patch):
    reads(patch, stored.Floats4, lambda self, tensors: (replace(self, divides=not self.divides), tensors))


@trap("ct nvfp4", "ct mxfp4", "modelopt nvfp4")
def the_high_half_of_a_byte_comes_first(patch):
    def changed(self, tensors):
        both = tensors[self.weight]
        return self, {**tensors, self.weight: both << 4 | both >> 4}

    reads(patch, stored.Floats4, changed)


@trap("ct mxfp4", "ct mxfp8", "fp8 blocks u8")
def exponents_are_read_as_numbers(patch):
    for module in (floats8, stored):
        patch.setattr(module, "scale_of", lambda kind, tensor, checks: tensor.float())


@trap("fp8 blocks", "fp8 blocks mixed", "ct float block", "modelopt fp8 blocks")
def a_block_is_what_shapes_divide_to(patch):
    def changed(self, tensors):
        scale = tensors[self.scale]
        return replace(self, block=(-(-len(tensors["weight"]) // len(scale)), self.block[1])), tensors

    reads(patch, floats8.Floats8, changed)


@trap("fp8 blocks", "fp8 tensor")
def a_scale_named_inverse_divides(patch):
    original = stored.scale_of

    def scale_of(kind, tensor, checks):
        scale = original(kind, tensor, checks)
        return torch.where(scale > 0, 1 / scale, 0) if kind.endswith("_inv") else scale

    patch.setattr(floats8, "scale_of", scale_of)


@trap("fp8 tensor", "ct float block")
def scales_are_rounded_to_bfloat16(patch):
    original = stored.scale_of
    patch.setattr(floats8, "scale_of", lambda kind, tensor, checks: original(kind, tensor, checks).to(torch.bfloat16))


@trap("fp8 tensor", "ct float tensor", "fp8 qscale_weight")
def joined_matrices_share_their_largest_scale(patch):
    original = base.pack_pieces

    def pack_pieces(pieces, bias, placement, gated):
        quantised = [piece for piece in pieces if isinstance(piece, codes.Codes)]
        most = torch.stack([piece.scale.max() for piece in quantised]).max() if quantised else None
        folded = [
            replace(piece, scale=most.expand_as(piece.scale).contiguous()) if isinstance(piece, codes.Codes) else piece
            for piece in pieces
        ]
        return original(folded, bias, placement, gated)

    patch.setattr(base, "pack_pieces", pack_pieces)


@trap("awq 32", "awq channel", "auto-round awq")
def outputs_of_a_word_are_in_order(patch):
    patch.setattr(awq, "PLACES", list(range(8)))


@trap("awq 64")
def the_order_of_outputs_is_turned_round(patch):
    patch.setattr(awq, "PLACES", [0, 2, 4, 6, 1, 3, 5, 7])


@trap("awq 32", "gptq 128", "ct w4 32", "ct w8 32")
def the_highest_field_of_a_word_comes_first(patch):
    original = stored.fields

    def fields(words, bits):
        return original(words, bits).unflatten(-1, (-1, 32 // bits)).flip(-1).flatten(-2)

    for module in (awq, gptq, compressed_integers):
        patch.setattr(module, "fields", fields)


@trap("awq 32", "gptq asymmetric", "ct w4 asymmetric", "ct w8 asymmetric")
def zero_points_are_off_by_one(patch):
    original = stored.offsets
    for module in (awq, gptq, compressed_integers):
        patch.setattr(module, "offsets", lambda found, bits: original(found, bits) + 1)


@trap("ct w4 asymmetric", "ct w8 asymmetric")
def zero_points_are_unpacked_along_columns(patch):
    def changed(self, tensors):
        words, (rows, groups) = tensors["weight_zero_point"], tensors["weight_scale"].shape
        found = stored.fields(words, self.bits).flatten()[: rows * groups].view(rows, groups)
        return replace(self, packed_zeros=False), {**tensors, "weight_zero_point": stored.offsets(found, self.bits)}

    reads(patch, compressed_integers.PackedIntegers, changed)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that returns the folder of a variant and writes it on the first call."""
    root, made = tmp_path_factory.mktemp("traps"), {}

    def folder(name: str):
        if name not in made:
            made[name] = write(root / name.replace(" ", "-"), VARIANTS[name])
        return made[name]

    return folder


@pytest.mark.parametrize("name", TRAPS)
def test_the_oracle_finds_the_mistake(folder_of, monkeypatch, name):
    variant, mistake = TRAPS[name]
    folder = folder_of(variant)
    mistake(monkeypatch)
    model = load(folder, "float32")
    with pytest.raises(AssertionError, match="not close"):
        check_weights(model, folder)


def test_a_head_of_codes_is_not_read_as_floats_where_the_configuration_leaves_it_out(folder_of, monkeypatch):
    folder = folder_of("ct head")
    assert check_weights(load(folder, "float32"), folder) == 9
    original = compressed.Compressed.stored

    def stored_as(self, module, columns, headers):
        left_out = module == "lm_head"  # `ignore` names the head, though the file has its codes
        return None if left_out else original(self, module, columns, headers)

    monkeypatch.setattr(compressed.Compressed, "stored", stored_as)
    with pytest.raises(ConfigError, match="lm_head"):
        load(folder, "float32")


def test_a_row_of_zeros_has_codes_of_zero(monkeypatch):
    rows = torch.zeros(2, 64)
    rows[1] = torch.linspace(-3, 3, 64)
    found = online.Floats().read({"weight": rows}, Checks("cpu"))
    torch.testing.assert_close(found.dense().float(), rows, rtol=1 / 15, atol=2e-3)
    assert not found.dense()[0].any()
    monkeypatch.setattr(online.torch, "where", lambda so, this, other: this)  # no special scale for zeros
    assert online.Floats().read({"weight": rows}, Checks("cpu")).dense()[0].isnan().all()
