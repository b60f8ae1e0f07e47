"""A tokenizer of several files, as slow tokenizers save it: vocab.json and merges.txt, or vocab.txt.

Owner: none, pure functions; called while a tokenizer is loaded. In: a checkpoint's folder without tokenizer.json. Out:
a Rust tokenizer and its configuration. The files hold tokens only: how a text is split, and which tokens surround it,
follows from `tokenizer_class`, or from the model_type of config.json. The rules are those of transformers' classes
(src/transformers/models/*/tokenization_*.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.base.errors import ConfigError
from server.render.tokenizer_config import MERGES, VOCABULARY, WORDS, content, read_config, read_json

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLIP_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

Core = tokenizers.Tokenizer
Config = dict[str, Any]
Row = tuple[Callable[[Path, Config], Core], dict[str, str]]  # makes the tokenizer; its usual special tokens
END = "<|endoftext|>"
# The usual special tokens of each kind, for files that do not name them.
GPT2_TOKENS = {"unk_token": END, "bos_token": END, "eos_token": END}
QWEN_TOKENS = {"unk_token": END, "eos_token": END, "pad_token": END}
CLIP_TOKENS = {"unk_token": END, "bos_token": "<|startoftext|>", "eos_token": END, "pad_token": END}
SENTENCE_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>",
                   "pad_token": "<pad>"}  # fmt: skip
ROBERTA_TOKENS = {**SENTENCE_TOKENS, "unk_token": "<unk>", "mask_token": "<mask>"}
MPNET_TOKENS = {**SENTENCE_TOKENS, "unk_token": "[UNK]", "mask_token": "<mask>"}
BERT_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
               "mask_token": "[MASK]"}  # fmt: skip


def read_vocabulary_files(folder: Path) -> tuple[Core, Config]:
    """The tokenizer, and its tokenizer_config.json with the tokens that only other files name; ConfigError names the
    file.
    """
    config = read_config(folder)
    kind, tokens = _kind(folder, config)
    config = {**tokens, **{name: value for name, value in config.items() if value is not None}}
    if not isinstance(config.get("added_tokens_decoder"), dict):
        config["added_tokens_decoder"] = _added(folder, config)
    try:
        core = kind(folder, config)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{folder}: its tokenizer files cannot be read ({error})") from error
    _add_in_order(core, config["added_tokens_decoder"])
    return core, config


def _kind(folder: Path, config: Config) -> Row:
    """The row of the class, or else of the model_type."""
    named = config.get("tokenizer_class")
    name = named.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(named, str) else ""
    model_type = read_json(folder / "config.json").get("model_type")
    found = BY_CLASS.get(name.lower()) or BY_CLASS.get(str(model_type).replace("_", "").replace("-", ""))
    if found is None:
        found = BY_CLASS["bert"] if (folder / WORDS).is_file() else None
    if found is None:
        raise ConfigError(
            f"{folder}: {VOCABULARY} and {MERGES} of tokenizer_class={named!r}, model_type={model_type!r} are not "
            "read; transformers' AutoTokenizer.save_pretrained writes the tokenizer.json that is needed"
        )
    return found


def _added(folder: Path, config: Config) -> dict[str, dict[str, Any]]:
    """added_tokens.json as an `added_tokens_decoder`; tokens that the configuration names are special."""
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [value for name, value in config.items() if name.endswith("_token")]
    special = {content(value) for value in (*named, *(listed if isinstance(listed, list) else []))}
    return {
        str(number): {"content": text, "special": text in special, "normalized": text not in special}
        for text, number in read_json(folder / "added_tokens.json").items()
    }


def _add_in_order(core: Core, added: dict[str, Any]) -> None:
    """Add the tokens behind the vocabulary; their ids must follow one another, as the library gives them."""
    for number, entry in sorted(added.items(), key=lambda item: int(item[0])):
        flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
        token = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
        core.add_special_tokens([token]) if token.special else core.add_tokens([token])
        if core.token_to_id(token.content) != int(number):
            raise ConfigError(
                f"added_tokens.json, added_tokens_decoder: {token.content!r} has the id {number}, and the tokens "
                f"before it end at {core.get_vocab_size() - 2}; ids must follow the vocabulary without a gap"
            )


def _bytes(folder: Path, config: Config) -> Core:
    """GPT-2's bytes, as in OPT, Phi and Whisper."""
    core = _merged(folder)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    return core


