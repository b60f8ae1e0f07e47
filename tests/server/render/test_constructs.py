"""Fifty templates times forty conversations: byte-equal to the reference, or refused as by the reference."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import jinja2
import pytest

from server.render.chat import RenderConfig, Renderer
from server.render.errors import RenderError
from server.render.hf_tokenizer import HfTokenizer
from server.render.template import ChatTemplate
from tests.server.render import templates as kit
from tests.server.render import vocab
from tests.server.render.constructs import MEDIA, TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DOCUMENTS = [{"title": "Straße", "text": "x < y"}, {"title": "zwei", "text": "«»"}]
KWARGS = [
    {},
    {"enable_thinking": False, "default_system": "Be brief.", "tools_in_user_message": False},
    {"reasoning_effort": "low", "thinking": True, "builtin_tools": ["a", "code_interpreter"], "date_string": "today"},
]
CONVERSATIONS = kit.conversations()


@pytest.fixture(scope="module")
def reference():
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(source, messages, **values):
        """Returns None where the reference refuses."""
        values = {**SPECIAL, **values}
        try:
            chats = [copy.deepcopy(messages)]
            return render_jinja_template(conversations=chats, chat_template=source, **values)[0][0]
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError):
            return None

    return render


def ours(template, messages, **values):
    try:
        return template.render(messages, **values)
    except RenderError as error:
        return None if error.reason == "template_error" else error


def test_there_are_fifty_templates_and_forty_conversations():
    assert len(TEMPLATES) >= 50
    assert len(set(TEMPLATES.values())) == len(TEMPLATES)
    assert len(CONVERSATIONS) == 40


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_conversation_renders_as_the_reference_does(name, reference):
    source = TEMPLATES[name]
    template, shown = ChatTemplate(source, SPECIAL), 0
    for k, (messages, tools) in enumerate(CONVERSATIONS):
        values = {
            "tools": tools,
            "add_generation_prompt": k % 3 != 0,
            "documents": DOCUMENTS if k % 4 == 1 else None,
        }
        kwargs = KWARGS[k % len(KWARGS)]
        want = reference(source, messages, **values, **kwargs)
        aliased = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
        assert ours(template, aliased, kwargs=kwargs, **values) == want, f"conversation {k}"
        shown += want is not None
    assert shown >= 5


def test_templates_that_loop_over_a_text_are_those_with_media():
    assert set(PARTS) == set(MEDIA)


PARTS = [name for name, source in TEMPLATES.items() if ChatTemplate(source, {}).content_format == "openai"]


@pytest.mark.parametrize("name", PARTS)
def test_conversations_with_media_render_as_the_reference_does(name, reference):
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    for k, messages in enumerate(kit.part_conversations()):
        want = reference(TEMPLATES[name], messages, add_generation_prompt=True)
        assert ours(template, messages, add_generation_prompt=True) == want, f"conversation {k}"


def as_sent(messages):
    """The messages as clients send them: arguments are strings."""
    sent = copy.deepcopy(messages)
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def tokenizer():
    return HfTokenizer(vocab.byte_level(), dict(SPECIAL), {})


# These two templates measure the text, and so also the mark that denotes where an answer is continued.
STRINGS = [name for name in TEMPLATES if name not in (*PARTS, "strings", "blocks")]


@pytest.mark.parametrize("name", STRINGS)
async def test_requests_give_the_prompt_of_the_reference(name, reference, tokenizer, pool):
    """Messages are parsed as in the routes; every third conversation continues an answer."""
    source = TEMPLATES[name]
    renderer = Renderer(tokenizer, RenderConfig(1 << 16, chat_template=source), pool)
    for k, (messages, tools) in enumerate(CONVERSATIONS[::3]):
        going_on = k % 3 == 0
        if going_on:
            messages = [*messages, {"role": "assistant", "content": "So it  "}]
        values = {"tools": tools, "add_generation_prompt": not going_on}
        want = reference(source, messages, continue_final_message=going_on, **values)
        try:
            got = (await renderer.chat(as_sent(messages), continue_final_message=going_on, **values)).text
        except RenderError:
            got = None
        assert got == want, f"conversation {3 * k}"
