"""The shape of the embedded model: sizes, special tokens, chat template, and the files that describe them.

Data, training and serving read these values from here only. In: nothing. Out: a
`Qwen2_5OmniThinkerConfig`, and (through `write_folder`) config.json, generation_config.json, preprocessor_config.json,
video_preprocessor_config.json and chat_template.jinja as transformers reads them. About 11.4 million parameters:
text 6.5, vision 3.1, audio 1.8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE.parent.parent / "server" / "embedded"

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
)  # they take the last ids, so that the byte-level entries keep the first 256
TOKEN_ID = {name: VOCAB_SIZE - len(SPECIAL_TOKENS) + i for i, name in enumerate(SPECIAL_TOKENS)}

PATCH = 14  # pixels
MERGE = 2  # patches on each side that become one token: 28 pixels
IMAGE_MIN_PIXELS = 168 * 168  # 36 tokens
IMAGE_MAX_PIXELS = 252 * 252  # 81 tokens
VIDEO_MIN_PIXELS = 112 * 112  # 16 tokens for two frames
VIDEO_MAX_PIXELS = 140 * 140  # 25 tokens for two frames
VIDEO_FPS = 2.0
VIDEO_MIN_FRAMES = 2
VIDEO_MAX_FRAMES = 32
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

SAMPLE_RATE = 16000
HOP = 160
N_FFT = 400
NUM_MELS = 80
AUDIO_WINDOW = 500  # half a chunk in mel frames: audio attention covers 10 s
POSITIONS_PER_SECOND = 25
SECONDS_PER_CHUNK = 2

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% elif message['content'] %}
{%- for part in message['content'] -%}
{%- set kind = part['type'] if part['type'] is defined else '' -%}
{%- if kind in ('image', 'image_url', 'input_image') or 'image' in part or 'image_url' in part -%}
<|vision_bos|><|IMAGE|><|vision_eos|>
{%- elif kind in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}
<|audio_bos|><|AUDIO|><|audio_eos|>
{%- elif kind in ('video', 'video_url', 'input_video') or 'video' in part or 'video_url' in part -%}
<|vision_bos|><|VIDEO|><|vision_eos|>
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

TOOLS_HEAD = "# Tools\nYou may call these functions:\n<tools>\n"
TOOLS_FOOT = '</tools>\nA call is written as\n<tool_call>\n{"name": NAME, "arguments": {KEY: VALUE}}\n</tool_call>'
# Tools have Hermes' format; results are user turns.
CHAT_TEMPLATE = (
    """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- if tools -%}
<|im_start|>system
{% if system %}{{ system }}

{% endif %}"""
    + TOOLS_HEAD
    + """{% for tool in tools %}{{ tool['function'] | tojson }}
{% endfor %}"""
    + TOOLS_FOOT
    + """<|im_end|>
{% endif -%}
"""
    + PLAIN_TEMPLATE.replace(
        """<|im_start|>{{ message['role'] }}
""",
        """{%- if not (tools and loop.first and message['role'] == 'system') -%}
<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}
{% if message['role'] == 'tool' %}<tool_response>
{% endif %}""",
    ).replace(
        """{%- endif %}<|im_end|>
{% endfor -%}""",
        """{%- endif -%}
{%- if message['tool_calls'] -%}
{%- for call in message['tool_calls'] -%}
{%- if message['content'] or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'tool' %}{{ '\\n</tool_response>' }}{% endif %}<|im_end|>
{% endif -%}
{%- endfor -%}""",
    )
)


def tools_text(tools: list[dict[str, Any]]) -> str:
    """The text about tools that CHAT_TEMPLATE writes into the system message."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in tools)
    return f"{TOOLS_HEAD}{''.join(lines)}{TOOLS_FOOT}"


