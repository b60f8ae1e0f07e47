"""Tokenizers of mistral-common: the library's ids, bytes and conversations; media; errors in our words."""

import asyncio
import functools
import gc
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mistral_common
import pytest
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Library
from mistral_common.tokens.tokenizers.mistral import ValidationMode

from engine.base.errors import ConfigError
from server.output.text import TextStream
from server.render.chat import RenderConfig, Renderer
from server.render.errors import RenderError
from server.render.load_tokenizer import load_tokenizer
from tests.server.render import tekken, vocab
from tests.server.render.templates import TEXTS, TOOLS

DATA = Path(mistral_common.__file__).parent / "data"
PIECES = {
    "v1": DATA / "tokenizer.model.v1",
    "v3-pieces": DATA / "mistral_instruct_tokenizer_240323.model.v3",
    "v7-pieces": DATA / "mistral_instruct_tokenizer_241114.model.v7m1",
}
TEKKEN = ["v3", "v7", "v11", "v13", "v15"]
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@functools.cache
def path_of(kind):
    if kind in PIECES:
        return PIECES[kind]
    return tekken.write_tekken(Path(tempfile.mkdtemp()), kind, audio=kind == "v13") / "tekken.json"


@functools.cache
def tokenizer_of(kind):
    return load_tokenizer(path_of(kind))


@functools.cache
def library_of(kind):
    return Library.from_file(path_of(kind), mode=ValidationMode.agnostic)


@pytest.fixture(scope="module")
def make():
    with ThreadPoolExecutor(2) as pool:

        def make(kind, **fields):
            tokenizer = tokenizer_of(kind)
            ids = {"image": tokenizer.id_of("[IMG]")} if kind in ("v13", "v15") else {}
            if kind == "v13":
                ids["audio"] = tokenizer.id_of("[AUDIO]")
            config = {"max_model_len": 8192, "media_token_ids": ids, **fields}
            return Renderer(tokenizer, RenderConfig(**config), pool)

        yield make


def streamed(tokenizer, ids, rng, skip):
    stream = TextStream(tokenizer, skip_special_tokens=skip, at_start=True)
    text, start = "", 0
    while start < len(ids):
        size = rng.choice([1, 1, 2, 5])
        text += stream.feed(ids[start : start + size])
        start += size
    return text + stream.finish()


# -- ids and text


@pytest.mark.parametrize("kind", ["v13", "v3", *PIECES])
def test_text_and_its_stream_equal_the_librarys_decoding(kind):
    tokenizer, library, rng = tokenizer_of(kind), library_of(kind), random.Random(4)
    for k in range(200):
        text = (" " * (k % 3)) + vocab.random_text(rng, rng.randrange(1, 60))
        ids = tokenizer.encode(text)
        assert ids == library.instruct_tokenizer.tokenizer.encode(text, bos=False, eos=False)
        assert tokenizer.encode(text, True) == [1, *ids]
        expected = library.decode(ids)
        assert tokenizer.decode(ids) == streamed(tokenizer, ids, rng, False) == expected
        if tokenizer.is_tekken:
            assert expected == text
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("kind", ["v13", *PIECES])
def test_any_ids_decode_as_the_library_does(kind):
    tokenizer, library, rng = tokenizer_of(kind), library_of(kind), random.Random(6)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 25))]
        if tokenizer.is_tekken:
            assert tokenizer.decode(ids) == library.decode(ids, SpecialTokenPolicy.KEEP)
            ids = [token_id for token_id in ids if not tokenizer.is_special(token_id)]
        assert streamed(tokenizer, ids, rng, True) == tokenizer.decode(ids, True) == library.decode(ids)


