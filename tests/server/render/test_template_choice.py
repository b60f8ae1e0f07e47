"""The choice of a chat template: the operator's, a named one, one for tools, or none."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.base.errors import ConfigError
from server.render.chat import RenderConfig, Renderer
from server.render.errors import RenderError
from server.render.hf_tokenizer import HfTokenizer
from server.render.template_choice import check_given
from tests.server.render import templates as kit
from tests.server.render import vocab


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def user(text):
    return [{"role": "user", "content": text}]


async def refused(awaitable, message, reason):
    with pytest.raises(RenderError, match=message) as caught:
        await awaitable
    assert (caught.value.status, caught.value.reason) == (400, reason)


def without_template(*special, **templates):
    core = vocab.byte_level()
    core.add_special_tokens(list(special))
    return HfTokenizer(core, {"bos_token": "<s>"}, templates)


async def test_no_template_names_the_flag(pool):
    renderer = Renderer(without_template(), RenderConfig(100), pool)
    await refused(renderer.chat(user("x")), "has no chat template.*--chat-template", "template_error")
    renderer = Renderer(without_template(rag="R", tool_use="T"), RenderConfig(100), pool)
    await refused(renderer.chat(user("x")), "only the chat templates rag, tool_use", "template_error")
    assert (await renderer.chat(user("x"), tools=kit.TOOLS)).text == "T"
    named = Renderer(without_template(rag="R"), RenderConfig(100, chat_template="rag"), pool)
    assert (await named.chat(user("x"))).text == "R"


@pytest.mark.parametrize(
    ("special", "text"),
    [
        (("<|im_start|>", "<|im_end|>"), "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
        (
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<s><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (("<start_of_turn>", "<end_of_turn>"), "<s><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"),
    ],
)
async def test_without_a_template_the_vocabulary_determines_the_format(special, text, pool, caplog):
    renderer = Renderer(without_template(*special), RenderConfig(100), pool)
    assert "no chat template" in caplog.text
    assert (await renderer.chat(user("x"))).text == text
    await refused(renderer.chat(user("x"), tools=kit.TOOLS), "tools need a chat template", "template_error")


async def test_a_broken_template_of_the_checkpoint_leaves_completions(pool, caplog):
    renderer = Renderer(without_template(default="{% for %}", tool_use="T"), RenderConfig(100), pool)
    assert "'default' is left out" in caplog.text
    assert len(await renderer.completion("x")) == 1
    await refused(renderer.chat(user("x")), "only the chat templates tool_use", "template_error")


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "chat_template"])
def test_default_kwargs_never_replace_our_names(name, pool):
    with pytest.raises(ConfigError, match=f"--default-chat-template-kwargs: {name} would replace"):
        Renderer(without_template(), RenderConfig(100, default_template_kwargs={name: 1}), pool)


def made(pool, chat_template):
    return Renderer(without_template(), RenderConfig(100, chat_template=chat_template), pool)


def test_a_template_file_is_read_and_a_missing_one_named(pool, tmp_path):
    (tmp_path / "t.jinja").write_text("FILE")
    assert made(pool, str(tmp_path / "t.jinja")).template.source == "FILE"
    with pytest.raises(ConfigError, match="chat-template"):
        made(pool, str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match="--chat-template: The chat template does not compile"):
        made(pool, "{% for %}")


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PALIGEMMA = ("<image>", "<loc0000>", "<seg000>", "<start_of_turn>", "<end_of_turn>")


def seeing(pool, tokenizer, mark, **fields):
    return Renderer(tokenizer, RenderConfig(100, media_token_ids={"image": tokenizer.id_of(mark)}, **fields), pool)


@pytest.mark.parametrize("given", ["{{ x ", "file.jinja"])
def test_a_template_that_cannot_be_one_is_refused_before_the_model_is_there(given, tmp_path):
    path = tmp_path / "file.jinja"
    path.write_text("{% if")
    given = str(path) if given == path.name else given
    with pytest.raises(ConfigError, match="does not compile"):
        check_given(given)
    path.write_text("{{ messages }}")
    check_given(str(path))
    check_given("rag")  # the checkpoint may have a template of this name
    with pytest.raises(ConfigError, match="is not a readable file"):
        check_given(str(tmp_path / "other.jinja"))


async def test_without_a_template_paligemma_gets_its_pictures_before_the_text(pool):
    renderer = seeing(pool, without_template(*PALIGEMMA), "<image>")
    asked = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "caption en"}, PICTURE]}]
    prompt = await renderer.chat(asked)
    assert prompt.text == "<image><image><s>caption en\n"
    assert prompt.slots == (0, 1)
    assert (await renderer.chat(user("caption en"))).text == "<s>caption en\n"
    await refused(renderer.chat([*user("a"), *user("b")]), "answers one message of the role user", "template_error")
    await refused(renderer.chat([{"role": "system", "content": "a"}]), "one message of the role user", "template_error")


async def test_newlines_around_a_picture_of_gemma_are_tokenized_with_the_text_next_to_them(pool):
    tokenizer = without_template("<start_of_image>")
    parts = "{% for p in m.content %}{{ p.text or '<start_of_image>' }}{% endfor %}"
    template = "{% for m in messages %}{{ m.role ~ '\\n' }}" + parts + "{% endfor %}"
    renderer = seeing(pool, tokenizer, "<start_of_image>", chat_template=template, content_format="openai")
    asked = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "what\n"}, PICTURE]}]
    prompt = await renderer.chat(asked)
    assert prompt.text == "user\n\n\n<start_of_image>\n\nwhat\n\n\n<start_of_image>\n\n"
    assert prompt.token_ids.tolist() == tokenizer.encode(prompt.text)
    assert [tokenizer.token_of(int(prompt.token_ids[slot])) for slot in prompt.slots] == ["<start_of_image>"] * 2
    blind = Renderer(tokenizer, RenderConfig(100, chat_template="{{ '<start_of_image>' }}"), pool)
    assert (await blind.chat(user("x"))).text == "<start_of_image>"
