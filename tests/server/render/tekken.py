"""Writes small tekken.json, sentencepiece and tiktoken files in the real formats."""

import base64
import functools
import json

from tests.server.render import vocab

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
    "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]",
]  # fmt: skip
NUM_SPECIAL = 40


@functools.cache
def merges():
    """Bytes of every token, by rank: all single bytes, then the merges of a byte-level training."""
    core = vocab.byte_level()
    letters = {letter: byte for byte, letter in _letters().items()}
    pieces = [bytes([byte]) for byte in range(256)]
    learned = sorted(core.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    pieces += [data for name, _ in learned if len(data := bytes(letters[char] for char in name)) > 1]
    return pieces


def _letters():
    from server.render.token_bytes import byte_alphabet

    return {byte: chr(code) for code, byte in byte_alphabet().items()}


def write_tekken(folder, version="v13", image=True, audio=False, streaming=None):
    """Writes a tekken.json of a version, with that version's special tokens.

    `streaming`: more fields of `audio`, for a model that transcribes audio while it arrives.
    """
    special = SPECIAL if version == "v15" else SPECIAL[:-2]
    if streaming is not None:
        special = [*special, "[STREAMING_PAD]", "[STREAMING_WORD]"]
    data = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(merges()),
            "default_vocab_size": len(merges()) + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate(merges())
        ],
        "special_tokens": [{"rank": k, "token_str": text, "is_control": True} for k, text in enumerate(special)],
    }
    if version == "v15":
        values = ["none", "high"]
        data["model_settings_builder"] = {
            "reasoning_effort": {"type": "enum", "values": values, "accepts_none": True, "default": "none"}
        }
    if image:
        data["image"] = {"image_patch_size": 14, "max_image_size": 1024, "spatial_merge_size": 2}
    if audio or streaming is not None:
        more = {"num_mel_bins": 128, **(streaming or {})}
        spectrogram = {"num_mel_bins": more.pop("num_mel_bins"), "hop_length": 160, "window_size": 400}
        data["audio"] = {"sampling_rate": 16000, "frame_rate": 12.5, "audio_encoding_config": spectrogram, **more}
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(data))
    return folder


def write_tiktoken(folder, name="tiktoken.model", config=None):
    """Writes a merge file, and tokenizer_config.json if `config` is given."""
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(piece) + b" " + str(rank).encode() for rank, piece in enumerate(merges())]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
