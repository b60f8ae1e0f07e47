"""GGUF files: weights, configuration and tokenizer, against transformers' and llama.cpp's readers."""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.pack import pack_pieces as pack
from engine.models.registry import build_model, load_model_config
from engine.quant.gguf import Blocks
from engine.weights.files import open_checkpoint
from engine.weights.ggml_blocks import codes_of
from engine.weights.gguf import read_gguf
from engine.weights.load import load_weights
from server.cli import parse
from server.render.load_tokenizer import load_tokenizer
from server.start.check import lines
from server.start.gguf import as_folder
from tests.models.harness import Harness, load
from tests.quant import ggufs

TOKENS = [5, 9, 200, 17, 33, 250, 61, 4, 90, 91, 92]
FILES = {
    "llama": ("llama", "q4_k", False, "llama-bpe"),
    "llama tied": ("llama", "q4_0", True, "llama"),
    "qwen2": ("qwen2", "q8_0", False, "qwen2"),
    "qwen3": ("qwen3", "q4_k", True, "qwen2"),
    "q6_k": ("qwen3", "q6_k", False, "gpt-2"),
    "q5_k": ("llama", "q5_k", False, "gpt-2"),
    "q5_1": ("llama", "q5_1", True, "qwen2"),
    "iq4_xs": ("qwen2", "iq4_xs", False, "qwen2"),
}


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """A function that returns a file by name and writes it on the first call."""
    root = tmp_path_factory.mktemp("ggufs")
    return functools.cache(lambda name: ggufs.write(root / f"{name.replace(' ', '-')}.gguf", *FILES[name]))


