"""Small tokenizers of the kinds that checkpoints use, trained here, and random text to test them."""

import functools
import json
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SCRIPTS = [(0x20, 0x7F), (0xA0, 0x180), (0x400, 0x450), (0x600, 0x660), (0x900, 0x970), (0x3040, 0x3100),
           (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0x1F300, 0x1F650), (0x1F1E6, 0x1F200),
           (0x300, 0x330), (0x2000, 0x2010)]  # fmt: skip


def random_text(rng, length):
    """Unicode text of many scripts; runs of spaces and newlines are frequent."""
    chars = []
    while len(chars) < length:
        low, high = rng.choice(SCRIPTS)
        chars += [chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 6))]
        chars += [rng.choice([" ", " ", "  ", "\n", "\n\n", "\t", "", "."])]
    return "".join(chars)


@functools.cache
def corpus():
    rng = random.Random(11)
    words = [random_text(rng, rng.randrange(1, 7)).strip() or "x" for _ in range(400)]
    return [" ".join(rng.choice(words) for _ in range(30)) for _ in range(60)]


def byte_level():
    """A byte-level tokenizer, as in GPT-2, Llama 3 and Qwen."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|IMAGE|>", special=True)])
    core.add_tokens([AddedToken("café au lait"), AddedToken("naïve", normalized=False), AddedToken("漢 字")])
    return core


def _pieces():
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    ascii_only = ["".join(char for char in line if ord(char) < 0x250) for line in corpus()]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    core.train_from_iterator(ascii_only, trainer)
    return json.loads(core.to_str())


def byte_fallback(llama=True):
    """Pieces with a fallback to bytes: Llama 2's (a space in front of every text) or Gemma's (no space)."""
    data = _pieces()
    vocab = data["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    vocab.setdefault("▁▁▁", len(vocab))
    data["model"].update(byte_fallback=True, fuse_unk=True)
    core = Tokenizer.from_str(json.dumps(data))
    core.pre_tokenizer = None
    replace = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if llama else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if llama else steps)
    bos = core.token_to_id("<s>")
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return core


def metaspace():
    """A tokenizer as in T5 and early Mistral: the first piece loses its space."""
    data = _pieces()
    core = Tokenizer.from_str(json.dumps(data))
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return core


def wordpiece():
    """A tokenizer as in BERT: only the library's decoder knows how pieces become text."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    core.train_from_iterator(corpus(), trainer)
    return core


KINDS = {
    "byte_level": byte_level,
    "llama": byte_fallback,
    "gemma": lambda: byte_fallback(llama=False),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


def save(core, folder, config=None, **files):
    """Writes a folder in the layout of checkpoints."""
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder
