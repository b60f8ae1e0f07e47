"""Tokenizers of several files (vocab.json and merges.txt, vocab.txt): the ids and texts of transformers' classes."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from engine.base.errors import ConfigError
from server.render.load_tokenizer import load_tokenizer
from tests.server.render import vocab
from tests.tiny import quiet

END = "<|endoftext|>"
SENTENCES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
PARENTS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
OPT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>") | {"pad_token": "<pad>"}
CHAT = [{"content": text, "special": True, "normalized": False} for text in (END, "<|im_start|>", "<|im_end|>")]


@functools.cache
def merges(suffix: str, *special: str) -> tuple[str, str]:
    """(vocab.json, merges.txt)."""
    core = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False,
        end_of_word_suffix=suffix,
    )  # fmt: skip
    core.train_from_iterator(vocab.corpus()[:20], trainer)
    model = json.loads(core.to_str())["model"]
    pairs = "".join(f"{first} {second}\n" for first, second in model["merges"])
    return json.dumps(model["vocab"], ensure_ascii=False), f"#version: 0.2\n{pairs}"


@functools.cache
def words(*special: str) -> str:
    """vocab.txt."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=list(special), show_progress=False)
    core.train_from_iterator([line.lower() for line in vocab.corpus()[:20]], trainer)
    known = core.get_vocab()
    return "".join(f"{token}\n" for token in sorted(known, key=known.__getitem__))


def folder_of(
    path: Path, model_type: str, config: dict[str, Any], added: tuple[str, ...] = (), suffix: str = "", special=()
) -> Path:
    """A folder with the files of a slow tokenizer; tokens in `added` stand in added_tokens.json."""
    first = 0
    if config.get("tokenizer_class", "Bert").startswith(("Bert", "DistilBert", "MPNet")):
        (path / "vocab.txt").write_text(words(*special))
    else:
        vocabulary, pairs = merges(suffix, *special)
        (path / "vocab.json").write_text(vocabulary)
        (path / "merges.txt").write_text(pairs)
        first = len(json.loads(vocabulary))
    if "added_tokens_decoder" in config:
        config = config | {"added_tokens_decoder": {str(first + k): entry for k, entry in enumerate(CHAT)}}
    if added:
        (path / "added_tokens.json").write_text(json.dumps({text: first + k for k, text in enumerate(added)}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "config": {"tokenizer_class": "GPT2Tokenizer"}, "special": (END,)},
    "opt": {
        "model_type": "opt",
        "config": {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **OPT},
        "special": ("<pad>", "</s>"),
    },
    "a space before the text": {
        "model_type": "gpt2",
        "config": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
        "special": (END,),
    },
    "qwen2": {
        "model_type": "qwen2",
        "config": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": True},
    },
    "added_tokens.json": {
        "model_type": "qwen2",
        "config": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        "added": (END, "<|im_start|>", "<|im_end|>", "<tool>"),
    },
    "roberta": {"model_type": "roberta", "config": {"tokenizer_class": "RobertaTokenizer"}, "special": SENTENCES},
    "clip": {
        "model_type": "clip",
        "config": {"tokenizer_class": "CLIPTokenizer"},
        "special": ("<|startoftext|>", END),
        "suffix": "</w>",
    },
    "bert": {"model_type": "bert", "config": {"tokenizer_class": "BertTokenizer"}, "special": PARENTS},
    "a cased bert without a class": {"model_type": "bert", "config": {"do_lower_case": False}, "special": PARENTS},
    "distilbert": {
        "model_type": "distilbert",
        "config": {"tokenizer_class": "DistilBertTokenizer", "strip_accents": False},
        "special": PARENTS,
    },
    "mpnet": {
        "model_type": "mpnet",
        "config": {"tokenizer_class": "MPNetTokenizer"},
        "special": ("<s>", "[UNK]", "<pad>", "</s>", "<mask>"),
    },
}
TAILS = ("", "</s> x", "<mask> y", " [MASK] z", f"{END} q", "<|im_end|>\nA", "<tool> b", "It's I'LL 1234")


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_texts_are_those_of_transformers(name, tmp_path):
    folder, rng = folder_of(tmp_path, **KINDS[name]), random.Random(name)
    with quiet():
        reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for k in range(60):
        text = vocab.random_text(rng, rng.randrange(1, 40)) + TAILS[k % len(TAILS)]
        ids = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=True) == reference.encode(text)
        if name != "clip":  # its texts are never decoded
            assert ours.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


def test_other_vocabularies_are_refused_by_their_class(tmp_path):
    folder = folder_of(tmp_path, "xlm", {"tokenizer_class": "XLMTokenizer"})
    with pytest.raises(ConfigError, match="tokenizer_class='XLMTokenizer', model_type='xlm' are not read"):
        load_tokenizer(folder)
    (folder / "merges.txt").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer.json.*vocab.json with merges.txt, vocab.txt"):
        load_tokenizer(folder)


def test_faults_of_the_files_are_named(tmp_path):
    folder = folder_of(tmp_path, "qwen2", {"tokenizer_class": "Qwen2Tokenizer"}, added=("<a>", "<b>"))
    (folder / "added_tokens.json").write_text('{"<a>": 5000}')
    with pytest.raises(ConfigError, match="'<a>' has the id 5000, and the tokens before it end at 699"):
        load_tokenizer(folder)
    (folder / "added_tokens.json").unlink()
    (folder / "merges.txt").write_text("#version: 0.2\nzz qq\n")
    with pytest.raises(ConfigError, match="its tokenizer files cannot be read"):
        load_tokenizer(folder)
    other = tmp_path / "bert"
    other.mkdir()
    folder_of(other, "bert", {"tokenizer_class": "BertTokenizer"}, special=("[UNK]", "[PAD]"))
    with pytest.raises(ConfigError, match=r"no token '\[CLS\]', which surrounds every text"):
        load_tokenizer(other)
