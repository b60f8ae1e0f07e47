"""Loading: one error lists everything that does not fit; sharding, prefixes, dtypes, dummy weights."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.models.lookup import families
from engine.models.registry import build_model, load_model_config
from engine.weights import files, finite
from engine.weights.dummy import draw
from engine.weights.load import load_weights
from engine.weights.table import expand
from tests import tiny
from tests.models.harness import Harness, load
from tests.tables.support import processor_class

TOKENS = list(range(40, 70))


@pytest.fixture
def copy(tmp_path):
    """A function that copies a checkpoint, so that the test may change it."""

    def make(name):
        return shutil.copytree(tiny.checkpoint(name), tmp_path / name)

    return make


def rewrite(folder, change):
    """Passes the checkpoint's tensors through `change`."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors) or tensors, path)


def logits(folder, **options):
    harness = Harness(load(folder, **options))
    return harness.prefill(harness.add(TOKENS))


def test_every_missing_name_is_reported(copy):
    folder = copy("qwen3")
    gone = ["model.layers.1.self_attn.k_norm.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.weight"]
    rewrite(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in gone})
    with pytest.raises(ConfigError) as error:
        load(folder)
    text = str(error.value)
    assert "3 missing" in text
    assert all(name.removeprefix("model.") in text for name in gone)
    assert "left over" not in text


def test_every_left_over_name_is_reported_with_the_missing(copy):
    folder = copy("llama")

    def change(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(4, 4)
        tensors["model.normal.weight"] = tensors.pop("model.norm.weight")

    rewrite(folder, change)
    with pytest.raises(ConfigError) as error:
        load(folder)
    text = str(error.value)
    assert "1 missing: norm.weight" in text
    assert "3 left over" in text
    for name in ("layers.0.self_attn.q_proj.bias", "layers.7.mlp.up_proj.weight", "model.normal.weight"):
        assert name in text


def test_wrong_shapes_say_what_was_got_and_what_is_needed(copy):
    folder = copy("mistral")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(65, 64)}))
    with pytest.raises(
        ConfigError, match=r"k_proj.weight has shape \[65, 64\], the configuration asks for \[64, 64\]"
    ) as error:
        load(folder)
    assert "missing" not in str(error.value)


def test_integer_weights_are_refused(copy):
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match=r"norm.weight has dtype I8, readable are F32, F16, BF16"):
        load(folder)


def test_the_same_tensor_under_two_prefixes_is_refused(copy):
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(ConfigError, match="is there twice"):
        load(folder)


