"""The prompt of an Anthropic request, verbatim: every kind of block, tools, system texts, thinking."""

from __future__ import annotations

import pytest

from server.http import foreign_body
from server.render.blocks import read_blocks
from tests.server.live import LEADING_ONLY, picture, use_template

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def shows(serve, monkeypatch):
    """A function that renders a request with a template that prints every field, and returns the text."""
    seen = []
    real = __import__("server.routes.messages", fromlist=["prepare"]).prepare

    async def spy(exchange, prompt, asked, **named):
        seen.append(prompt.text)
        return await real(exchange, prompt, asked, **named)

    monkeypatch.setattr("server.routes.messages.prepare", spy)
    client = serve()

    async def show(messages, template=None, **fields):
        use_template(client, *([template] if template else []))
        reply = await client.post("/v1/messages", {"max_tokens": 1, "messages": messages, **fields})
        assert reply.status == 200, reply.content
        counted = await client.post("/v1/messages/count_tokens", {"messages": messages, **fields})
        usage = reply.json()["usage"]
        assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert seen[-1] == seen[-2]
        return seen[-1]

    return show


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(value):
    return {"type": "text", "text": value}


HI = {"role": "user", "content": "hi"}


async def test_system_text_goes_first_as_string_or_blocks(shows):
    assert await shows([HI], system="be kind") == "[system]be kind\n[user]hi\n[assistant]"
    assert await shows([HI], system=[text("be"), text("kind")]) == "[system]be\nkind\n[user]hi\n[assistant]"
    assert await shows([HI], system="") == await shows([HI], system=[]) == "[user]hi\n[assistant]"


async def test_billing_header_is_dropped(shows):
    header = "x-anthropic-billing-header: cc_version=1; cch=abc;"
    assert await shows([HI], system=[text(header), text("kind")]) == "[system]kind\n[user]hi\n[assistant]"
    assert await shows([HI], system=header) == "[user]hi\n[assistant]"
    inside = {"role": "system", "content": [text(header)]}
    assert await shows([inside, HI]) == "[user]hi\n[assistant]"


async def test_system_inside_stays_where_the_template_shows_it(shows):
    messages = [HI, {"role": "assistant", "content": "yes"}, {"role": "system", "content": "later"}, HI]
    assert await shows(messages, system="first") == (
        "[system]first\n[user]hi\n[assistant]yes\n[system]later\n[user]hi\n[assistant]"
    )


async def test_system_inside_joins_the_first_where_only_that_one_is_allowed(shows):
    messages = [HI, {"role": "system", "content": "later"}, HI]
    assert await shows(messages, LEADING_ONLY, system="first") == "[system]first\nlater\n[user]hi\n\nhi\n"
    assert await shows(messages, LEADING_ONLY) == "[system]later\n[user]hi\n\nhi\n"


async def test_turns_of_one_speaker_in_a_row_become_one(shows):
    messages = [HI, user(text("there"), text("you")), {"role": "assistant", "content": "a"}, HI]
    assert await shows(messages) == "[user]hi\n\nthere\nyou\n[assistant]a\n[user]hi\n[assistant]"


async def test_documents_are_read_as_text_with_their_title(shows):
    source = {"type": "text", "media_type": "text/plain", "data": "the story"}
    document = {"type": "document", "source": source, "title": "T", "context": "C", "citations": {"enabled": True}}
    assert await shows([user(document, text("sum up"))]) == "[user]T\nC\nthe story\nsum up\n[assistant]"
    blocks = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    assert await shows([user(blocks)]) == "[user]a\nb\n[assistant]"


