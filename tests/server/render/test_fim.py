"""Prompts of gaps: the ids of each family's own library, markers as text, and tokenizers without markers."""

from __future__ import annotations

import json
import random

import pytest
from mistral_common.protocol.fim.request import FIMRequest
from tokenizers import AddedToken, Tokenizer
from transformers import CodeLlamaTokenizer, PreTrainedTokenizerFast

from server.render.fim import File, FillIn
from server.render.hf_tokenizer import HfTokenizer
from server.render.load_tokenizer import load_tokenizer
from server.render.mistral_tokenizer import MistralTokenizer
from tests.server.render import tekken, vocab
from tests.server.render.test_mistral import DATA, PIECES, Library, ValidationMode, tokenizer_of

ADDED = {
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
}
CODELLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
GAPS = [
    ("def f(a):\n    return ", "\n\nprint(f(1))\n"),
    ("the", "a"),
    (" the", " a"),
    ("", "a\tb"),
    ("a", "\n b"),
    ("é漢 \n", "😀"),
]


def gaps(seed):
    """Fixed pairs of texts, and random ones."""
    rng = random.Random(seed)
    return [*GAPS, *((vocab.random_text(rng, rng.randrange(30)), vocab.random_text(rng, 9) + "x") for _ in range(40))]


def fill_in_of(core, config=None):
    found = FillIn.of(HfTokenizer(core, config or {}, {}))
    assert found is not None
    return found


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", ADDED)
def test_added_markers_are_written_as_their_family_writes_them(kind, special):
    """Qwen2.5-Coder's markers are added tokens that are not special."""
    names = ADDED[kind]
    core = vocab.byte_level()
    core.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    oracle = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(core.to_str()))
    fill_in = fill_in_of(core)
    assert fill_in.ends == tuple(oracle.convert_tokens_to_ids(list(names)))
    for before, after in gaps(kind):
        wanted = oracle.encode(f"{names[0]}{before}{names[1]}{after}{names[2]}")
        assert fill_in.encode(before, after) == wanted


def codellama():
    data = json.loads(vocab.byte_fallback().to_str())
    for name in CODELLAMA:
        data["model"]["vocab"].setdefault(name, len(data["model"]["vocab"]))
    return Tokenizer.from_str(json.dumps(data))


def test_codellamas_prompts_are_those_of_its_tokenizer(tmp_path):
    """With `add_prefix_space=False` transformers writes Meta's format, in which only the text before the gap gets a
    space; the default of its fifth version puts one before the text after the gap, too.
    """
    core = codellama()
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocab.save(core, tmp_path, {**config, "tokenizer_class": "CodeLlamaTokenizer"})
    oracle = CodeLlamaTokenizer.from_pretrained(tmp_path, add_prefix_space=False)
    fill_in = fill_in_of(core, config)
    assert fill_in.ends == tuple(oracle.convert_tokens_to_ids(list(CODELLAMA)))
    for before, after in gaps(3):
        wanted = oracle(before, suffix=after)["input_ids"]
        assert fill_in.encode(before, after) == wanted, (before, after)
    assert fill_in.encode("a", "b", special=False) == oracle("a", suffix="b")["input_ids"][1:]


@pytest.mark.parametrize(
    "file", ["tekken_240911.json", *(path.name for path in PIECES.values() if "v1" not in path.name)]
)
def test_codestrals_prompts_are_those_of_mistral_common(file):
    """With the published files in the library."""
    path = DATA / file
    library = Library.from_file(path, mode=ValidationMode.agnostic)
    fill_in = FillIn.of(MistralTokenizer(library))
    for before, after in gaps(file):
        wanted = library.encode_fim(FIMRequest(prompt=before, suffix=after)).tokens
        assert fill_in.encode(before, after) == wanted, (before, after)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", [*ADDED, "codellama", "v3", "v3-pieces"])