def test_sharded_checkpoint_equals_the_single_file(tmp_path):
    folder = tiny.save(tiny.qwen3(), tmp_path / "sharded", max_shard_size="60KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert torch.equal(logits(folder), logits(tiny.checkpoint("qwen3")))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=rf"names {shards[1].name}, which is missing"):
        load(folder)


def test_shard_index_and_shards_must_agree(tmp_path):
    folder = tiny.save(tiny.llama(), tmp_path / "sharded", max_shard_size="60KB")
    index = json.loads((folder / files.INDEX).read_text())
    owners = list(index["weight_map"].values())
    name, file = next(item for item in index["weight_map"].items() if owners.count(item[1]) > 1)
    del index["weight_map"][name]
    (folder / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"disagree; not in the index: {name}"):
        load(folder)
    index["weight_map"][name] = "../" + file
    (folder / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"only .safetensors files beside it are read"):
        load(folder)


RENAMED = {
    "released thinker inside the full model": lambda name: (
        "thinker." + name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    ).replace("thinker.model.audio_tower.", "thinker.audio_tower."),
    "thinker alone": lambda name: (
        name.replace("model.language_model.", "model.")
        .replace("model.visual.", "visual.")
        .replace("model.audio_tower.", "audio_tower.")
    ),
}


@pytest.mark.parametrize("style", RENAMED)
def test_other_prefix_styles_load_alike(copy, style):
    folder = copy("omni")
    rewrite(folder, lambda tensors: {RENAMED[style](name): tensor for name, tensor in tensors.items()})
    names = list(load_file(folder / "model.safetensors"))
    expected = ("thinker.model.layers.0.", "thinker.lm_head.") if "full" in style else ("model.layers.0.", "lm_head.")
    assert all(any(name.startswith(prefix) for name in names) for prefix in expected)
    assert torch.equal(logits(folder), logits(tiny.checkpoint("omni")))


def test_the_full_omni_folder_serves_its_thinker(copy):
    folder = copy("omni")
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": config}
    (folder / "config.json").write_text(json.dumps({**whole, "talker_config": {}, "torch_dtype": "float32"}))

    def change(tensors):
        renamed = {RENAMED["released thinker inside the full model"](name): t for name, t in tensors.items()}
        return {**renamed, "talker.model.norm.weight": torch.ones(3), "token2wav.x": torch.ones(3)}

    rewrite(folder, change)
    assert torch.equal(logits(folder), logits(tiny.checkpoint("omni")))


def test_base_model_names_without_any_prefix_load(copy):
    folder = copy("qwen2")  # tied embeddings: only the decoder is needed
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert torch.equal(logits(folder), logits(tiny.checkpoint("qwen2")))


def test_tied_head_in_the_file_and_old_inv_freq_are_skipped(copy):
    folder = copy("qwen2")

    def change(tensors):
        tensors["lm_head.weight"] = torch.zeros(4, 4)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, change)
    assert torch.equal(logits(folder), logits(tiny.checkpoint("qwen2")))


def test_bfloat16_checkpoint_is_computed_in_float32_without_loss(tmp_path):
    folder = tiny.save(tiny.qwen3(), tmp_path / "bf16", dtype="bfloat16")
    model = load(folder)
    assert model.dtype == torch.float32
    assert model.layers[0].mlp.down.weight.dense().dtype == torch.bfloat16  # half the bytes
    with torch.inference_mode():
        want = tiny.reference(folder, "float32")(input_ids=torch.tensor([TOKENS])).logits[0]
    assert (logits(folder) - want).abs().max() <= 1e-4


def test_float16_checkpoint_is_widened(tmp_path):
    folder = tiny.save(tiny.llama(), tmp_path / "f16", dtype="float16")
    with torch.inference_mode():
        want = tiny.reference(folder, "float32")(input_ids=torch.tensor([TOKENS])).logits[0]
    assert (logits(folder) - want).abs().max() <= 1e-4


def test_loaded_weights_do_not_hold_the_file(copy):
    folder = copy("omni")
    harness = Harness(load(folder))
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    got = harness.prefill(harness.add(TOKENS))
    assert torch.equal(got, logits(tiny.checkpoint("omni")))


def test_progress_counts_every_byte_once():
    seen = []
    config = load_model_config(tiny.checkpoint("omni"))
    model = build_model(config, torch.float32)
    load_weights(model, config.folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == seen[0][1]
    unread = 2 * 128 * 4  # audio_bos_eos_token
    read = sum(t.numel() * 4 for t in load_file(tiny.checkpoint("omni") / "model.safetensors").values())
    assert seen[-1][1] == read - unread


@pytest.mark.parametrize("name", sorted(tiny.CHECKPOINTS))
def test_dummy_weights_need_only_the_configuration(name, tmp_path):
    for file in ("config.json", "generation_config.json"):
        shutil.copy(tiny.checkpoint(name) / file, tmp_path)
    got = logits(tmp_path, load_format="dummy", seed=3)
    assert torch.isfinite(got).all()
    assert got.std() > 0
    assert torch.equal(got, logits(tmp_path, load_format="dummy", seed=3))
    assert not torch.equal(got, logits(tmp_path, load_format="dummy", seed=4))


def test_dummy_codes_have_both_signs_and_their_scales_one():
    codes = draw("mlp.up_proj.weight", torch.empty(64, 96, dtype=torch.float8_e4m3fn), 0).float()
    assert 0.45 < (codes < 0).float().mean() < 0.55
    assert codes.abs().aminmax() == (0.125, 1.875)
    nibbles = draw("mlp.experts.gate_up_proj_blocks", torch.empty(64, 96, dtype=torch.uint8), 0)
    for signs in (nibbles >> 7, nibbles >> 3 & 1):
        assert 0.45 < signs.float().mean() < 0.55
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16):
        assert (draw("mlp.up_proj.weight_scale", torch.empty(64, 6, dtype=dtype), 0).float() > 0).all()


