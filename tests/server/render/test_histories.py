"""Calls in histories of other servers and dialects, with templates that accept only their own model's calls."""

from __future__ import annotations

import pytest

from server.render.call_ids import CallIds, shortened
from server.render.template import ChatTemplate
from tests.server.live import TEMPLATE, use_template

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Mistral's templates demand ids of nine characters; in Kimi's templates the id alone names the tool.
NINE = r"""
{%- for m in messages -%}[{{ m.role }}]{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
{%- if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
<{{ c.function.name }} {{ c.id }}>
{%- endfor -%}
{%- if m.role == 'tool' %}#{{ m.tool_call_id }}{% endif -%}
{%- endfor -%}"""
BY_ID = NINE.replace("!= 9", "== 0").replace("{{ c.function.name }} ", "")
LONG, OTHER = "toolu_" + 32 * "a", "toolu_" + 32 * "b"


async def read(client, calls):
    """The prompt of a user's message and of turns with calls; it is equal in all three dialects."""
    chat, items, blocks = ([{"role": "user", "content": "hi"}] for _ in range(3))
    for name, call_id in calls:
        chat += [
            {"role": "assistant", "tool_calls": [{"id": call_id, "function": {"name": name, "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": "seen"},
        ]
        items += [
            {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"},
            {"type": "function_call_output", "call_id": call_id, "output": "seen"},
        ]
        use = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "seen"}
        blocks += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    reply = await client.chat(messages=chat, return_prompt_text=True)
    body = reply.json()
    assert reply.status == 200, body
    counts = [
        (await client.post("/v1/responses/input_tokens", {"input": items})).json(),
        (await client.post("/v1/messages/count_tokens", {"messages": blocks})).json(),
    ]
    assert [count["input_tokens"] for count in counts] == [body["usage"]["prompt_tokens"]] * 2
    return body["prompt_text"]


async def test_ids_of_any_length_reach_a_template_that_wants_nine_characters(client):
    use_template(client, NINE)
    text = await read(client, [("look", LONG), ("see", OTHER), ("look", "abcdefgh9")])
    first, second = shortened(LONG), shortened(OTHER)
    assert len({first, second}) == 2
    assert text == (
        f"[user]hi[assistant]<look {first}>[tool]seen#{first}[assistant]<see {second}>[tool]seen#{second}"
        "[assistant]<look abcdefgh9>[tool]seen#abcdefgh9"
    )


async def test_a_template_that_shows_calls_by_their_ids_gets_ids_with_names(client):
    use_template(client, BY_ID)
    text = await read(client, [("look", LONG), ("see", "functions.see:1"), ("look", "functions.see:0")])
    assert text == (
        "[user]hi[assistant]<functions.look:0>[tool]seen#functions.look:0"
        "[assistant]<functions.see:1>[tool]seen#functions.see:1[assistant]<functions.look:2>[tool]seen#functions.look:2"
    )


async def test_other_templates_show_ids_as_they_came(client):
    use_template(client)
    assert LONG in await read(client, [("look", LONG)])


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (NINE, "short"),
        (BY_ID, "named"),
        (TEMPLATE, "any"),
        ("{{ messages[0].content }}", "any"),
        ("{{ raise_exception('no') }}", "any"),
    ],
)
async def test_what_ids_a_template_takes_is_tried(source, form):
    assert ChatTemplate(source, {}).id_form == form


async def test_calls_without_ids_get_some():
    short, named, plain = (CallIds(lambda form=form: form) for form in ("short", "named", "any"))
    assert [short.asked(None, "f"), short.asked("", "f")] == ["call00000", "call00001"]
    assert [named.asked(None, "f"), named.asked(5, "g")] == ["functions.f:0", "functions.g:1"]
    assert (plain.asked(None, "f"), plain.answered("x")) == (None, "x")


ONE = r"""
{%- for m in messages -%}[{{ m.role }}]{{ m.content or '' }}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif -%}
<{{ m.tool_calls[0].function.name }}>
{%- endif -%}
{%- endfor -%}"""


def called(*names):
    return {
        "role": "assistant",
        "content": "so",
        "tool_calls": [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in names],
    }


def answer(name):
    return {"role": "tool", "tool_call_id": name, "content": f"of {name}"}


async def test_several_calls_are_rendered_one_by_one_where_a_template_takes_no_more(client):
    hi = {"role": "user", "content": "hi"}
    messages = [hi, called("a", "b", "c"), answer("b"), answer("a"), answer("z"), hi]
    for template in (ONE, ONE.replace("!= 1", "== 0")):  # one refuses several calls, the other renders only the first
        use_template(client, template)
        reply = await client.chat(messages=messages, return_prompt_text=True)
        assert reply.status == 200, reply.content
        assert reply.json()["prompt_text"] == (
            "[user]hi[assistant]so<a>[tool]of a[assistant]<b>[tool]of b[assistant]<c>[tool]of z[user]hi"
        )
    use_template(client)
    reply = await client.chat(messages=messages, return_prompt_text=True)
    assert "so<call a a {}><call b b {}><call c c {}>\n[tool #b]of b" in reply.json()["prompt_text"]


JOINED = r"""
{%- for m in messages -%}[{{ m.role }}]{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
{{ '<' + c.type + ' ' + c.function.name + ' ' + c.function.arguments + '>' }}
{%- endfor -%}
{%- endfor -%}"""
PRINTED = JOINED.replace(
    "{{ '<' + c.type + ' ' + c.function.name + ' ' + c.function.arguments + '>' }}",
    "<{{ c.type }} {{ c.function.name }} {{ c.function.arguments }}>",
)


@pytest.mark.parametrize("template", [JOINED, PRINTED, PRINTED.replace("arguments }}", "arguments | tojson }}")])
async def test_arguments_are_text_where_a_template_joins_or_prints_them(client, template):
    use_template(client, template)
    call = called("a", "b")
    call["tool_calls"][0]["function"]["arguments"] = '{"x":true, "y":"\u00e9"}'
    messages = [{"role": "user", "content": "hi"}, call, answer("a"), answer("b")]
    reply = await client.chat(messages=messages, return_prompt_text=True)
    assert reply.status == 200, reply.content
    calls = '<function a {"x": true, "y": "é"}><function b {}>'
    assert reply.json()["prompt_text"] == f"[user]hi[assistant]so{calls}[tool]of a[tool]of b"


FIRST = r"""
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.content and m.thinking -%}{{ raise_exception('one of both') }}{%- endif -%}
[analysis]{{ m.content or m.thinking }}[to={{ m.tool_calls[0].function.name }}]
{%- else -%}[{{ m.role }}]{{ m.content }}
{%- endif -%}
{%- endfor -%}"""


async def test_text_next_to_a_call_is_reasoning_where_a_template_takes_one_text(client):
    """If a template renders only the first call, each call becomes a message of its own."""
    use_template(client, FIRST)
    hi = {"role": "user", "content": "hi"}
    messages = [hi, {**called("a", "b"), "reasoning": "hm"}, answer("a"), answer("b"), hi]
    reply = await client.chat(messages=messages, return_prompt_text=True)
    assert reply.status == 200, reply.content
    told = "[user]hi[analysis]hm\nso[to=a][tool]of a[analysis][to=b][tool]of b[user]hi"
    assert reply.json()["prompt_text"] == told
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    use = {"type": "tool_use", "id": "a", "name": "a", "input": {}}
    blocks = [thinking, {"type": "text", "text": "so"}, use]
    result = {"type": "tool_result", "tool_use_id": "a", "content": "of a"}
    turns = [hi, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    assert (await client.post("/v1/messages", {"messages": turns, "max_tokens": 1})).status == 200
