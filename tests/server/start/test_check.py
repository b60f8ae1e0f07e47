"""`python -m server check` gives the same yes, no and numbers as a start, from configuration and headers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from engine.base.config import EngineConfig, RanksConfig
from engine.base.errors import ConfigError
from engine.device.cards import Card
from engine.device.memory import GIB, DeviceMemory
from engine.run import estimate as estimate_module
from engine.run import shares as shares_module
from engine.run.estimate import estimate
from engine.run.start import load_runtime
from engine.weights.files import open_checkpoint
from server import cli
from tests import block_drafters, draft_models, drafters, tiny
from tests import pooling_kit as kit

SETTINGS = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def test_a_folder_is_described(capsys):
    assert cli.main(["check", str(tiny.checkpoint("qwen3")), "--kv-cache-memory-bytes", "1000000"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"model: {tiny.checkpoint('qwen3')}"
    assert said[1] == "served: natively, as Qwen3ForCausalLM (Qwen3); takes text"
    assert "F32 in 1 file, 36 tensors are read" in said[2]
    assert said[3].startswith("KV cache: 1.5 MiB per 1,000 tokens")
    assert said[-1].startswith("context: --max-model-len 512 fits; 1.2 such contexts at one time")


def test_a_drafter_is_described_or_refused(tmp_path, capsys):
    folder = drafters.eagle3("qwen3")
    words = ["check", str(tiny.checkpoint("qwen3")), "--speculative-config"]
    assert cli.main([*words, json.dumps({"model": str(folder), "num_speculative_tokens": 3})]) == 0
    line = (
        "drafts: 3 in a step, by EAGLE-3 of 1 layer with 250 of 320 tokens, over the inputs of layers 1, 2, 3; "
        "weights of 0.00 GiB"
    )
    assert line in capsys.readouterr().out.splitlines()
    block = block_drafters.TorchBlocks(block_drafters.Form(), tiny.reference(tiny.checkpoint("qwen3")))
    block_drafters.write(tmp_path, block)
    assert cli.main([*words, json.dumps({"model": str(tmp_path)})]) == 0
    line = (
        "drafts: 7 in a step, by DFlash of 2 layers with blocks of 8 and 320 of 320 tokens, over the inputs of layers "
        "1, 3; weights of 0.00 GiB"
    )
    assert line in capsys.readouterr().out.splitlines()
    assert cli.main([*words, json.dumps({"model": str(tmp_path / "none"), "num_speculative_tokens": 3})]) == 1
    assert "there is no such folder; a drafter on the hub is named ORG/NAME" in capsys.readouterr().out
    assert cli.main([*words, json.dumps({"model": str(folder), "revision": "main"})]) == 1
    assert "is a folder, which has one revision; leave it out" in capsys.readouterr().out


def test_a_draft_model_is_described_or_refused(tmp_path, capsys):
    small = tiny.save(draft_models.FAMILIES["llama"](), tmp_path / "small")
    words = ["check", str(tiny.checkpoint("qwen3")), "--speculative-config"]
    drafts = {"model": str(small), "num_speculative_tokens": 3}
    assert cli.main([*words, json.dumps(drafts)]) == 0
    line = (
        "drafts: 3 in a step, by LlamaForCausalLM with 2 layers of 48, up to 256 tokens; weights of 0.00 GiB, 0.4 MiB "
        "of the KV cache per 1,000 tokens"
    )
    assert line in capsys.readouterr().out.splitlines()
    assert cli.main([*words, json.dumps(drafts | {"max_model_len": 300})]) == 1
    assert f"max_model_len=300: {small} holds 256 tokens" in capsys.readouterr().out


def test_a_tokenizer_with_tokens_for_it_fills_gaps(tmp_path, capsys):
    folder = shutil.copytree(tiny.checkpoint("qwen3"), tmp_path / "coder")
    assert cli.main(["check", str(folder)]) == 0
    assert "fill-in-the-middle" not in capsys.readouterr().out
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_tokens([AddedToken(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")])
    core.save(str(folder / "tokenizer.json"))
    assert cli.main(["check", str(folder)]) == 0
    assert "fill-in-the-middle: yes" in capsys.readouterr().out.splitlines()


def test_tensors_of_multi_token_prediction_are_counted(tmp_path, capsys):
    folder = shutil.copytree(tiny.checkpoint("glm4_moe"), tmp_path / "glm")
    assert cli.main(["check", str(folder)]) == 0
    assert "multi-token prediction" not in capsys.readouterr().out
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.layers.3.eh_proj.weight": torch.zeros(2)}, file)
    assert cli.main(["check", str(folder)]) == 0
    assert " tensors are read, 1 of multi-token prediction are not; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "flags", "reason"),
    [
        (
            {"architectures": ["NoSuchForCausalLM"]},
            [],
            "NoSuchForCausalLM is not supported; `omniloop docs models` lists all",
        ),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, [], "RwkvForCausalLM: is in transformers"),
        ({"num_hidden_layers": 4}, [], "missing: layers.3.input_layernorm.weight"),
        ({"intermediate_size": 100}, [], "has shape [112, 64], the configuration asks for [100, 64]"),
        ({}, ["--max-model-len", "600"], "--max-model-len 600: this checkpoint holds 512; ask for at most 512"),
        ({}, ["--max-model-len", "500", "--num-gpu-blocks-override", "9"], "the KV cache holds 144 tokens"),
        ({}, ["--dtype", "float32", "--device", "cuda"], "--device cuda: torch"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
            ["--load-format", "dummy", "--enable-prompt-embeds"],
            "--enable-prompt-embeds: LlamaForCausalLM reads tokens only; leave it out",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_start_s_reason(tmp_path, capsys, change, flags, reason):
    folder = shutil.copytree(tiny.checkpoint("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    assert cli.main(["check", str(folder), *flags]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("refused: ")
    assert reason in said[-1]


def test_experts_that_windows_forget_are_refused_as_the_start_does(tmp_path, capsys):
    config = json.loads((tiny.checkpoint("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 9}))
    assert cli.main(["check", str(tmp_path), "--load-format", "dummy", "--enable-return-routed-experts"]) == 1
    assert "refused: --enable-return-routed-experts: every layer of this model has a" in capsys.readouterr().out


def test_without_weights_random_ones_are_described(tmp_path, capsys):
    shutil.copy(tiny.checkpoint("llama") / "config.json", tmp_path)
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "holds no weights: neither model.safetensors" in capsys.readouterr().out
    dummy = ["check", str(tmp_path), "--load-format", "dummy"]
    assert cli.main(dummy) == 1
    assert "refused: " + str(tmp_path) + ": no tokenizer.json" in capsys.readouterr().out
    assert cli.main([*dummy, "--skip-tokenizer-init"]) == 0
    assert "weights: random (--load-format dummy)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere: there is no such folder or file"),
        (["--tool-call-parser", "nonsense"], "--tool-call-parser nonsense: is not known"),
        (["--chat-template", "/nowhere/a.jinja"], "--chat-template /nowhere/a.jinja: is not a readable file"),
        (["--chat-template", "{{ end"], "--chat-template: The chat template does not compile"),
    ],
)
def test_flags_about_texts_are_refused_as_the_start_refuses_them(capsys, flags, reason):
    assert cli.main(["check", str(tiny.checkpoint("llama")), *flags]) == 1
    assert f"refused: {reason}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_the_numbers_are_those_of_a_start(name):
    config = EngineConfig(str(tiny.checkpoint(name)), kv_cache_memory_bytes=400_000, **SETTINGS)
    found = estimate(config, open_checkpoint(config.model))
    runtime = load_runtime(config, {}, lambda: None)
    assert found.context == runtime.limits.max_model_len
    assert found.num_blocks == runtime.limits.num_blocks


def test_ranks_on_a_cpu_are_described(capsys):
    flags = ["--kv-cache-memory-bytes", "1000000", "--device", "cpu", "-tp", "2"]
    assert cli.main(["check", str(tiny.checkpoint("qwen3")), *flags]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ranks: "))
    said = r"2 ranks, simulated on the CPU; weights on each: 0.00 GiB; each caches [\d,]+ tokens, its part of the heads"
    assert re.fullmatch("ranks: " + said, line)


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda: kit.encoder("bert", 3), "nothing is cached"), (lambda: kit.embedder("qwen3"), "each caches 16,384 t")],
)
def test_ranks_of_models_for_vectors_and_scores(make, said, capsys):
    folder = str(make())
    assert cli.main(["check", folder, "--max-model-len", "64", "--device", "cpu", "-tp", "2"]) == 0
    assert f"2 ranks, simulated on the CPU; weights on each: 0.00 GiB; {said}" in capsys.readouterr().out
    config, shards = EngineConfig(folder, tensor_parallel=2, **SETTINGS), open_checkpoint(folder)
    found, whole = (estimate(each, shards) for each in (config, replace(config, tensor_parallel=1)))
    assert whole.weight_bytes / 2 <= max(found.of_ranks) < whole.weight_bytes <= sum(found.of_ranks)


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_ranks_share_the_bytes_of_the_weights(quantization):
    folder = str(tiny.checkpoint("qwen3"))
    config = EngineConfig(
        folder, tensor_parallel=2, quantization=quantization, kv_cache_memory_bytes=400_000, **SETTINGS
    )
    found = estimate(config, open_checkpoint(folder))
    whole = estimate(replace(config, tensor_parallel=1), open_checkpoint(folder))
    assert whole.weight_bytes / 2 <= max(found.of_ranks) < whole.weight_bytes
    runtime = load_runtime(config, {}, lambda: None)
    assert found.num_blocks == runtime.limits.num_blocks
    runtime.model.close()


def test_the_first_card_holds_the_drafter(monkeypatch):
    """So it limits the KV cache."""
    folder = str(tiny.checkpoint("qwen3"))
    monkeypatch.setattr(estimate_module, "choose_device", lambda asked: "cuda:0")
    monkeypatch.setattr(shares_module, "cards_of", lambda ranks: [Card("H200", 10 * GIB)] * ranks)
    monkeypatch.setattr(shares_module, "device_memory", lambda device: DeviceMemory(10 * GIB, 10 * GIB))
    config, found = EngineConfig(folder, tensor_parallel=2, dtype="bfloat16"), []
    drafts = {"model": str(drafters.eagle3("qwen3")), "num_speculative_tokens": 3}
    for speculative in ({}, drafts):
        found.append(estimate(replace(config, speculative=speculative), open_checkpoint(folder)))
    (first, other), (plain, same) = found[1].of_ranks, found[0].of_ranks
    assert other == same
    drafter = first - plain
    assert drafter > 20_000
    assert found[1].num_blocks < found[0].num_blocks


def test_ranks_share_the_experts():
    folder = str(tiny.checkpoint("mixtral"))
    config = EngineConfig(folder, tensor_parallel=2, ranks=RanksConfig(whole_experts=True), **SETTINGS)
    found = estimate(config, open_checkpoint(folder)).of_ranks
    by_width = estimate(replace(config, ranks=RanksConfig()), open_checkpoint(folder)).of_ranks
    assert found[1] < by_width[1] < by_width[0] < found[0]  # three and two of five experts


def test_ranks_share_the_states(capsys):
    folder = str(tiny.checkpoint("qwen3_5_text-states"))
    config = EngineConfig(
        folder, tensor_parallel=2, block_size=8, kv_cache_memory_bytes=4_000_000, **{**SETTINGS, "max_model_len": 80}
    )
    found = estimate(config, open_checkpoint(folder))
    whole = estimate(replace(config, tensor_parallel=1), open_checkpoint(folder))
    assert abs(2 * found.states.state_bytes - whole.states.state_bytes) < 0.1 * whole.states.state_bytes  # padding
    runtime = load_runtime(config, {}, lambda: None)
    assert found.num_blocks == runtime.limits.num_blocks
    runtime.model.close()
    flags = ["--kv-cache-memory-bytes", "4000000", "--block-size", "8", "--device", "cpu", "-tp", "2"]
    assert cli.main(["check", folder, *flags]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("states"))
    assert line.startswith("states on each of 2 ranks: 0.0 MB each, ")


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}  # fmt: skip


def test_a_model_too_large_for_the_device_is_described_before_it_is_refused(monkeypatch, tmp_path, capsys):
    """Users see which device the model needs."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(estimate_module, "choose_device", lambda asked: "cuda:0")
    monkeypatch.setattr(shares_module, "device_memory", lambda device: DeviceMemory(8 * GIB, 8 * GIB))
    assert cli.main(["check", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init"]) == 1
    served, weights, cache, device, refused = capsys.readouterr().out.splitlines()[1:]
    assert served == "served: natively, as LlamaForCausalLM (Llama); takes text"
    assert "14.96 GiB on the device" in weights
    assert cache == "KV cache: 125.0 MiB per 1,000 tokens"
    assert device.startswith("device: cuda:0, 8.00 GiB, 8.00 GiB free")
    assert refused.startswith("refused: --gpu-memory-utilization 0.92 of 8.00 GiB: the weights take 14.96 GiB")


def test_two_cards_hold_what_one_does_not(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(estimate_module, "choose_device", lambda asked: "cuda:0")
    cards = [Card("H200", 16 * GIB), Card("H200", 15 * GIB)]
    monkeypatch.setattr(shares_module, "cards_of", lambda ranks: cards[:ranks])
    free = {f"cuda:{number}": card.free for number, card in enumerate(cards)}
    monkeypatch.setattr(shares_module, "device_memory", lambda device: DeviceMemory(16 * GIB, free[device]))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "-tp"]
    assert cli.main(["check", str(tmp_path), *flags, "2"]) == 0
    *_, ranks, cache, _, _ = capsys.readouterr().out.splitlines()
    assert ranks.startswith("ranks: 2 GPUs; weights on each: 7.97 GiB; each caches ")
    assert cache.startswith("KV cache: 62.5 MiB per 1,000 tokens")
    tokens = int(ranks.partition("each caches ")[2].split()[0].replace(",", ""))
    assert 40_000 < tokens < 90_000  # of the card that has less
    assert cli.main(["check", str(tmp_path), *flags, "4"]) == 1
    assert "--tensor-parallel-size 4: this process sees 2 GPUs" in capsys.readouterr().out


def test_an_accelerator_s_memory_decides(monkeypatch, tmp_path):
    """An 8B with random weights, on simulated devices."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(estimate_module, "choose_device", lambda asked: "cuda:0")

    def on(total, **settings):
        monkeypatch.setattr(shares_module, "device_memory", lambda device: DeviceMemory(total * GIB, total * GIB))
        return estimate(EngineConfig(str(tmp_path), **settings), None)

    large = on(80)
    assert large.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert large.kv_bytes == 131_072_000
    assert large.context == 131072
    assert large.contexts > 3
    small = on(24)
    assert 16_000 < small.context < 60_000
    assert on(24, max_model_len=small.context).context == small.context
    with pytest.raises(ConfigError, match=f"the KV cache holds {small.context} tokens"):
        on(24, max_model_len=small.context + 16)
    with pytest.raises(ConfigError, match=r"the weights take 14.96 GiB"):
        on(16)
    with pytest.raises(ConfigError, match=r"the smallest value that fits is"):
        on(24, gpu_memory_utilization=0.5)