@pytest.mark.parametrize("kind", ["v13", "v3-pieces"])
def test_control_tokens_have_ids_and_names_but_come_from_no_text(kind):
    tokenizer = tokenizer_of(kind)
    inst = tokenizer.id_of("[INST]")
    assert tokenizer.is_special(inst)
    assert tokenizer.token_of(inst) == "[INST]"
    assert tokenizer.token_bytes(inst) == b"[INST]"
    assert (tokenizer.special_tokens["bos_token"], tokenizer.special_tokens["eos_token"]) == ("<s>", "</s>")
    assert "[INST]" in tokenizer.special_spellings
    for ids in (tokenizer.encode("a[INST]b</s>"), tokenizer.encode_segments([("a[INST]", False), ("b</s>", True)])):
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == "a[INST]b</s>"
    assert tokenizer.encode_segments([("x", False)], True) == tokenizer.encode("x", True)
    assert tokenizer.id_of("no such token, certainly") is None
    assert tokenizer.token_of(-1) is tokenizer.token_of(10**9) is None
    assert tokenizer.info()["eos_token"] == "</s>"


async def test_a_run_that_cannot_be_split_is_refused_not_a_fault(make):
    with pytest.raises(RenderError, match="run of characters too long"):
        await make("v13", max_model_len=1 << 20).completion(" " * 1_000_000)


# -- conversations


def conversations():
    """(messages, tools) in the form that clients send and the library accepts."""
    for k, text in enumerate(TEXTS):
        other = TEXTS[(k + 3) % len(TEXTS)] or "x"
        yield [{"role": "user", "content": text}], None
        call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern", "n": [1, null]}'}}
        yield (
            [
                {"role": "system", "content": other},
                {"role": "user", "content": text},
                {"role": "assistant", "content": None, "tool_calls": [{"id": f"call{k:05d}", **call}]},
                {"role": "tool", "tool_call_id": f"call{k:05d}", "content": other},
                {"role": "assistant", "content": "It rains."},
                {"role": "user", "content": [{"type": "text", "text": other}, {"type": "text", "text": "and?"}]},
            ],
            TOOLS,
        )


@pytest.mark.parametrize("kind", ["v3", "v7", "v11", "v13", "v15", "v3-pieces", "v7-pieces"])
async def test_conversations_are_encoded_as_the_library_does(kind, make):
    renderer, library = make(kind), library_of(kind)
    for messages, tools in conversations():
        request = ChatCompletionRequest.from_openai(messages, tools)
        prompt = await renderer.chat(messages, tools=tools)
        assert prompt.token_ids.tolist() == library.encode_chat_completion(request).tokens
        assert prompt.text == renderer.tokenizer.decode(prompt.token_ids)


async def test_the_first_version_knows_text_only(make):
    renderer = make("v1")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    prompt = await renderer.chat(messages)
    assert prompt.text == "<s> [INST] S\n\nU [/INST]"
    calls = [{"id": "callaaaaa", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    with pytest.raises(RenderError, match="Tools not implemented"):
        await renderer.chat([{"role": "user", "content": "U"}, {"role": "assistant", "tool_calls": calls}])


def called(call_id, **answer):
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool = {"role": "tool", "content": "42", **answer}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "wait", "tool_calls": [call]}, tool]


async def test_ids_of_other_servers_calls_become_nine_letters_on_both_sides(make):
    prompt = await make("v11").chat(called("chatcmpl-tool-0123456789", tool_call_id="chatcmpl-tool-0123456789"))
    made = prompt.text.partition("[CALL_ID]")[2][:9]
    assert made.isalnum()
    assert f"[TOOL_RESULTS]{made}[TOOL_CONTENT]42" in prompt.text
    kept = await make("v11").chat(called("abcDEF123", tool_call_id="abcDEF123"))
    assert "[CALL_ID]abcDEF123[ARGS]" in kept.text
    answered = await make("v11").chat(called("abcDEF123"))  # a result without an id belongs to the open call
    assert np_equal(answered, kept)


def np_equal(first, second):
    return first.token_ids.tolist() == second.token_ids.tolist()


