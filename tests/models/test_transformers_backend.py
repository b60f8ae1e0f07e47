"""Architectures without a file here: transformers' modules in our steps give transformers' logits and tokens."""

import functools
import json
import logging
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.base.errors import ConfigError
from engine.base.model_config import Routing
from engine.kernels.moe.grouped import grouped_reference
from engine.models.registry import MODALITIES, build_model, load_model_config
from engine.models.transformers_backend import experts
from engine.models.transformers_backend.calls import Calls, ExpertsCall
from engine.weights.load import load_weights, weight_bytes
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.invariance.devices import Answer, Device
from tests.models.harness import Harness
from tests.models.test_decoders import greedy, oracle, prompt
from tests.models.test_families import LENGTHS, TOKENS, check_busy

BUSY = ("deepseek_v3", "vaultgemma", "gpt_bigcode")  # unequal widths and experts, windows and soft caps, one KV head
PROMPTS = [prompt(length, seed=9) for length in LENGTHS]


@functools.cache
def load(name, implementation="auto"):
    folder = tiny.checkpoint(name)
    config = load_model_config(folder, implementation=implementation)
    assert config.implementation == "transformers"
    model = build_model(config, torch.float32)
    load_weights(model, str(folder))
    return model


@pytest.mark.parametrize("name", tiny.THROUGH_TRANSFORMERS)
def test_logits_and_tokens_equal_transformers(name):
    """Logits are equal in one step, in chunks, and mixed with another row."""
    harness, tokens = Harness(load(name)), prompt(50)
    with torch.inference_mode():
        want = oracle(name)(input_ids=torch.tensor([tokens])).logits[0]
        assert (harness.prefill(harness.add(tokens)) - want).abs().max() <= 2e-4
        assert (harness.prefill(harness.add(tokens), 7) - want).abs().max() <= 2e-4
        row, other = harness.add(tokens), harness.add(prompt(9))
        harness.step((row, 33))
        mixed = harness.step((other, 4), (row, 17))
        assert (mixed[4:] - want[33:]).abs().max() <= 2e-4
        harness = Harness(load(name))
        assert harness.generate(harness.add(tokens), 12, chunk=11) == greedy(name, tokens, 12)


@pytest.mark.parametrize("name", BUSY)
async def test_tokens_of_a_busy_engine_equal_transformers(name):
    want = [Answer(greedy(name, tokens, TOKENS)) for tokens in PROMPTS]
    await check_busy(tiny.checkpoint(name), Device("cpu"), want)


async def test_so_do_tokens_of_an_accelerators_steps(monkeypatch):
    """Tokens are equal in an accelerator's padded steps and recorded graphs, on CPU tensors."""
    monkeypatch.setattr("engine.run.start.open_accelerator", lambda _device: HostAccelerator())
    want = [Answer(greedy("cwm", tokens, TOKENS)) for tokens in PROMPTS]
    await check_busy(tiny.checkpoint("cwm"), Device("cpu"), want)


@pytest.mark.parametrize("name", ["deepseek_v3", "flex_olmo"])
def test_experts_of_an_accelerator_are_multiplied_without_a_number_on_the_host(name, monkeypatch):
    """Our grouped product (here its reference) runs; transformers' own copies the number of rows to the host."""

    def launch(x, weight, bias, pairs, activation, _tile, of_tokens):
        return grouped_reference(x, weight, bias, pairs, activation, None, of_tokens)

    def refused(*_, **__):
        raise AssertionError("a graph records no copy to the host")

    monkeypatch.setattr(experts, "launch_grouped", launch)
    monkeypatch.setattr(experts, "tile_of", lambda *_: None)
    harness, tokens = Harness(load(name)), prompt(30)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, experts.NAME, experts.experts_on_device)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", refused)
    with torch.inference_mode():
        got = harness.prefill(harness.add(tokens), 9)
        monkeypatch.undo()
        want = oracle(name)(input_ids=torch.tensor([tokens])).logits[0]
    assert (got - want).abs().max() <= 2e-4


def test_layers_that_hand_on_other_rows_than_tokens_have_no_experts_to_answer_with():
    tokens, others = ExpertsCall(0, Routing(8, 3), True), ExpertsCall(1, Routing(8, 3), False)
    assert Calls(experts=[tokens]).sparse == {0: tokens}
    assert Calls(experts=[tokens, others]).sparse == {}
    assert Calls(experts=[tokens, tokens]).sparse == {}  # two calls in one layer
    routings = load_model_config(tiny.checkpoint("deepseek_v3")).text.routings
    assert [(routing.num_experts, routing.top_k) for routing in routings] == [(8, 3)] * 2


def test_a_family_of_ours_goes_that_way_when_it_is_asked_to():
    harness, tokens = Harness(load("llama", "transformers")), prompt(30)
    with torch.inference_mode():
        want = oracle("llama")(input_ids=torch.tensor([tokens])).logits[0]
        assert (harness.prefill(harness.add(tokens), 9) - want).abs().max() <= 2e-4
    assert load_model_config(tiny.checkpoint("llama")).implementation == "native"