def text_config() -> dict[str, Any]:
    """Eight layers of width 256, four query heads of 64 with two key-value heads; positions have three axes."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
    }


def vision_config() -> dict[str, Any]:
    """Five layers of width 192; the first has attention in windows of 112 pixels, the others over the whole picture."""
    return {
        "depth": 5,
        "hidden_size": 192,
        "intermediate_size": 480,
        "num_heads": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1, 2, 3, 4],
        "out_hidden_size": 256,
    }


def audio_config() -> dict[str, Any]:
    """Four layers of width 192 over 80 mels, with 50 frames a second inside and 25 output tokens a second."""
    return {
        "num_mel_bins": NUM_MELS,
        "encoder_layers": 4,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 640,
        "d_model": 192,
        "max_source_positions": 1500,
        "n_window": AUDIO_WINDOW,
        "output_dim": 256,
    }


def thinker_config():
    """The transformers configuration object of the model."""
    from transformers import Qwen2_5OmniThinkerConfig

    return Qwen2_5OmniThinkerConfig(
        text_config=text_config(),
        vision_config=vision_config(),
        audio_config=audio_config(),
        audio_token_index=TOKEN_ID["<|AUDIO|>"],
        image_token_index=TOKEN_ID["<|IMAGE|>"],
        video_token_index=TOKEN_ID["<|VIDEO|>"],
        audio_start_token_id=TOKEN_ID["<|audio_bos|>"],
        audio_end_token_id=TOKEN_ID["<|audio_eos|>"],
        vision_start_token_id=TOKEN_ID["<|vision_bos|>"],
        vision_end_token_id=TOKEN_ID["<|vision_eos|>"],
        position_id_per_seconds=POSITIONS_PER_SECOND,
        seconds_per_chunk=SECONDS_PER_CHUNK,
        user_token_id=TOKEN_ID["<|im_start|>"],  # part of the format; no code here reads it
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TOKEN_ID["<|im_end|>"],
        pad_token_id=TOKEN_ID["<|endoftext|>"],
        architectures=["Qwen2_5OmniThinkerForConditionalGeneration"],
    )


def build_model(seed: int = 0):
    """A new model in float32 with seeded random weights."""
    import torch
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    torch.manual_seed(seed)
    model = Qwen2_5OmniThinkerForConditionalGeneration(thinker_config())
    model.tie_weights()
    return model


def _preprocessor() -> dict[str, Any]:
    """Settings of pictures and sound in one file, as in the Omni checkpoints."""
    return {
        "processor_class": "Qwen2_5OmniProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "resample": 3,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "min_pixels": IMAGE_MIN_PIXELS,
        "max_pixels": IMAGE_MAX_PIXELS,
        "size": {"shortest_edge": IMAGE_MIN_PIXELS, "longest_edge": IMAGE_MAX_PIXELS},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": NUM_MELS,
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP,
        "n_fft": N_FFT,
        "chunk_length": 30,
        "n_samples": 30 * SAMPLE_RATE,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
    }


def _video_preprocessor() -> dict[str, Any]:
    """Settings of films: two frames a second, two frames a token, smaller pictures than stills."""
    return {
        "processor_class": "Qwen2_5OmniProcessor",
        "video_processor_type": "Qwen2VLVideoProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "resample": 3,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "min_pixels": VIDEO_MIN_PIXELS,
        "max_pixels": VIDEO_MAX_PIXELS,
        "size": {"shortest_edge": VIDEO_MIN_PIXELS, "longest_edge": VIDEO_MAX_PIXELS},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "do_sample_frames": True,
        "fps": VIDEO_FPS,
        "min_frames": VIDEO_MIN_FRAMES,
        "max_frames": VIDEO_MAX_FRAMES,
    }


def write_folder(folder: Path) -> None:
    """Writes every file of the checkpoint but weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = thinker_config()
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    generation = {
        "do_sample": False,
        "eos_token_id": [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
    }
    for name, content in (
        ("generation_config.json", generation),
        ("preprocessor_config.json", _preprocessor()),
        ("video_preprocessor_config.json", _video_preprocessor()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