async def test_search_results_are_read_as_text_with_title_and_source(shows):
    found = {"type": "search_result", "source": "https://a.b/c", "title": "T", "content": [text("a"), text("b")]}
    assert await shows([user(found, text("sum up"))]) == "[user]T\nhttps://a.b/c\na\nb\nsum up\n[assistant]"
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}]}
    given = await shows([HI, use, user({"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]})])
    assert "T\nhttps://a.b/c\na\nb" in given


async def test_thinking_goes_back_to_the_template_and_redacted_thinking_does_not(shows):
    blocks = [
        {"type": "thinking", "thinking": "hmm", "signature": "s"},
        {"type": "redacted_thinking", "data": "zzz"},
        text("so"),
    ]
    got = await shows([HI, {"role": "assistant", "content": blocks}, HI])
    assert got == "[user]hi\n[assistant]<think>hmm</think>so\n[user]hi\n[assistant]"


async def test_what_only_the_protocols_own_servers_run_is_left_out(shows):
    """A history that began on the protocol's own servers is sent with such blocks."""
    kinds = ("web_search", "web_fetch", "code_execution", "bash_code_execution", "tool_search", "mcp", "advisor")
    results = [{"type": f"{kind}_tool_result", "tool_use_id": "s", "content": {"type": "x"}} for kind in kinds]
    uses = [{"type": f"{kind}_tool_use", "id": "s", "name": "web_search", "input": {}} for kind in ("server", "mcp")]
    marks = [{"type": "fallback", "from": {}, "to": {}}, {"type": "mcp_tool_listing", "tools": []}]
    said = [text("let me look"), *uses, *results, *marks, text("found")]
    got = await shows([HI, {"role": "assistant", "content": said}, user({"type": "container_upload"}, text("so?"))])
    assert got == "[user]hi\n[assistant]let me look\n\nfound\n[user]so?\n[assistant]"


async def test_the_summary_of_a_compaction_is_read_and_a_failed_one_is_not(shows):
    said = [{"type": "compaction", "content": "we spoke of cats"}, {"type": "compaction", "content": None}]
    got = await shows([{"role": "assistant", "content": said}, HI])
    assert got == "[assistant]we spoke of cats\n[user]hi\n[assistant]"


async def test_tool_use_and_results_become_calls_and_tool_messages(shows):
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}, "cache_control": {}}
    again = {"type": "tool_use", "id": "toolu_2", "name": "clock", "input": {}}
    results = user(
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("no"), text("clock")], "is_error": True},
        text("and?"),
    )
    got = await shows([HI, {"role": "assistant", "content": [text("wait"), use, again]}, results])
    assert got == (
        '[user]hi\n[assistant]wait<call toolu_1 weather {"city": "Rome"}><call toolu_2 clock {}>\n'
        "[tool weather #toolu_1]sunny\n[tool clock #toolu_2]Error: no\nclock\n[user]and?\n[assistant]"
    )


TAKES_TURNS = """\
{%- set ns = namespace(count=0) -%}
{%- for m in messages -%}
{%- if m.role != 'tool' and not m.tool_calls -%}
{%- if (m.role == 'user') != (ns.count % 2 == 0) -%}{{ raise_exception('turns must be taken') }}{%- endif -%}
{%- set ns.count = ns.count + 1 -%}
{%- endif -%}
[{{ m.role }}]{{ m.content or '' }}
{% endfor -%}
"""


