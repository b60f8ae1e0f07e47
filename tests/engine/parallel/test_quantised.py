"""Quantised models on ranks: the log-probabilities of one rank, for every form of weights.

The matrices have six heads of 32 columns and an inner width of 320: ranks get unequal numbers of groups, and bounds of
ranks lie inside groups.
"""

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.base.dealing import Section
from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes, Kind
from engine.models.registry import build_model, load_model_config
from engine.parallel.codes import SharedMatrix
from engine.parallel.model import SplitModel
from engine.quant.base import Quantised
from engine.quant.checks import Checks
from engine.quant.floats8 import Floats8
from engine.quant.online import requested
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights
from server.start.gguf import as_folder
from tests import tiny
from tests.engine.parallel.kit import harness, split
from tests.models.harness import Harness, load
from tests.quant import ggufs
from tests.quant.experts import EXPERTS, SIZES, in_codes
from tests.quant.written import VARIANTS, write

TOKENS = [5, 9, 200, 17, 33, 250, 61, 4, 90, 91, 92]
EACH_FORM = (
    "fp8 tensor static", "fp8 blocks mixed", "ct float channel", "ct head", "ct mxfp8", "ct int8", "ct int8 static",
    "ct int8 weights", "ct w4 channel", "ct w4 asymmetric", "ct w4 g_idx", "ct w8 32", "ct w4 mixed", "ct nvfp4",
    "ct mxfp4", "modelopt fp8 blocks", "gptq 32", "gptq act", "gptq asymmetric", "gptq dynamic", "auto-round awq",
    "awq 64", "bnb nf4 across rows", "bnb int8", "ct mixed",
)  # fmt: skip
# Each rank quantises its part of a row of inputs with a scale of its own.
LIMITS = {"ct int8": 0.2}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantised")
    return functools.cache(lambda name: write(root / name.replace(" ", "-"), VARIANTS[name]))


@pytest.mark.parametrize("ranks", [2, pytest.param(6, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_FORM else pytest.mark.full) for name in VARIANTS]
)
@torch.inference_mode()
def test_ranks_give_the_log_probabilities_of_one(folder_of, name, ranks):
    whole, model = Harness(load(folder_of(name))), split(folder_of(name), ranks)
    parts = harness(model)
    got, want = (each.prefill(each.add(TOKENS)).log_softmax(-1) for each in (parts, whole))
    assert (got - want).abs().max() <= LIMITS.get(name, 1e-4)
    model.close()


@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "q6_k"])
@torch.inference_mode()
def test_ranks_read_codes_of_gguf(kind, tmp_path):
    folder = Path(as_folder(str(ggufs.write(tmp_path / "llama.gguf", "llama", kind)), tokenizer=False))
    whole, model = Harness(load(folder, "float32")), split(folder, 2, dtype="float32")
    parts = harness(model)
    got, want = (each.prefill(each.add(TOKENS)).log_softmax(-1) for each in (parts, whole))
    assert (got - want).norm() <= 1e-5 * want.norm()  # logits of these files have sizes near 100
    model.close()


@torch.inference_mode()
def test_codes_of_each_expert_are_dealt_out():
    folder = tiny.checkpoint("qwen3_moe")
    config, shards = requested(load_model_config(folder), "fp8"), open_checkpoint(folder)
    build = functools.partial(build_model, dtype=torch.float32, shards=shards)
    one = build(config)
    load_weights(one, str(folder))
    model = SplitModel(build(config), lambda config, _rank: build(config), 2)
    load_weights(model.whole, str(folder), pieces_of=model.pieces)
    whole, parts = Harness(one), harness(model)
    got, want = (each.prefill(each.add(TOKENS)).log_softmax(-1) for each in (parts, whole))
    assert (got - want).abs().max() <= 1e-4
    model.close()