@pytest.mark.parametrize("kind", ggufs.TYPES)
def test_blocks_stand_for_what_llama_cpp_reads(kind):
    raw = ggufs.blocks(kind, 6, 512, np.random.default_rng(1))
    want = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])).double()
    codes = codes_of(kind, torch.from_numpy(raw))
    form = pack([codes], None, Placement(torch.float32, "cpu:0"), gated=False)
    assert form.num_bytes == Blocks(kind).wants(6, 512)[kind].num_bytes(torch.bfloat16)
    torch.testing.assert_close(codes.dense(), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    for device in ("cpu", "cpu:0"):  # the CPU's panels, and the accelerator's form by its reference kernel
        product = pack([codes], None, Placement(torch.float32, device), gated=False).linear(x)
        torch.testing.assert_close(
            product.double(), x.double() @ want.T, rtol=1e-4, atol=1e-4 * float(want.abs().max())
        )


def by_transformers(path: Path) -> torch.nn.Module:
    """The model as transformers reads it from the file."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = ggufs.WIDTH // ggufs.HEADS  # transformers does not read this key in Qwen3's files
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    absent, beyond = model.load_state_dict(tensors, strict=False)
    assert (set(absent), beyond) <= ({"lm_head.weight"}, [])
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_logits_of_transformers(file_of, name):
    path = file_of(name)
    model = load(Path(as_folder(str(path), tokenizer=False)), "float32")
    theirs = by_transformers(path)
    with torch.inference_mode():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    harness = Harness(model)
    got = harness.prefill(harness.add(TOKENS))
    assert float((got - want).norm() / want.norm()) < 2e-4
    assert torch.equal(harness.prefill(harness.add(TOKENS), chunk=3), got)


def test_an_accelerators_form_has_the_same_logits(file_of):
    folder = as_folder(str(file_of("llama")), tokenizer=False)
    model = build_model(load_model_config(folder), torch.float32, shards=open_checkpoint(folder))
    load_weights(model, folder, "auto", Placement(torch.float32, "cpu:0"))
    ours, theirs = Harness(model), Harness(load(Path(folder), "float32"))
    got, want = ours.prefill(ours.add(TOKENS)), theirs.prefill(theirs.add(TOKENS))
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("name", ["llama", "llama tied", "qwen2", "q6_k"])
def test_a_file_has_the_tokenizer_of_transformers(file_of, name):
    path = file_of(name)
    ours = load_tokenizer(as_folder(str(path), tokenizer=True))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("the thing", "in the  inn, 12345 \u00e9\n\n don't", "x\ty"):
        wanted = theirs.encode(text, add_special_tokens=False)
        if name == "llama" and " the" in text:  # transformers rebuilds Llama's merges and misses one of the file's
            assert "\u0120the" in map(ours.token_of, ours.encode(text))
            continue
        assert ours.encode(text) == wanted, text
        assert ours.decode(wanted) == text
    if name != "llama tied":
        assert ours.encode("in<|end|><tool>")[-2:] == [ours.id_of("<|end|>"), ours.id_of("<tool>")]
        assert ours.decode([ours.id_of("<|end|>")], skip_special_tokens=True) == ""
    begins = ours.id_of("<s>" if name == "llama tied" else "<|start|>")
    assert (ours.encode("the", add_special_tokens=True)[0] == begins) == name.startswith("llama")


def test_check_says_what_a_file_holds(file_of):
    said = "\n".join(lines(parse(["check", "--model", str(file_of("llama")), "--device", "cpu"])[1]))
    assert "LlamaForCausalLM" in said
    assert "quantised weights (gguf): 15 matrices are codes in memory" in said


def test_frequencies_of_llama_3_are_found_by_their_divisors(tmp_path):
    wanted = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    waves = 2 * np.pi * 10_000 ** (np.arange(32) / 32)
    share = np.clip((8192 / waves - 1) / 3, 0, 1)
    divisors = 1 / ((1 - share) / 8 + share)
    found = load_model_config(as_folder(str(ggufs.write(tmp_path / "a.gguf", factors=divisors)), tokenizer=False))
    assert wanted.items() <= found.raw["rope_scaling"].items()
    with pytest.raises(ConfigError, match="not Llama 3's rule"):
        as_folder(str(ggufs.write(tmp_path / "b.gguf", factors=divisors[::-1])), tokenizer=False)


def cut(data: bytes) -> bytes:
    return data[:-1000]


def other_magic(data: bytes) -> bytes:
    return b"GGML" + data[4:]


def endless_text(data: bytes) -> bytes:
    return data[:24] + struct.pack("<Q", 1 << 60) + data[32:]


def many_tensors(data: bytes) -> bytes:
    return data[:8] + struct.pack("<Q", 1 << 40) + data[16:]


def other_architecture(data: bytes) -> bytes:
    return data.replace(b"llama", b"mamba")


def odd_name(data: bytes) -> bytes:
    return data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_q\nweight")


def other_kind_of_fact(data: bytes) -> bytes:
    """Replaces a number by a list of numbers."""
    name = b"tokenizer.ggml.eos_token_id"
    at = data.index(name) + len(name)
    return data[:at] + struct.pack("<IIQ", 9, 4, 1) + data[at + 4 :]


def other_type(data: bytes) -> bytes:
    """Changes the type of the first tensor; it follows the name, the number of dimensions and two dimensions."""
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    return data[:at] + struct.pack("<I", 11) + data[at + 4 :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "has .* bytes, and .* takes"),
        (other_magic, "is no GGUF file"),
        (endless_text, "claims a text of"),
        (many_tensors, "claims 1099511627776 tensors"),
        (odd_name, r"has a tensor by the name 'blk.0.attn_q\\nweight'"),
        (other_kind_of_fact, "has as tokenizer.ggml.eos_token_id something else than one int"),
        (other_architecture, "general.architecture='mamba'; of GGUF files llama, qwen2, qwen3 are served"),
        (
            other_type,
            "token_embd.weight is Q3_K; read are matrices in F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K",
        ),
    ],
)
def test_other_files_are_refused(file_of, tmp_path, damage, said):
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(file_of("llama").read_bytes()))
    with pytest.raises(ConfigError, match=said):
        as_folder(str(path), tokenizer=False)


def test_an_absent_file_and_another_tokenizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        as_folder(str(tmp_path / "none.gguf"), tokenizer=False)
    path = str(ggufs.write(tmp_path / "a.gguf", tokenizer="tekken"))
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.pre='tekken'; read are .* --tokenizer"):
        as_folder(path, tokenizer=True)
    assert as_folder(path, tokenizer=False)


def test_every_fact_is_as_llama_cpps_library_reads_it(file_of):
    found, theirs = read_gguf(file_of("llama")), gguf.GGUFReader(file_of("llama"))
    assert {name for name in theirs.fields if not name.startswith("GGUF.")} == found.facts.keys()
    for name, value in found.facts.items():
        assert value == pytest.approx(theirs.fields[name].contents()) if isinstance(value, float) else True
        assert isinstance(value, float) or value == theirs.fields[name].contents()
    for tensor in theirs.tensors:
        stored = found.tensors[tensor.name]
        assert (stored.begin, stored.num_bytes) == (tensor.data_offset, tensor.n_bytes)