async def test_what_a_user_adds_to_results_is_a_turn_where_turns_must_be_taken(shows):
    """Agents add reminders to the message with results, and pictures of results are there too."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
    turns = [HI, {"role": "assistant", "content": [use]}, user(result, text("and?"))]
    got = await shows(turns, TAKES_TURNS)
    assert got == "[user]hi\n[assistant]\n[tool]seen\n[assistant]\n[user]and?\n"
    assert "[tool look #toolu_1]seen\n[user]and?" in await shows(turns)


async def test_results_may_be_empty_and_name_tools(shows):
    empty = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
    named = {
        "type": "tool_result",
        "tool_use_id": "b",
        "content": [{"type": "tool_reference", "tool_name": "weather"}],
    }
    got = await shows([HI, user(empty, named)])
    assert got == "[user]hi\n[tool #a]Error\n[tool #b]weather\n[assistant]"


async def test_a_picture_in_a_result_follows_in_a_user_message():
    source = {"type": "base64", "media_type": "image/png", "data": picture()}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [text("look"), {"type": "image", "source": source}],
    }
    messages = read_blocks(None, [HI, user(result, result, text("well?"))]).messages()
    assert [message["role"] for message in messages] == ["user", "tool", "tool", "user"]
    assert messages[1]["content"] == "look"
    assert [part["type"] for part in messages[3]["content"]] == ["image_url", "image_url", "text"]
    messages = read_blocks(None, [HI, user(result), {"role": "assistant", "content": "ok"}]).messages()
    assert [message["role"] for message in messages] == ["user", "tool", "user", "assistant"]


async def test_picture_urls_are_passed_on():
    block = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    (message,) = read_blocks(None, [user(block)]).messages()
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]


async def test_tools_are_in_the_prompt_when_none_may_be_called(shows):
    tool = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
    bare = {"name": "clock", "type": "custom", "cache_control": {"type": "ephemeral"}}
    got = await shows([HI], tools=[tool, bare], tool_choice={"type": "none", "disable_parallel_tool_use": True})
    assert got == (
        '<tools>[{"type": "function", "function": {"name": "weather", "description": "of a city", '
        '"parameters": {"type": "object", "properties": {}}}}, '
        '{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]'
        "</tools>\n[user]hi\n[assistant]"
    )


async def test_a_choice_of_tools_is_checked_where_tokens_are_counted(client):
    tools = [{"name": "weather", "input_schema": {}}]
    body = {"messages": [HI], "tools": tools, "tool_choice": {"type": "tool", "name": "clock"}}
    refused = await client.post("/v1/messages/count_tokens", body)
    assert (refused.status, "tool_choice.name" in refused.json()["error"]["message"]) == (400, True)


async def test_server_tools_are_left_out_with_a_warning(shows, caplog, monkeypatch):
    monkeypatch.setattr(foreign_body, "lines", foreign_body.Minutes())
    server_tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, {"type": "bash_20250124"}]
    got = await shows([HI], tools=server_tools, tool_choice={"type": "auto"})
    assert got == "[user]hi\n[assistant]"
    assert "tools.web_search_20250305 of a request to /v1/messages runs at other servers only" in caplog.text
    assert "tools.bash_20250124" in caplog.text


async def test_thinking_and_effort_reach_the_template(shows):
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert await shows([HI], thinking=enabled) == "[user]hi\n[assistant] thinking=True"
    for kind in ("adaptive", "between_tools"):
        assert await shows([HI], thinking={"type": kind}) == "[user]hi\n[assistant] thinking=True"
    assert await shows([HI], thinking={"type": "disabled"}) == "[user]hi\n[assistant] thinking=False"
    assert await shows([HI], output_config={"effort": "high"}) == "[user]hi\n[assistant] effort=high"


async def test_template_variables_of_the_request_win(shows):
    kwargs = {"mood": "good", "enable_thinking": False}
    got = await shows([HI], chat_template_kwargs=kwargs, thinking={"type": "adaptive"})
    assert got == "[user]hi\n[assistant] thinking=False mood=good"


async def test_prefill_leaves_the_last_message_open(shows):
    assert await shows([HI, {"role": "assistant", "content": "well, "}]) == "[user]hi\n[assistant]well, "
    assert await shows([HI, {"role": "assistant", "content": [text("{")]}]) == "[user]hi\n[assistant]{"


async def test_a_call_without_its_result_cannot_be_continued(client):
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    reply = await client.post(
        "/v1/messages", {"max_tokens": 1, "messages": [HI, {"role": "assistant", "content": [use]}]}
    )
    assert reply.status == 400
    assert "tool_result" in reply.json()["error"]["message"]