class Watch:
    """Counts the reads of each matrix, and keeps what each rank gets of it."""

    def __init__(self, monkeypatch):
        self.reads, self.held = Counter(), {}
        read, matrices = Floats8.read, Quantised.matrices

        def watched_read(storage, tensors, *given):
            self.reads[tensors["weight"].data_ptr()] += 1  # the mapped files have an address for each tensor
            return read(storage, tensors, *given)

        def watched_matrices(scheme, *given):
            found = matrices(scheme, *given)
            for module, matrix in zip(scheme.modules, found, strict=True):
                self.held.setdefault(module, []).append(matrix)
            return found

        monkeypatch.setattr(Floats8, "read", watched_read)
        monkeypatch.setattr(Quantised, "matrices", watched_matrices)


@torch.inference_mode()
def test_a_matrix_is_read_once_for_all_ranks(monkeypatch, tmp_path):
    made = tiny.causal("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=32, num_attention_heads=8, **SIZES, **EXPERTS)
    folder = in_codes(tiny.save(made(), tmp_path / "floats"), tmp_path / "codes", "fp8 blocks")
    watch = Watch(monkeypatch)
    model = split(folder, 4)
    assert len(watch.reads) == len(watch.held) == 2 * 4 + 3 + 5 * 3
    assert set(watch.reads.values()) == {1}
    for module, parts in watch.held.items():
        sizes = [part.values.numel() for part in parts]
        assert [part.values.untyped_storage().nbytes() for part in parts] == sizes, module
        assert [part.scale.untyped_storage().nbytes() for part in parts] == [part.scale.nbytes for part in parts]
        assert max(sizes) <= (2 * sum(sizes) / 5 if "mlp" in module else sum(sizes) / 4), module
    model.close()


def test_only_the_first_rank_reads_and_no_part_waits_for_ever():
    matrix = SharedMatrix(Floats8("scale", (), "row"), (8, 4), (Section(4, 2),), None, ("cpu", "meta", "cpu"))
    numbers = torch.arange(32).view(8, 4).to(torch.uint8)
    tensors = {"weight": numbers.view(torch.float8_e4m3fn), "scale": torch.ones(8, 1)}
    for _ in range(2):  # a model may get its weights again
        first, other, last = (matrix.take(*each, Checks("cpu")) for each in ((0, tensors), (1, {}), (2, {})))
        assert not matrix.waiting
        assert torch.equal(torch.cat([first.values, last.values]), numbers[[0, 1, 2, 3, 6, 7]])
        assert {part.device.type for part in (other.values, other.scale)} == {"meta"}
        assert other.values.shape == (2, 4)


def test_codes_of_all_experts_in_one_tensor_are_refused():
    folder = tiny.checkpoint("dbrx")
    config = requested(load_model_config(folder), "fp8")
    build = functools.partial(build_model, dtype=torch.float32, shards=open_checkpoint(folder))
    with pytest.raises(ConfigError, match=r"experts\.mlp has the codes of all experts in one tensor"):
        SplitModel(build(config), lambda config, _rank: build(config), 2)


def codes(columns, group, zeros=False):
    groups = -(-columns // group)
    zero = torch.randint(-8, 8, (6, groups), dtype=torch.int8) if zeros else None
    values = torch.randint(0, 16, (6, columns), dtype=torch.uint8)
    return Codes(Kind.INT4, values, torch.rand(6, groups), group, torch.rand(6), zero)


@pytest.mark.parametrize(
    ("columns", "group", "first", "end", "made"),
    [
        (256, 64, 64, 192, 64),
        (256, 64, 96, 256, 32),  # a bound inside a group
        (320, 128, 192, 320, 64),
        (320, 320, 192, 320, 128),  # one scale for each row
        (200, 128, 128, 200, 72),
        (200, 64, 0, 128, 64),
        (200, 64, 64, 200, 64),  # the last group is shorter
    ],
)
def test_columns_of_codes_have_the_values_of_the_matrix(columns, group, first, end, made):
    torch.manual_seed(0)
    for zeros in (False, True):
        whole = codes(columns, group, zeros)
        part = whole.columns(first, end)
        assert part.group == made
        assert part.scale.shape[1] == -(-(end - first) // made)
        assert torch.equal(part.dense(), whole.dense()[:, first:end])
