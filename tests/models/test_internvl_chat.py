"""InternVL in its makers' layout: transformers' model with the tensor names of modeling_internvl_chat.py."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from mm.item import MediaItem
from mm.processors.internvl import CONTEXT, InternVLChat
from tests import tiny
from tests.mm.made import data_url, film, noise, picture, ramp
from tests.models.harness import Harness, load
from tests.models.seeing import PLAIN, encode, prepare
from tests.server.conftest import config_of, maker, ready

# https://huggingface.co/OpenGVLab/InternVL3-8B/blob/main/modeling_intern_vit.py, and its modeling_internvl_chat.py
RENAMED = (
    ("model.vision_tower.", "vision_model."), ("model.language_model.", "language_model.model."),
    ("vision_tower.", "vision_model."), ("embeddings.cls_token", "embeddings.class_embedding"),
    ("patch_embeddings.projection", "patch_embedding"), ("position_embeddings", "position_embedding"),
    ("encoder.layer.", "encoder.layers."), ("layernorm_before", "norm1"), ("layernorm_after", "norm2"),
    ("attention.projection_layer", "attn.proj"), ("attention.q_norm", "attn.q_norm"),
    ("attention.k_norm", "attn.k_norm"), ("lambda_1", "ls1"), ("lambda_2", "ls2"),
    ("model.multi_modal_projector.", "multi_modal_projector."), ("multi_modal_projector.layer_norm", "mlp1.0"),
    ("multi_modal_projector.linear_1", "mlp1.1"), ("multi_modal_projector.linear_2", "mlp1.3"),
)  # fmt: skip


def published(name, folder, **changes):
    """Writes a checkpoint of transformers' layout in its makers' layout."""
    source = tiny.checkpoint(name)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_text(file.read_text().replace("<|IMAGE|>", CONTEXT))
        elif file.suffix != ".safetensors":
            shutil.copy(file, folder)
    old = json.loads((source / "config.json").read_text())
    vision = old["vision_config"]
    config = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "downsample_ratio": 0.5,
        "dynamic_image_size": True, "force_image_size": vision["image_size"][0], "select_layer": -1, "ps_version": "v2",
        "max_dynamic_patch": 4, "min_dynamic_patch": 1, "use_thumbnail": True, "llm_config": old["text_config"],
        "tie_word_embeddings": False, "eos_token_id": old.get("eos_token_id"),
        "vision_config": {
            "model_type": "intern_vit_6b", "image_size": vision["image_size"][0], "patch_size": vision["patch_size"][0],
            "qkv_bias": vision["attention_bias"], "qk_normalization": vision["use_qk_norm"],
            **{key: vision[key] for key in (
                "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "norm_type",
                "layer_norm_eps", "hidden_act",
            )},
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    renamed = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        for have, wanted in RENAMED:
            key = key.replace(have, wanted)
        renamed[key] = tensor
    for key in [key for key in renamed if ".attention.q_proj." in key]:
        pieces = [renamed.pop(key.replace("q_proj", f"{which}_proj")) for which in "qkv"]
        renamed[key.replace("attention.q_proj", "attn.qkv")] = torch.cat(pieces)
    save_file({k: v.contiguous() for k, v in renamed.items() if "mask_token" not in k}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["internvl", "internvl-6b", "internvl-moe", "internvl-gpt_oss", "internvl-phi3"])
@torch.inference_mode()
def test_logits_are_those_of_the_layout_of_transformers(tmp_path, name):
    ours, same = Harness(load(published(name, tmp_path))), Harness(load(tiny.checkpoint(name)))
    for prompt in ("text", "large picture"):
        assert torch.equal(ours.prefill(prepare(name, prompt, ours)), same.prefill(prepare(name, prompt, same)))


async def test_pictures_are_seen_over_the_wire(tmp_path):
    url = {"url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png")}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, "logprobs": True}
    answers = []
    for folder in (published("internvl", tmp_path), tiny.checkpoint("internvl")):
        async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
            answer = (await maker(state)().post("/v1/chat/completions", json=body)).json()
            answers.append((answer["usage"]["prompt_tokens"], answer["choices"][0]["logprobs"]))
    assert answers[0] == answers[1]


async def test_films_and_pictures_of_a_prompt_stand_at_one_token(tmp_path):
    """Media follow the order of the parts; the template writes only text, like the makers' template."""
    folder = published("internvl", tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}")
    shown = {"type": "image_url", "image_url": {"url": data_url(picture(noise(60, 60, 1), "PNG"), "image/png")}}
    moved = {"type": "video_url", "video_url": {"url": data_url(film(ramp(20)), "video/mp4")}}
    counts, answers = [], []
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        for parts in ([shown], [moved], [shown, moved], [moved, shown]):
            body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]}
            body |= {"max_tokens": 4, "temperature": 0, "logprobs": True}
            answer = (await maker(state)().post("/v1/chat/completions", json=body)).json()
            counts.append(answer["usage"]["prompt_tokens_details"]["multimodal_tokens"])
            answers.append(answer["choices"][0]["logprobs"])
    tokens = counts[0]["image"]
    assert counts[1:] == [{"video": 8 * tokens}, *[{"image": tokens, "video": 8 * tokens}] * 2]
    assert answers[2] != answers[3]


def test_what_config_says_of_tiles_is_done(tmp_path):
    folder = published("internvl", tmp_path)
    (folder / "preprocessor_config.json").write_text('{"size": 56}')
    config = json.loads((folder / "config.json").read_text())

    def tiles(**changes):
        ours = InternVLChat(folder, {**config, **changes}, encode=lambda text: [7] if text == CONTEXT else encode(text))
        item = MediaItem("image", noise(100, 100), scale=ours.plan_image(100, 100, PLAIN))
        assert ours.patching.mean == (0.485, 0.456, 0.406)
        assert ours.placeholder("image") == 7
        return len(ours.process(item, bytes(16), PLAIN).parts[0].features["pixel_values"]) // 16

    assert tiles() == 5
    assert tiles(use_thumbnail=False) == 4
    assert tiles(dynamic_image_size=False) == tiles(max_dynamic_patch=1) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ps_version": "v1"}, "ps_version='v1'; how neighbours become rows is supported as 'v2'"),
        ({"force_image_size": 112}, "force_image_size=112 must be the tower's image_size=56"),
        ({"llm_config": {"model_type": "qwen9"}}, "model_type='qwen9' is not supported here"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_model_config(published("internvl", tmp_path, **change))


async def test_without_the_token_of_pictures_the_start_is_refused(tmp_path):
    complaint = "<IMG_CONTEXT> is not found there; --language-model-only serves"
    config = json.loads((published("internvl", tmp_path) / "config.json").read_text())
    with pytest.raises(ValueError, match=complaint):
        InternVLChat(tmp_path, config, encode=lambda text: [1, 2])
    served = {"model": str(tmp_path), "num_threads": 1, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=complaint):
        async with ready(config_of(model=served)):
            pass