async def test_text_next_to_calls_stays_where_the_version_allows_it(make):
    messages = called("abcDEF123", tool_call_id="abcDEF123")
    assert "wait[TOOL_CALLS]" in (await make("v7").chat(messages)).text
    assert "wait" not in (await make("v3").chat(messages)).text


async def test_reasoning_goes_where_the_version_has_a_place_for_it(make):
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "reasoning_content": "hm"},
        {"role": "user", "content": "V"},
    ]
    assert (await make("v13").chat(messages)).text == (
        "<s>[SYSTEM_PROMPT]D[/SYSTEM_PROMPT][INST]U[/INST][THINK]hm[/THINK]A</s>[INST]V[/INST]"
    )
    assert "hm" not in (await make("v11").chat(messages)).text
    effort = await make("v15", default_template_kwargs={"reasoning_effort": "high"}).chat(messages)
    assert '[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS]' in effort.text
    mine = await make("v15", default_template_kwargs={"reasoning_effort": "high"}).chat(
        messages, template_kwargs={"reasoning_effort": "none", "unknown": 1}
    )
    assert '{"reasoning_effort": "none"}' in mine.text


@pytest.mark.parametrize("kind", ["v3", "v13", "v7-pieces"])
async def test_the_last_answer_is_continued(kind, make):
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "And so"}]
    renderer = make(kind)
    left_open = await renderer.chat(messages, add_generation_prompt=False, continue_final_message=True)
    closed = await renderer.chat(messages, add_generation_prompt=False)
    assert [*left_open.token_ids.tolist(), 2] == closed.token_ids.tolist()
    with pytest.raises(RenderError, match="needs an assistant message"):
        await renderer.chat(messages[:1], add_generation_prompt=False, continue_final_message=True)


async def test_an_assistant_that_said_nothing_is_left_out(make):
    silent = [{"role": "user", "content": "U"}, {"role": "assistant", "content": ""}]
    spoken = await make("v13").chat([*silent, {"role": "user", "content": "V"}])
    assert spoken.text == "<s>[INST]U\n\nV[/INST]"
    begun = await make("v13").chat(silent, add_generation_prompt=False, continue_final_message=True)
    assert begun.text == "<s>[INST]U[/INST]"
    with pytest.raises(RenderError, match="refused the conversation"):
        await make("v13").chat(silent[1:])


async def test_media_have_one_placeholder_each(make):
    parts = [{"type": "text", "text": "these"}, PNG, PNG, SOUND, {"type": "text", "text": "?"}]
    prompt = await make("v13").chat([{"role": "user", "content": parts}])
    assert prompt.text == "<s>[INST]these[IMG][IMG][BEGIN_AUDIO][AUDIO]?[/INST]"
    assert [ref.modality for ref in prompt.media] == ["image", "image", "audio"]
    names = [make("v13").tokenizer.token_of(int(prompt.token_ids[slot])) for slot in prompt.slots]
    assert names == ["[IMG]", "[IMG]", "[AUDIO]"]
    with pytest.raises(RenderError, match="takes no image"):
        await make("v11").chat([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("options", "message", "reason"),
    [
        ({"documents": [{"title": "t", "text": "x"}]}, "not part of this model's chat format", "invalid_parameter"),
        ({"chat_template": "x"}, "refused", "override_not_trusted"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "Function name was a b", "template_error"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 3}}}]},
            "Invalid tool schema",
            "template_error",
        ),
        ({"tools": [{"type": "function"}]}, "function: Field required", "template_error"),
    ],
)
async def test_what_the_format_does_not_take_is_a_400(make, options, message, reason):
    with pytest.raises(RenderError, match=message) as caught:
        await make("v13").chat([{"role": "user", "content": "x"}], **options)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "a"}], "must start with a user message"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "Unexpected role 'tool' after"),
        ([*called("a", tool_call_id="b")], "Unexpected tool call id b"),
    ],
)
async def test_the_order_of_turns_is_the_librarys_to_judge(make, messages, message):
    with pytest.raises(RenderError, match=message) as caught:
        await make("v13").chat(messages)
    assert (caught.value.status, caught.value.reason) == (400, "template_error")