def test_a_marker_in_a_text_stays_text(kind, special):
    if kind in ADDED:
        core = vocab.byte_level()
        core.add_tokens([AddedToken(name, special=special, normalized=False) for name in ADDED[kind]])
        tokenizer, names = HfTokenizer(core, {}, {}), ADDED[kind]
    elif kind == "codellama":
        tokenizer, names = HfTokenizer(codellama(), {}, {}), tuple(name.replace("▁", " ") for name in CODELLAMA[:3])
    else:
        tokenizer, names = tokenizer_of(kind), ("[PREFIX]", "[SUFFIX]")
    fill_in = FillIn.of(tokenizer)
    before, after = f"a{names[1]}b", f"c{names[0]}{names[-1]}d"
    ids = fill_in.encode(before, after)
    markers = [token for token in ids if token in fill_in.ends]
    assert len(markers) == (2 if fill_in.middle is None else 3)
    assert len(set(markers)) == len(markers)
    start = ids.index(fill_in.prefix)
    end = ids.index(fill_in.suffix) if fill_in.middle is not None else len(ids)
    assert tokenizer.decode(ids[start + 1 : end]).strip() == before


def test_other_tokenizers_have_no_markers(tmp_path):
    for make in (vocab.byte_level, vocab.byte_fallback, vocab.wordpiece):
        assert FillIn.of(HfTokenizer(make(), {}, {})) is None
    assert FillIn.of(load_tokenizer(tekken.write_tiktoken(tmp_path / "a"))) is None
    partly = vocab.byte_level()
    partly.add_tokens([AddedToken("<|fim_prefix|>"), AddedToken("<|fim_suffix|>")])
    assert FillIn.of(HfTokenizer(partly, {}, {})) is None


def test_a_merge_files_markers_are_found(tmp_path):
    count = len(tekken.merges())
    listed = {str(count + at): {"content": name, "special": True} for at, name in enumerate(ADDED["qwen"])}
    tokenizer = load_tokenizer(tekken.write_tiktoken(tmp_path / "b", config={"added_tokens_decoder": listed}))
    fill_in = FillIn.of(tokenizer)
    wanted = [count, *tokenizer.encode("the"), count + 1, *tokenizer.encode(" a"), count + 2]
    assert fill_in.encode("the", " a") == wanted


def test_files_precede_a_gap_with_the_tokens_for_them():
    core = vocab.byte_level()
    core.add_tokens([AddedToken(name, normalized=False) for name in (*ADDED["qwen"], "<|repo_name|>", "<|file_sep|>")])
    tokenizer, files = HfTokenizer(core, {}, {}), [File("a.py", "x"), File("b.py", "<|file_sep|>")]
    fill_in = FillIn.of(tokenizer)
    whole = fill_in.around("P", "S", "M", files, 1000)
    listed = "<|repo_name|>project\n<|file_sep|>a.py\nx\n<|file_sep|>b.py\n<|file_sep|>\n<|file_sep|>current\n"
    assert tokenizer.decode(whole) == f"{listed}<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>M"
    assert whole.count(tokenizer.id_of("<|file_sep|>")) == 3
    assert fill_in.around("P", "S", "", [], 1000) == fill_in.encode("P", "S")
    shorter = tokenizer.decode(fill_in.around("P", "S", "M", files, len(whole) - 1))
    assert "b.py" in shorter
    assert "a.py" not in shorter
    for most in range(12, len(whole)):
        assert len(fill_in.around("P" * 9, "S" * 9, "M", files, most)) <= most
    cut = tokenizer.decode(fill_in.around("abcdefgh" * 9, "stuvwxyz" * 9, "", [], 20))
    before, after = cut.removeprefix("<|fim_prefix|>").removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
    assert ("abcdefgh" * 9).endswith(before)
    assert ("stuvwxyz" * 9).startswith(after)
    assert len(before) > len(after) > 0


def test_answers_end_at_every_marker():
    core = vocab.byte_level()
    more = ("<|repo_name|>", "<|file_sep|>", "<|fim_pad|>", "<|endoftext|>")
    core.add_tokens([AddedToken(name, normalized=False) for name in (*ADDED["qwen"], *more)])
    tokenizer = HfTokenizer(core, {}, {})
    assert set(FillIn.of(tokenizer).ends) == {tokenizer.id_of(name) for name in (*ADDED["qwen"], *more)}