def test_dummy_tensors_do_not_depend_on_the_other_layers(tmp_path):
    config = json.loads((tiny.checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    small = load(tmp_path, load_format="dummy")
    large = load(tiny.checkpoint("llama"), load_format="dummy")
    assert torch.equal(small.layers[0].mlp.down.weight.dense(), large.layers[0].mlp.down.weight.dense())
    assert torch.equal(small.embed.table, large.embed.table)


@pytest.mark.parametrize("parts", [1, 2])
def test_pickled_weights_are_not_read_and_the_refusal_names_the_command(copy, parts):
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    names = ["pytorch_model.bin"] if parts == 1 else ["pytorch_model-0.bin", "pytorch_model-1.bin"]
    for name in (*names, "training_args.bin"):
        (folder / name).write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="holds no weights") as error:
        load(folder)
    held = ", ".join((*names, "training_args.bin"))
    assert f"{held} can hold code and is never read by the server: `python -m server convert {folder}`" in str(
        error.value
    )


def test_other_formats_are_named(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="name a GGUF file itself"):
        files.open_checkpoint(tmp_path)


def test_what_lacks_in_every_layer_is_reported_once(copy):
    folder = copy("qwen3")

    def change(tensors):
        kept = {name: tensor for name, tensor in tensors.items() if "q_norm" not in name and name != "lm_head.weight"}
        experts = [f"model.layers.{layer}.mlp.experts.{expert}.bias" for layer in (0, 2) for expert in range(8)]
        kept.update({name: torch.zeros(1) for name in experts})
        kept["model.layers.2.mlp.experts.9.bias"] = torch.zeros(1)
        kept.update({f"model.layers.{layer}.self_attn.k_norm.weight": torch.ones(3) for layer in range(3)})
        return kept

    rewrite(folder, change)
    with pytest.raises(ConfigError) as error:
        load(folder)
    text = str(error.value)
    assert "4 missing: layers.0-2.self_attn.q_norm.weight (3), lm_head.weight" in text
    assert "17 left over: 17 of model.layers.0,2.mlp.experts.0-7,9.bias" in text
    assert "model.layers.0-2.self_attn.k_norm.weight (3) has shape [3], the configuration asks for [" in text
    assert '{"tie_word_embeddings": true}' in text
    assert len(text) < len(str(folder)) + 600


@pytest.mark.parametrize(
    "name", ["a..weight", ".weight", "up_proj.", "", "a\nb\x1b[31m.weight", f"layers.{'9' * 5000}.w"]
)
def test_tensors_by_any_name_are_reported_in_one_line(copy, name):
    folder = copy("llama")
    rewrite(folder, lambda tensors: {**tensors, name: torch.zeros(1)})
    with pytest.raises(ConfigError, match="1 left over: ") as error:
        load(folder)
    assert str(error.value).isprintable()
    assert name.replace("\n", "\\n").replace("\x1b", "\\x1b") in str(error.value)


BROKEN = [float("nan"), float("inf")]


@pytest.mark.parametrize("value", BROKEN)
def test_weights_that_are_no_numbers_are_found_by_name(copy, value):
    folder = copy("omni")
    names = ("model.layers.1.mlp.down_proj.weight", "visual.blocks.0.attn.q.bias")

    def change(tensors):
        for name in names:
            tensors[name].view(-1)[7] = value

    rewrite(folder, change)
    said = r": layers\.1\.mlp\.down_proj\.weight, visual\.blocks\.0\.attn\.q\.bias: the weights hold NaN or infinity"
    with pytest.raises(ConfigError, match=said):
        load(folder)


def test_large_tensors_are_sampled():
    large = torch.zeros(3 * finite.RUNS * finite.RUN)
    for broken in (large.clone().fill_(float("nan")), torch.cat([large, torch.full((4096,), float("nan")), large])):
        sums = finite.FiniteSums()
        sums.add("fine", large)
        sums.add("coded", large.to(torch.uint8))
        sums.add("small", large[:8].to(torch.float8_e4m3fn))
        sums.check("folder")
        assert {type(total) for total in sums._sums.values()} == {float}  # tensors would hold the heap's freed copies
        sums.add("broken", broken.to(torch.bfloat16))
        with pytest.raises(ConfigError, match="folder: broken: the weights hold NaN or infinity"):
            sums.check("folder")


def test_unknown_load_format_is_refused():
    with pytest.raises(ConfigError, match="--load-format pickle: allowed are auto, safetensors, dummy"):
        load(tiny.checkpoint("llama"), load_format="pickle")


def header(value, data=b"\0" * 16, length=None):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
DAMAGED = {
    "empty": (b"", "is empty; download"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run git lfs pull"),
    "a header longer than the file": (header({"a": ENTRY}, length=10_000), "header claims 10000 bytes"),
    "a header of 2**63 bytes": (header({"a": ENTRY}, length=2**63), "header claims"),
    "no JSON": (header(b"{nothing"), "not JSON"),
    "a list": (header([1]), "JSON object"),
    "a range past the end": (header({"a": {**ENTRY, "data_offsets": [8, 24]}}), "range is 8..24 of 16"),
    "a negative range": (header({"a": {**ENTRY, "data_offsets": [-16, 0]}}), "range is -16..0"),
    "a shape of another size": (header({"a": {**ENTRY, "shape": [3, 2]}}), "takes 24 bytes"),
    "a negative shape": (header({"a": {**ENTRY, "shape": [-2, -2]}}), "range is"),
    "an unknown dtype": (header({"a": {**ENTRY, "dtype": "F3"}}), "has dtype F3"),
    "no offsets": (header({"a": {"dtype": "F32", "shape": [2, 2]}}), "entry of a is damaged"),
    "a size beyond all files": (header({"a": {**ENTRY, "shape": [0, 10**30]}}, b""), "2 dimensions, the largest of 10"),
    "an infinite size": (header(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 16]}}'), "is damaged"),
    "an infinite range": (header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1e999]}}'), "is damaged"),
    "no object": (header({"a": 7}), "entry of a is damaged"),
    "lists in lists": (header(b'{"a":' + b"[" * 100_000), "the header is not JSON: maximum recursion depth"),
    "two tensors in one place": (header({"a": ENTRY, "b": ENTRY}), "b begins at byte 0 of the data, .* ends at 16"),
    "a hole": (
        header({"a": {**ENTRY, "data_offsets": [4, 20]}}, b"\0" * 20),
        "a begins at byte 4 of the data, .* at 0",
    ),
    "bytes behind the last": (header({"a": ENTRY}, b"\0" * 19), "3 bytes lie behind the last tensor; download"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_refused_in_one_line(tmp_path, damage):
    content, words = DAMAGED[damage]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        files.open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(tiny.CHECKPOINTS))
def test_tables_name_every_tensor_that_transformers_saves(name):
    config = load_model_config(tiny.checkpoint(name))
    model = build_model(config, torch.float32)
    table = model.weight_table()
    saved = {table.canonical(key) for key in load_file(tiny.checkpoint(name) / "model.safetensors")}
    assert {key for key in saved if not table.ignored(key)} == set(expand(table, model))


def test_every_family_has_a_name_and_its_processor_reads_something():
    for family in families().values():
        assert family.name
        if family.processor:
            assert set(processor_class(family).modalities), family.name