def test_the_decoder_of_a_model_with_towers_is_served_without_them(tmp_path):
    folder = tiny.checkpoint("ernie4_5")
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["NoSuchForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    saved = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors(folder).items()}
    save_file({**saved, "model.visual.patch_embed.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="NoSuchForConditionalGeneration is not supported"):
        load_model_config(tmp_path)
    model = build_model(load_model_config(tmp_path, without=MODALITIES), torch.float32)
    load_weights(model, str(tmp_path))
    harness, tokens = Harness(model), prompt(30)
    with torch.inference_mode():
        want = oracle("ernie4_5")(input_ids=torch.tensor([tokens])).logits[0]
    assert (harness.prefill(harness.add(tokens), 9) - want).abs().max() <= 2e-4


def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_frequencies_that_stretch_are_those_of_the_longest_context():
    """The longest served context decides for all rows, so rows of a step do not change each other's frequencies."""
    config = load_model_config(tiny.checkpoint("phi3-short"), implementation="transformers")
    model = build_model(config, torch.float32)
    load_weights(model, str(tiny.checkpoint("phi3-short")))
    native = build_model(load_model_config(tiny.checkpoint("phi3-short")), torch.float32)
    load_weights(native, str(tiny.checkpoint("phi3-short")))
    tokens = prompt(40)
    got, want = (each.prefill(each.add(tokens), 9) for each in (Harness(model), Harness(native)))
    assert (got - want).abs().max() <= 2e-4


def test_weights_are_planned_before_they_are_read():
    model = build_model(load_model_config(tiny.checkpoint("deepseek_v3")), torch.float32)
    assert weight_bytes(model) == sum(value.numel() * 4 for value in oracle("deepseek_v3").state_dict().values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "without its attention interface"),
        ({"architectures": ["DogeForCausalLM"], "model_type": "doge"}, "a mask of its own"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "is not causal"),
        ({"architectures": ["MllamaForCausalLM"], "model_type": "mllama"}, "takes no position_ids"),
        ({"architectures": ["MiniMaxForCausalLM"], "model_type": "minimax"}, "linear_attention"),
        ({"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "hidden_act": "softer"}, "cannot be built"),
        (
            {
                "architectures": ["OlmoForCausalLM"],
                "model_type": "olmo",
                "quantization_config": {"quant_method": "fp8"},
            },
            "its weights are quantised",
        ),
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "none"}, "NoSuchForCausalLM is not supported"),
    ],
)
def test_what_paged_attention_does_not_compute_is_refused_in_a_line(tmp_path, changes, said):
    given = json.loads((tiny.checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, **changes}))
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_package_that_fails_when_transformers_imports_it_is_reported_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)  # torchvision for another torch
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM: cannot be imported .*must fit torch \d.*: import of"):
        load_model_config(tiny.checkpoint("llama"), implementation="transformers")


@pytest.mark.parametrize(
    ("name", "said"),
    [("dbrx", "DbrxForCausalLM: reads numbers on the host"), ("lfm2", "Lfm2ForCausalLM: has conv: only attention")],
)
def test_a_module_of_which_ours_computes_more_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        load_model_config(tiny.checkpoint(name), implementation="transformers")


def test_an_architecture_that_transformers_lacks_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    with pytest.raises(ConfigError, match="NoSuchForCausalLM is among neither the decoders nor the models with towers"):
        load_model_config(tmp_path, implementation="transformers")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; supported is 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported; supported is 'noaux_tc'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9: a token chooses 1 to 8 of n_routed_experts=8 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be an integer from 1"),
        ({"n_group": 3}, "n_routed_experts=8 experts in 3 groups of which 1 are kept"),
        ({"n_group": 4, "topk_group": 1}, "1 of 4 groups hold 2 experts; num_experts_per_tok=3 needs at least as many"),
    ],
)
def test_routing_that_its_module_passes_over_or_meets_in_a_step_is_refused_at_the_start(tmp_path, changes, said):
    given = json.loads((tiny.checkpoint("deepseek_v3") / "config.json").read_text())
    for known in ({"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, {"scoring_func": None}):
        (tmp_path / "config.json").write_text(json.dumps({**given, **known}))
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**given, **changes}))
    with pytest.raises(ConfigError, match=f"DeepseekV3ForCausalLM: config.json: {said}"):
        load_model_config(tmp_path)


def test_deepseek_v2_names_the_rule_by_which_groups_count(tmp_path):
    given = json.loads((tiny.checkpoint("deepseek_v3") / "config.json").read_text())
    given |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "n_group": 3}
    (tmp_path / "config.json").write_text(json.dumps({**given, "topk_method": "greedy"}))
    load_model_config(tmp_path)
    for method, said in (("group_limited_greedy", "8 experts in 3 groups"), ("noaux_tc", "topk_method='noaux_tc'")):
        (tmp_path / "config.json").write_text(json.dumps({**given, "topk_method": method}))
        with pytest.raises(ConfigError, match=said):
            load_model_config(tmp_path)


def test_a_copied_class_under_another_models_name_and_layers_behind_the_last_one(tmp_path):
    """Kimi-K2 copies DeepSeek-V3's class; a layer for further predicted tokens is not read."""
    folder = tiny.checkpoint("deepseek_v3")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    further = {"model.layers.3.eh_proj.weight": torch.ones(72, 144), "model.layers.3.enorm.weight": torch.ones(72)}
    save_file({**tensors(folder), **further}, tmp_path / "model.safetensors")
    for count in (1, 0):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
        model = build_model(load_model_config(tmp_path), torch.float32)
        if not count:
            with pytest.raises(ConfigError, match=r"2 left over: model.layers.3"):
                load_weights(model, str(tmp_path))
            return
        load_weights(model, str(tmp_path))
        harness, tokens = Harness(model), prompt(30)
        with torch.inference_mode():
            want = oracle("deepseek_v3")(input_ids=torch.tensor([tokens])).logits[0]
        assert (harness.prefill(harness.add(tokens), 9) - want).abs().max() <= 2e-4


async def test_the_start_says_so(caplog):
    with caplog.at_level(logging.INFO):
        async with Device("cpu").running(tiny.checkpoint("olmo"), max_model_len=64):
            pass
    assert "OlmoForCausalLM has no file here: transformers' module runs in our steps" in caplog.text
