"""Sentencepiece models without a tokenizer.json: ids and text equal the library's; added tokens come from files."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import mistral_common
import pytest
import sentencepiece

from engine.base.errors import ConfigError
from server.render import sentencepiece_model
from server.render.load_tokenizer import load_tokenizer
from server.render.sentencepiece_model import fields
from tests.models import chatglm as glm
from tests.models import internlm2
from tests.server.conftest import config_of, maker, ready
from tests.server.render import vocab

PUBLISHED = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"  # Mistral 7B's: 32,000 pieces
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FREE = "[UNUSED_TOKEN_0]"  # a piece that training left unused


def trained(folder: Path, **changes) -> Path:
    """A trained model of about 300 pieces."""
    rules = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    rules |= {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300, "user_defined_symbols": [FREE]}
    lines = ["the cat and the hat in the rain", "a thing in the land of things", "under the red band there ran an ant"]
    writer = (folder / "tokenizer.model").open("wb")
    with writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines * 20), model_writer=writer, minloglevel=2, **{**rules, **changes}
        )
    return folder


def write(folder: Path, **config) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def library(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    (folder / "tokenizer.model").symlink_to(PUBLISHED)
    return folder


def check(tokenizer, theirs, texts):
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        assert tokenizer.decode(ids) == text


def texts(count):
    rng = random.Random(11)
    return [vocab.random_text(rng, rng.randrange(1, 60)) for _ in range(count)]


def test_ids_and_text_of_a_published_model_equal_the_librarys(published):
    tokenizer, theirs = load_tokenizer(published), library(published)
    check(
        tokenizer,
        theirs,
        [*texts(300), "Hello, world", "  two  spaces\n\n", "東京 été 🙂", "def f(x):\n    return x\n"],
    )
    assert tokenizer.encode("hi", True)[0] == theirs.bos_id()
    assert tokenizer.id_of("</s>") == theirs.eos_id()


@pytest.mark.parametrize("prefix", [False, True])
def test_ids_of_a_small_model_equal_the_librarys(tmp_path, prefix):
    trained(tmp_path, add_dummy_prefix=prefix)
    check(load_tokenizer(tmp_path), library(tmp_path), [*texts(200), "the cat in the rain", "and  an ant"])


def test_a_prefix_that_only_a_texts_beginning_has(tmp_path):
    """With Llama's `legacy: false` there is no prefix after a special token."""
    trained(tmp_path, add_dummy_prefix=True)
    write(tmp_path, bos_token="<s>", eos_token="</s>", legacy=False)
    tokenizer, theirs = load_tokenizer(tmp_path), library(tmp_path)
    assert tokenizer.encode("the cat") == theirs.encode("the cat")
    assert tokenizer.encode("the cat</s>the cat")[-5:] != theirs.encode("the cat")[-5:]
    write(tmp_path, bos_token="<s>", eos_token="</s>")
    half = theirs.encode("the cat")
    assert load_tokenizer(tmp_path).encode("the cat</s>the cat") == [*half, theirs.eos_id(), *half]


def test_tokens_in_free_places_and_behind_the_pieces(tmp_path):
    """In InternLM2 and InternVL2 the configuration names unused pieces and adds tokens after the last piece."""
    trained(tmp_path)
    free = library(tmp_path).piece_to_id(FREE)
    listed = {
        str(free): {"content": "<|im_start|>", "special": True},
        "300": {"content": "<|im_end|>", "special": True},
    }
    listed["301"] = {"content": "<IMG_CONTEXT>", "special": False, "normalized": False}
    write(tmp_path, added_tokens_decoder=listed, bos_token="<s>", chat_template=TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.id_of(name) for name in ("<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>")] == [free, 300, 301]
    assert tokenizer.encode("<|im_start|>the<IMG_CONTEXT>") == [free, *library(tmp_path).encode("the"), 301]
    assert tokenizer.id_of(FREE) is None
    assert tokenizer.chat_templates["default"] == TEMPLATE
    write(tmp_path, bos_token="<s>")
    (tmp_path / "added_tokens.json").write_text('{"<img>": 300}')
    assert load_tokenizer(tmp_path).encode("<img>") == [300]
    (tmp_path / "added_tokens.json").write_text('{"<img>": 302}')
    with pytest.raises(ConfigError, match=r"has 300 pieces; tokens added at \[302\]"):
        load_tokenizer(tmp_path)


