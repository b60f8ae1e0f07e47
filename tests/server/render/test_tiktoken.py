"""Merge files of tiktoken: the library's ids and text, special tokens of the families, framing, templates."""

import random

import pytest

from engine.base.errors import ConfigError
from server.render.chat import RenderConfig, Renderer
from server.render.errors import RenderError
from server.render.load_tokenizer import load_tokenizer
from tests.server.render import tekken, vocab

CONFIG = {
    "bos_token": "[BOS]",
    "eos_token": {"content": "[EOS]"},
    "add_bos_token": True,
    "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}[EOS]{% endfor %}",
}


def with_added(first):
    names = {"[BOS]": True, "[EOS]": True, "<tool>": False}
    listed = {str(first + k): {"content": name, "special": flag} for k, (name, flag) in enumerate(names.items())}
    return {**CONFIG, "added_tokens_decoder": listed}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    first = len(tekken.merges()) + 3  # ids between the merges and this one are unused
    return tekken.write_tiktoken(tmp_path_factory.mktemp("m"), config=with_added(first))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_ids_and_text_equal_the_librarys(tokenizer):
    rng = random.Random(7)
    for _ in range(300):
        text = vocab.random_text(rng, rng.randrange(1, 60))
        ids = tokenizer.encode(text)
        assert ids == tokenizer.core.encode_ordinary(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    for _ in range(300):
        ids = [rng.randrange(len(tekken.merges())) for _ in range(20)]
        assert tokenizer.decode(ids) == tokenizer.core.decode(ids)


def test_special_tokens_and_framing(tokenizer):
    bos, eos, tool = map(tokenizer.id_of, ("[BOS]", "[EOS]", "<tool>"))
    assert tokenizer.encode("[BOS]<tool>") == [bos, tool]
    assert tokenizer.encode("", True) == [bos]
    assert tokenizer.encode_segments([("[EOS]", False)]) == [eos]
    plain = tokenizer.encode_segments([("[EOS]", True)], True)
    assert plain[0] == bos
    assert not any(map(tokenizer.is_special, plain[1:]))
    assert tokenizer.is_special(eos)
    assert not tokenizer.is_special(tool)
    assert tokenizer.special_spellings == ["[BOS]", "[EOS]"]
    assert tokenizer.decode([bos, tool], True) == "<tool>"
    assert tokenizer.vocab_size == tool + 1
    assert tokenizer.token_of(bos - 1) is None
    assert tokenizer.id_of("no such token, certainly") is None


async def test_templates_and_flags_work_as_with_tokenizer_json(tokenizer, pool):
    messages = [{"role": "user", "content": "a[EOS]b"}]
    prompt = await Renderer(tokenizer, RenderConfig(64), pool).chat(messages)
    assert prompt.text == "[BOS]a[EOS]b[EOS]"
    special = [tokenizer.is_special(int(token_id)) for token_id in prompt.token_ids]
    assert sum(special) == 3
    escaped = await Renderer(tokenizer, RenderConfig(64, escape_special_tokens=True), pool).chat(messages)
    assert escaped.text == prompt.text
    assert sum(tokenizer.is_special(int(token_id)) for token_id in escaped.token_ids) == 2
    renderer = Renderer(tokenizer, RenderConfig(64), pool)
    ids = (await renderer.completion("one two three four five")).token_ids.tolist()
    for side, cut in (("left", slice(-3, None)), ("right", slice(0, 3))):
        short = await renderer.completion("one two three four five", truncate_prompt_tokens=3, truncation_side=side)
        assert short.token_ids.tolist() == ids[cut]
    assert (await renderer.completion("one", add_special_tokens=False)).token_ids.tolist() == tokenizer.encode("one")


@pytest.fixture
def pool():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_families_that_keep_special_tokens_in_code(tmp_path):
    first = len(tekken.merges())
    llama = load_tokenizer(tekken.write_tiktoken(tmp_path / "llama", "tokenizer.model"))
    assert llama.id_of("<|eot_id|>") == first + 9
    assert llama.encode("x", True)[0] == llama.id_of("<|begin_of_text|>") == first
    assert llama.encode("12345") == llama.encode("123") + llama.encode("45")
    assert llama.vocab_size == first + 256
    qwen = load_tokenizer(tekken.write_tiktoken(tmp_path / "qwen", "qwen.tiktoken"))
    assert [qwen.id_of(name) for name in ("<|endoftext|>", "<|im_end|>", "<|extra_204|>")] == [
        first,
        first + 2,
        first + 207,
    ]
    assert qwen.encode("12") == qwen.encode("1") + qwen.encode("2")
    assert qwen.encode("x", True) == qwen.encode("x")
    assert qwen.special_tokens["eos_token"] == "<|endoftext|>"


GLM_SPECIAL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>",
)  # fmt: skip
GLM = {
    "tokenizer_class": "ChatGLM4Tokenizer",
    "eos_token": "<|endoftext|>",
    "chat_template": "[gMASK]<sop>{% for item in messages %}{% if item['content'] %}<|{{ item['role'] }}|>"
    "{{ item['metadata'] }}\n{{ item['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}


async def test_prompts_of_glm_4v_are_those_of_its_makers(tmp_path, pool):
    """[gMASK]<sop> is before every text; a message's picture is directly before its text."""
    first = len(tekken.merges())
    listed = {str(first + k): {"content": name, "special": True} for k, name in enumerate(GLM_SPECIAL)}
    config = {**GLM, "added_tokens_decoder": listed}
    tokenizer = load_tokenizer(tekken.write_tiktoken(tmp_path / "glm", "tokenizer.model", config))
    begin, picture = tokenizer.encode("[gMASK]<sop>"), first + GLM_SPECIAL.index("<|begin_of_image|>")
    assert begin == [first + 2, first + 4]
    assert tokenizer.encode("x", True) == begin + tokenizer.encode("x")
    assert tokenizer.encode("12345") == tokenizer.encode("123") + tokenizer.encode("45")
    renderer = Renderer(tokenizer, RenderConfig(64, media_token_ids={"image": picture}), pool)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "What is"}, {"type": "text", "text": "it?"}, image]
    prompt = await renderer.chat([{"role": "system", "content": "Be kind."}, {"role": "user", "content": content}])
    said = "[gMASK]<sop><|system|>\nBe kind.<|user|>\n<|begin_of_image|>What is\nit?<|assistant|>"
    assert prompt.text == said
    assert prompt.token_ids.tolist() == tokenizer.encode(said)
    assert prompt.token_ids[list(prompt.slots)].tolist() == [picture]


def test_han_characters_stand_apart_in_tiktoken_model(tokenizer):
    assert tokenizer.encode("漢字abc") == tokenizer.encode("漢字") + tokenizer.encode("abc")


def test_a_damaged_merge_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nYg== x\n")
    with pytest.raises(ConfigError, match=r"tiktoken\.model: not a merge file"):
        load_tokenizer(tmp_path)
    import sys

    tekken.write_tiktoken(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match=r"needs tiktoken; run pip install "):
        load_tokenizer(tmp_path)


def test_a_run_that_cannot_be_split_is_refused(tokenizer):
    with pytest.raises(RenderError, match="run of characters too long"):
        tokenizer.encode(" " * 1_000_000)
