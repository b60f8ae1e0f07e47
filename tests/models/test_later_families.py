"""Vision models without a file here: what `check` prints for each, from its config.json alone.

DeepSeek-VL2's fields are those of its file (earl-juanico/rca, DeepSeek-VL2/deepseek_vl2/config.json, 7fb4cd9). The
other models' names of classes and of code files are from vllm-project/vllm (tests/models/registry.py,
transformers_utils/configs) or from transformers; sizes, and the keys of sections, are written for this test.
"""

import json

import pytest

from server import cli

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "patch_size": 14, "image_size": 56}  # fmt: skip
TEXT = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
CODE = "{} is not supported: its classes are code in the checkpoint (auto_map), which is never run; "
COPY = "a copy for transformers' own classes may be served"
WITHOUT = "with --language-model-only its decoder is served"
NO_PROCESSOR = "its processor cannot be made by transformers"  # these folders have no processor file

FAMILIES = {
    "MiniCPM-V 2.6": (
        {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 2.6, "query_num": 64, **TEXT,
         "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"},
         "vision_config": TOWER | {"model_type": "siglip_vision_model"}},
        "MiniCPMV: config.json: version=2.6; this family is served in version 4.5",
        None,
    ),
    "DeepSeek-VL2": (
        {"model_type": "deepseek_vl_v2", "tile_tag": "2D", "global_view_pos": "head",
         "language_config": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
         "projector_config": {"model_type": "mlp_projector", "n_embed": 2560}},
        "config.json names no architecture (model_type 'deepseek_vl_v2'); if its class is among",
        None,
    ),
    "DeepSeek-OCR": (
        {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2",
         "auto_map": {"AutoConfig": "modeling_deepseekocr.DeepseekOCRConfig"}, "tile_tag": "2D",
         "projector_config": {"model_type": "mlp_projector", "projector_type": "linear"}},
        CODE.format("DeepseekOCRForCausalLM") + COPY,
        None,
    ),
    "Molmo": (
        {"architectures": ["MolmoForCausalLM"], "model_type": "molmo",
         "auto_map": {"AutoConfig": "config_molmo.MolmoConfig"}, **TEXT},
        CODE.format("MolmoForCausalLM") + COPY,
        None,
    ),
    "Ovis 2.5": (
        {"architectures": ["Ovis2_5"], "model_type": "ovis2_5", "visual_vocab_size": 65536,
         "auto_map": {"AutoConfig": "configuration_ovis2_5.Ovis2_5_Config"}, "llm_config": TEXT},
        CODE.format("Ovis2_5") + COPY,
        None,
    ),
    "Ovis 2": (
        {"architectures": ["Ovis2ForConditionalGeneration"], "model_type": "ovis2", "image_token_id": 150,
         "vision_config": TOWER, "text_config": TEXT | {"model_type": "qwen2"}},
        f"than to put its rows into the prompt (visual_indicator_features), which is not served; {WITHOUT}",
        "natively, as Qwen2ForCausalLM",
    ),
    "PaddleOCR-VL": (
        {"architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl", "image_token_id": 150,
         "vision_config": TOWER, "text_config": TEXT},
        NO_PROCESSOR,
        "through transformers (PaddleOCRVLForConditionalGeneration)",
    ),
    "Aria": (
        {"architectures": ["AriaForConditionalGeneration"], "model_type": "aria", "image_token_index": 9,
         "projector_patch_to_query_dict": {"16": 8}, "vision_config": TOWER | {"model_type": "idefics3_vision"},
         "text_config": TEXT | {"model_type": "aria_text", "moe_num_experts": 8, "moe_topk": 2}},
        NO_PROCESSOR,
        "through transformers (AriaTextForCausalLM)",
    ),
    "Idefics2": (
        {"architectures": ["Idefics2ForConditionalGeneration"], "model_type": "idefics2", "image_token_id": 150,
         "perceiver_config": {"resampler_n_latents": 8, "resampler_depth": 1, "resampler_n_heads": 4,
                              "resampler_head_dim": 8, "num_key_value_heads": 2},
         "vision_config": TOWER, "text_config": TEXT | {"model_type": "mistral"}},
        NO_PROCESSOR,
        "natively, as MistralForCausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_check_says_why_and_what_can_be_done(tmp_path, capsys, name):
    config, refused, alone = FAMILIES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--kv-cache-memory-bytes", "1000000"]
    assert cli.main(["check", str(tmp_path), *flags]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("refused: ")
    assert refused in said[-1]
    assert cli.main(["check", str(tmp_path), *flags, "--language-model-only"]) == (alone is None)
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("refused: ") if alone is None else alone in said[1]