def chatglm(folder: Path) -> Path:
    """A tokenizer like ChatGLM2's: a prefix for each piece of text, and added tokens named only in the makers' code."""
    return write(trained(folder, add_dummy_prefix=True), tokenizer_class="ChatGLMTokenizer")


@pytest.mark.parametrize("listed", [(), (301, 303, 306, 307)])
def test_chatglms_added_tokens_are_those_of_its_makers_code(tmp_path, listed):
    """Files list none of the tokens (ChatGLM2), or some (ChatGLM3)."""
    folder, names = chatglm(tmp_path), dict(enumerate(sentencepiece_model.CHATGLM, 300))
    entries = {str(number): {"content": names[number], "special": False, "normalized": False} for number in listed}
    write(folder, tokenizer_class="ChatGLMTokenizer", **({"added_tokens_decoder": entries} if listed else {}))
    tokenizer, theirs = load_tokenizer(folder), library(folder)
    assert [tokenizer.id_of(name) for name in sentencepiece_model.CHATGLM] == list(range(300, 309))
    assert tokenizer.encode("the cat", True) == [301, 303, *theirs.encode("the cat")]
    asked = "[gMASK]sop<|user|>\n the cat<|assistant|>"
    assert tokenizer.encode(asked) == [301, 303, 306, *theirs.encode("\n the cat"), 307]
    assert tokenizer.encode_segments([("the sop", True)], True) == [301, 303, *theirs.encode("the sop")]
    assert tokenizer.encode("philosophy") == theirs.encode("philosophy")
    assert tokenizer.ends == (306, 308)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "unigram", "vocab_size": 280}, "not joined by scores"),
        ({"byte_fallback": False, "vocab_size": 60}, "no pieces for bytes"),
        ({"normalization_rule_name": "nmt_nfkc"}, "rewrites texts"),
        ({"remove_extra_whitespaces": True}, "drops spaces"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, changes, complaint):
    with pytest.raises(ConfigError, match=f"{complaint}.*save_pretrained writes"):
        load_tokenizer(trained(tmp_path, **changes))


def test_a_broken_file_is_no_model(tmp_path):
    whole = PUBLISHED.read_bytes()[:2000]
    for data in (b"", b"\x0a", b"\xff" * 50, whole[:-1], b"<html>not found</html>"):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(ConfigError, match="not a sentencepiece model"):
            load_tokenizer(tmp_path)
    assert list(fields(b"\x08\x96\x01\x12\x02hi")) == [(1, 150), (2, b"hi")]


def test_a_damaged_file_is_read_or_refused_in_words(tmp_path):
    source = trained(tmp_path) / "tokenizer.model"
    whole, rng = source.read_bytes(), random.Random(3)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.choice([rng.randrange(40), rng.randrange(len(data)), -rng.randrange(1, 200)])] = rng.randrange(256)
        source.write_bytes(data)
        with contextlib.suppress(ConfigError):
            load_tokenizer(tmp_path)


async def test_a_chat_is_served_with_it(tmp_path):
    """A folder in InternLM2's published layout."""
    folder = internlm2.checkpoint(tmp_path / "internlm2")
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").unlink()
    trained(folder)
    free = library(folder).piece_to_id(FREE)
    listed = {
        str(free): {"content": "<|im_start|>", "special": True},
        "300": {"content": "<|im_end|>", "special": True},
    }
    write(folder, added_tokens_decoder=listed, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        answer = (await maker(state)().post("/v1/chat/completions", json=body)).json()
    expected = [free, *library(folder).encode("user\nthe cat"), 300, *library(folder).encode("\n")]
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": len(expected), "completion_tokens": 4}


async def test_chatglm3_ends_where_another_role_begins(tmp_path):
    """ChatGLM3's files name only the end-of-text token."""
    config = {**glm.TEXT, "padded_vocab_size": 320, "eos_token_id": 2, "pad_token_id": 0}
    folder = glm.checkpoint(tmp_path / "chatglm", config)
    (folder / "tokenizer.json").unlink()
    async with ready(config_of(model={"model": str(chatglm(folder)), "num_threads": 1})) as state:
        assert state.vocabulary.eos == (2, 306, 308)
