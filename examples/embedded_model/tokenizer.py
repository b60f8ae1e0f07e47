"""Trains the tokenizer: byte-level BPE, 4096 entries, Qwen's way of splitting text, every digit a token of its own.

The corpus is the generators' text and ordinary English: the docstrings of Python's standard library and the word list
in this folder. In: a seed. Out: tokenizer.json and tokenizer_config.json in the checkpoint folder.

    python -m examples.embedded_model.tokenizer
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from examples.embedded_model.blueprint import HERE, MODEL_DIR, SPECIAL_TOKENS, VOCAB_SIZE

CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def library_text() -> Iterator[str]:
    """Docstrings of the standard library's top-level modules, in name order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield text


def corpus(seed: int, num_samples: int) -> Iterator[str]:
    """The generators' text, the word list, then ordinary English."""
    from examples.embedded_model.mixture import texts_only

    yield from texts_only(seed, num_samples)
    words = (HERE / "words.txt").read_text().split()
    for word in words:  # with and without a space in front, so that both become entries
        yield f" {word}"
        yield word
    yield from library_text()


def train(texts: Iterator[str]):
    """Trains the merges; special tokens get the last ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    return tokenizer


def write(tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and the tokenizer_config.json that transformers needs with it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
        "extra_special_tokens": {
            "image_token": "<|IMAGE|>",
            "video_token": "<|VIDEO|>",
            "audio_token": "<|AUDIO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 8192,
        "split_special_tokens": False,
        "processor_class": "Qwen2_5OmniProcessor",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Trains the tokenizer and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=40000)
    args = parser.parse_args()
    tokenizer = train(corpus(args.seed, args.samples))
    write(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} entries -> {args.out / 'tokenizer.json'}")


if __name__ == "__main__":
    main()