def _qwen(folder: Path, config: Config) -> Core:
    core = _merged(folder)
    core.normalizer = normalizers.NFC()
    prefix = bool(config.get("add_prefix_space", False))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
    ])  # fmt: skip
    return core


def _roberta(folder: Path, config: Config) -> Core:
    core = _bytes(folder, config)
    core.post_processor = _between(core, config, "cls_token", "sep_token")
    return core


def _clip(folder: Path, config: Config) -> Core:
    """CLIP's words: lower case, each word with an end of its own."""
    core = _merged(folder, end_of_word_suffix="</w>", unk_token=content(config["unk_token"]))
    core.normalizer = normalizers.Sequence([
        normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()
    ])  # fmt: skip
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(CLIP_SPLIT), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    core.post_processor = _between(core, config, "bos_token", "eos_token")
    return core


def _bert(folder: Path, config: Config) -> Core:
    core = _word_pieces(folder, config)
    first, last = (content(config[name]) for name in ("cls_token", "sep_token"))
    core.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(str(text), _id(core, text)) for text in (first, last)],
    )
    return core


def _mpnet(folder: Path, config: Config) -> Core:
    core = _word_pieces(folder, config)
    core.post_processor = _between(core, config, "cls_token", "sep_token")
    return core


def _merged(folder: Path, **more: Any) -> Core:
    """vocab.json and merges.txt, of bytes."""
    core = tokenizers.Tokenizer(models.BPE.from_file(str(folder / VOCABULARY), str(folder / MERGES), **more))
    core.decoder = decoders.ByteLevel()
    return core


def _word_pieces(folder: Path, config: Config) -> Core:
    """vocab.txt, a token per line."""
    lines = (folder / WORDS).read_text("utf-8").removesuffix("\n").split("\n")
    vocabulary = {line: number for number, line in enumerate(lines)}
    core = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=str(content(config["unk_token"]))))
    core.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##")
    return core


def _between(core: Core, config: Config, first: str, last: str) -> processors.RobertaProcessing:
    """The tokens around one text, and around two."""
    begin, end = content(config[first]), content(config[last])
    return processors.RobertaProcessing((str(end), _id(core, end)), (str(begin), _id(core, begin)), True, False)


def _id(core: Core, token: str | None) -> int:
    number = core.token_to_id(token or "")
    if number is None:
        raise ConfigError(f"the tokenizer's files have no token {token!r}, which surrounds every text")
    return number


def _rows(kind: Callable[[Path, Config], Core], tokens: dict[str, str], *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, (kind, tokens))


# Names of classes without "Tokenizer", in lower case; also model types, without underscores.
BY_CLASS: dict[str, Row] = {
    **_rows(_bytes, GPT2_TOKENS, "gpt2", "opt", "codegen", "phi", "gptneo", "gptj", "gptbigcode", "starcoder2"),
    **_rows(_bytes, GPT2_TOKENS, "whisper"),
    **_rows(_qwen, QWEN_TOKENS, "qwen2", "qwen2moe", "qwen2vl", "qwen25vl", "qwen2audio", "qwen25omni"),
    **_rows(_qwen, QWEN_TOKENS, "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "qwen3next", "qwen3omnimoe", "qwen3asr"),
    **_rows(_roberta, ROBERTA_TOKENS, "roberta", "longformer"),
    **_rows(_clip, CLIP_TOKENS, "clip"),
    **_rows(_bert, BERT_TOKENS, "bert", "distilbert", "electra", "mobilebert", "retribert", "squeezebert", "nomicbert"),
    **_rows(_mpnet, MPNET_TOKENS, "mpnet"),
}
