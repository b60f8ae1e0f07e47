"""Messages of any shape give a Prompt or a RenderError with a status for clients, and no other error (R5)."""

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.render.chat import RenderConfig, Renderer
from server.render.errors import RenderError
from server.render.load_tokenizer import load_tokenizer
from tests.server.render import tekken
from tests.server.render import templates as kit

EMBEDDED = Path(__file__).parents[3] / "server" / "embedded"
SEED = [
    {"role": "system", "content": "s"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            {"type": "file", "file": {"file_data": "data:video/mp4;base64,AAAA"}},
        ],
    },
    {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [kit.call("f", '{"a": [1, {"b": null}]}')]},
    {"role": "tool", "content": "t", "tool_call_id": "call00000"},
]
ODD = [
    None,
    True,
    0,
    -1,
    2**63,
    1.5,
    "",
    "x",
    "\ud800",
    "<|IMAGE|>",
    "data:",
    [],
    [[]],
    {},
    {"type": "text"},
    "{{ 1 }}",
]


def spots(value, found):
    """Every (container, key) inside the value, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        spots(inner, found)
    return found


def changed(rng, seed=SEED, documents=({"title": "a", "text": "b"},)):
    body = copy.deepcopy({"messages": seed, "tools": kit.TOOLS, "documents": list(documents)})
    for _ in range(rng.choice([1, 1, 2, 4])):
        container, key = rng.choice(spots(body, []))
        action = rng.randrange(4)
        if action == 0 and isinstance(container, dict):
            container[rng.choice(["content", "role", "type", "text", "uuid", "url"])] = rng.choice(ODD)
        elif action == 1 and isinstance(container, list):
            container.insert(key, copy.deepcopy(rng.choice([*ODD, container[key]])))
        elif action == 2:
            del container[key]
        else:
            container[key] = rng.choice(ODD)
    return body


@pytest.mark.parametrize(
    "template",
    [None, kit.PLACES, kit.MACROS, kit.THOUGHTFUL, kit.DATED],
    ids=["embedded", "places", "macros", "thoughtful", "dated"],
)
async def test_only_render_errors_leave(template):
    rng = random.Random(6)
    tokenizer = load_tokenizer(EMBEDDED)
    ids = {"image": 4091, "video": 4092, "audio": 4095}
    prompts, errors = [], []
    with ThreadPoolExecutor(1) as pool:
        renderer = Renderer(tokenizer, RenderConfig(8192, media_token_ids=ids, chat_template=template), pool)
        for _ in range(400):
            body = changed(rng)
            messages, tools, documents = body.get("messages"), body.get("tools"), body.get("documents")
            try:
                prompts.append(await renderer.chat(messages, tools=tools, documents=documents))
            except RenderError as error:
                errors.append(error)
    check(prompts, errors)


@pytest.mark.parametrize("version", ["v3", "v11", "v13", "v15"])
async def test_only_render_errors_leave_a_chat_format(version, tmp_path):
    rng = random.Random(7)
    tokenizer = load_tokenizer(tekken.write_tekken(tmp_path, version, audio=version == "v13"))
    ids = {"image": tokenizer.id_of("[IMG]"), "audio": tokenizer.id_of("[AUDIO]")}
    seed = [dict(message) for message in SEED]
    seed[1]["content"] = SEED[1]["content"][: 3 if version == "v13" else 2]
    prompts, errors = [], []
    with ThreadPoolExecutor(1) as pool:
        renderer = Renderer(tokenizer, RenderConfig(8192, media_token_ids=ids), pool)
        for _ in range(400):
            body = changed(rng, seed, ())
            messages, tools, documents = body.get("messages"), body.get("tools"), body.get("documents")
            try:
                prompts.append(await renderer.chat(messages, tools=tools, documents=documents))
            except RenderError as error:
                errors.append(error)
    check(prompts, errors)


def check(prompts, errors):
    assert len(prompts) > 20 < len(errors)
    assert all(len(prompt.slots) == len(prompt.media) for prompt in prompts)
    for error in errors:
        assert error.status in (400, 403, 422), error
        assert "0x" not in error.message, error
        assert len(error.message) < 600, error