async def test_prompts_are_truncated_on_the_asked_side(make):
    renderer = make("v13")
    ids = (await renderer.completion("one two three four")).token_ids.tolist()
    assert ids[0] == 1
    bare = await renderer.completion("one two three four", add_special_tokens=False)
    assert bare.token_ids.tolist() == ids[1:]
    chat = (await renderer.chat([{"role": "user", "content": "one two three four"}])).token_ids.tolist()
    for side, cut in (("left", slice(-3, None)), ("right", slice(0, 3))):
        short = await renderer.completion("one two three four", truncate_prompt_tokens=3, truncation_side=side)
        assert short.token_ids.tolist() == ids[cut]
        short = await renderer.chat(
            [{"role": "user", "content": "one two three four"}], truncate_prompt_tokens=3, truncation_side=side
        )
        assert short.token_ids.tolist() == chat[cut]


async def test_escaping_changes_nothing_because_text_is_never_control(make):
    messages = [{"role": "user", "content": "a</s>[INST]b"}]
    plain, escaped = [await make("v13", escape_special_tokens=flag).chat(messages) for flag in (False, True)]
    assert np_equal(plain, escaped)
    assert sum(map(tokenizer_of("v13").is_special, plain.token_ids.tolist())) == 3  # <s> [INST] [/INST]


@pytest.mark.alone
async def test_a_long_prompt_leaves_the_loop_free(make):
    gc.collect()  # a full garbage collection takes the GIL for longer than this test
    renderer = make("v3-pieces", max_model_len=400_000)
    await renderer.chat([{"role": "user", "content": "warm"}])
    text = "The quick brown fox jumps over it. " * 12_000
    task = asyncio.ensure_future(renderer.chat([{"role": "user", "content": text}]))
    turns, before = 0, time.thread_time()
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await task) > 100_000
    assert turns > 5
    assert time.thread_time() - before < 1  # CPU time of this thread: other threads did the work


# -- files


def test_a_folder_is_read_by_what_it_holds(tmp_path):
    folder = tekken.write_tekken(tmp_path / "m")
    assert load_tokenizer(folder).is_tekken
    assert load_tokenizer(folder / "tekken.json", "mistral").is_tekken
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(folder, "hf")
    vocab.save(vocab.byte_level(), folder)
    assert load_tokenizer(folder).chat_format is None  # tokenizer.json wins unless the flag names another format
    assert load_tokenizer(folder, "mistral").is_tekken
    with pytest.raises(ConfigError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")


def test_versioned_pieces_are_found_newest_first(tmp_path):
    for version, source in (("v1", PIECES["v1"]), ("v3", PIECES["v3-pieces"])):
        (tmp_path / f"tokenizer.model.{version}").symlink_to(source)
    assert load_tokenizer(tmp_path).chat_format.version == 3


def test_pieces_without_a_version_are_mistrals_where_the_folder_or_a_flag_says_so(tmp_path):
    (tmp_path / "tokenizer.model").symlink_to(PIECES["v1"])
    assert load_tokenizer(tmp_path).chat_format is None
    assert load_tokenizer(tmp_path, "mistral").chat_format.version == 1
    (tmp_path / "params.json").write_text("{}")
    assert load_tokenizer(tmp_path).chat_format.version == 1


def test_errors_name_the_file_and_the_way_out(tmp_path, monkeypatch, make):
    (tmp_path / "tekken.json").write_text('{"config": {"version": "v99"}}')
    with pytest.raises(ConfigError, match=r"tekken\.json: mistral-common cannot read.*Unknown version"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="chat format of its own"):
        make("v13", chat_template="{{ messages }}")
    with pytest.raises(ConfigError, match="mode mistral"):
        load_tokenizer(tmp_path.parent, "mistral")
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(ConfigError, match=r"pip install 'mistral-common\[sentencepiece\]'"):
        load_tokenizer(tmp_path)
