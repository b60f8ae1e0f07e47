"""Templates: byte-equal to the reference, their demands on messages, and the bounds of rendering."""

import copy
import json

import pytest

from server.render.errors import RenderError
from server.render.template import ChatTemplate, TemplateLimits
from tests.server.render import templates as kit

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<|IMAGE|>"}


@pytest.fixture(scope="module")
def reference():
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(source, messages, **values):
        return render_jinja_template(
            conversations=[copy.deepcopy(messages)], chat_template=source, **SPECIAL, **values
        )[0][0]

    return render


def with_reasoning_names(messages):
    """Adds the reasoning under its three names, as our parser does; the reference adds the names itself."""
    out = []
    for message in messages:
        reasoning = message.get("reasoning_content")
        more = {"reasoning": reasoning, "thinking": reasoning} if reasoning is not None else {}
        out.append({**message, **more})
    return out


@pytest.mark.parametrize("name", kit.STRING_TEMPLATES)
def test_text_conversations_render_as_the_reference_does(name, reference):
    source = kit.STRING_TEMPLATES[name]
    template = ChatTemplate(source, SPECIAL)
    assert template.content_format == "string"
    for k, (messages, tools) in enumerate(kit.conversations()):
        values = {"tools": tools, "add_generation_prompt": k % 3 != 0}
        kwargs = {"date_string": "1 Jan 2026", "enable_thinking": bool(k % 2)}
        got = template.render(with_reasoning_names(messages), kwargs=kwargs, **values)
        assert got == reference(source, messages, **values, **kwargs), f"conversation {k}"


@pytest.mark.parametrize("name", kit.PART_TEMPLATES)
def test_media_conversations_render_as_the_reference_does(name, reference):
    source = kit.PART_TEMPLATES[name]
    template = ChatTemplate(source, SPECIAL)
    assert template.content_format == "openai"
    documents = [{"title": "Straße", "text": "x"}]
    for k, messages in enumerate(kit.part_conversations()):
        values = {"documents": documents if k % 4 == 0 else None, "add_generation_prompt": k % 2 == 0}
        kwargs = {"add_vision_id": k % 3 == 0}
        assert template.render(messages, kwargs=kwargs, **values) == reference(source, messages, **values, **kwargs)


SNIPPETS = [
    "{{ 'a' 'b' ~ 3 // 2 }}|{{ 7 % 3 }}|{{ 2 ** 5 }}|{{ 'ab' * 3 }}",
    "{{ x | tojson(indent=2, sort_keys=true) }}{{ x | tojson(separators=(',', ':')) }}",
    "{{ x|tojson(ensure_ascii=true) }}",
    "{% for a in range(10) if a is odd %}{% if a == 7 %}{% break %}{% endif %}{{ loop.index }}{{ a }}{% endfor %}",
    "{% for a in [] %}x{% else %}none{% endfor %}{% for k, v in x | dictsort %}{{ k }}={{ v }};{% endfor %}",
    "{% macro f(a, b='z') %}{{ caller() if caller }}{{ a ~ b }}{% endmacro %}{% call f(1) %}x{% endcall %}{{ f(2) }}",
    "{% set a %}block {{ 1 }}{% endset %}{{ a | upper }}{% filter lower %}ABC{% endfilter %}",
    "{% generation %}{% set inner = 1 %}{{ inner }}{% endgeneration %}{{ inner }}|",
    "{% for row in tree recursive %}{{ row.n }}{% if row.c %}({{ loop(row.c) }}){% endif %}{% endfor %}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages | rejectattr('name', 'defined') | list | length }}",
    "{% set ns = namespace(a=[]) %}{% for i in range(3) %}{% set ns.a = ns.a + [i] %}{% endfor %}{{ ns.a }}",
    "  {% if true %}\n  kept\n  {% endif %}\n{# a comment #}\nend\n",
    "{{ nothing }}{{ nothing is defined }}{{ x.missing }}{{ x.get('k', 'd') }}{{ 'abc'[1:] }}{{ 'a-b'.split('-') }}",
    "{{ dict.fromkeys('ab', 1) }}{{ namespace(self=2, a=1).self }}{{ namespace({'k': 3}).k }}",
    "{{ dict(a=1, b=x.z).b }}{{ [1, 2, 3][-1] }}{{ 'ß' | upper }}{{ '%s|%d' | format('a', 3) }}{{ 1.50 }}",
]


@pytest.mark.parametrize("source", SNIPPETS)
def test_the_dialect_is_the_references(source, reference):
    values = {
        "x": {"z": 1, "ä": ["<", ">", "&", "'"], "b": None},
        "tree": [{"n": 1, "c": [{"n": 2}, {"n": 3, "c": [{"n": 4}]}]}],
    }
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "name": "A"}]
    assert ChatTemplate(source, SPECIAL).render(messages, kwargs=values) == reference(source, messages, **values)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set c = m['content'] %}{% for p in c[1:] %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for p in m.content | selectattr('type') %}{% endfor %}{% endfor %}", "openai"),
        ("{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}{{ f(messages[0].content) }}", "openai"),
        ("{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}{{ f(c=messages[0].content) }}", "openai"),
        ("{% for l in messages[0].content.split('x') %}{{ l }}{% endfor %}", "string"),
        ("{% for a in messages[0].tool_calls %}{{ messages[0].content }}{% endfor %}", "string"),
    ],
)
def test_content_format_is_read_from_the_template(source, wanted):
    assert ChatTemplate(source, {}).content_format == wanted
    assert ChatTemplate(source, {}, "string").content_format == "string"


def test_facts_about_a_template():
    facts = ChatTemplate(kit.THOUGHTFUL, {}).facts
    assert (facts.asks_for_string, facts.asks_for_none, facts.knows_developer) == (
        True, False, False,
    )  # fmt: skip
    source = "{% if m.role == 'developer' and m.content is not none %}{% endif %}"
    facts = ChatTemplate(source, {}).facts
    assert (facts.asks_for_none, facts.knows_developer) == (True, True)


def refused(source, message=".", status=400, reason="template_error", **values):
    with pytest.raises(RenderError, match=message) as caught:
        ChatTemplate(source, SPECIAL).render([{"role": "user", "content": "x"}], **values)
    assert (caught.value.status, caught.value.reason) == (status, reason)


QUICK = TemplateLimits(timeout=0.2, max_output_bytes=1000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for a in range(9999) %}{{ f(n) if n }}{% endfor %}{% endmacro %}{{ f(0) }}" * 400,
        "{% for a in range(9999) %}{% set x = messages | tojson %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    ],
)
def test_s29_a_long_rendering_is_ended_by_the_clock(source):
    refused(source, "0.2 seconds", limits=QUICK)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}aaaa{% endfor %}", "passes 1000 bytes"),
        ("{{ 'x' * 999999999 }}", "makes a text or list of length 999999999"),
        ("{{ 9 ** 999999999 }}", "power"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "sandbox forbids"),
        ("{{ messages.append(1) }}", "sandbox forbids"),
        ("{% include 'x' %}", "TypeError"),
        ("{{ namespace(_a=1) }}", "sandbox forbids"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "sandbox forbids"),
        ("{{ dict.mro() }}", "undefined|has no attribute"),
        ("{{ 1 + messages }}", "TypeError"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ range(999999999) | list }}", "OverflowError"),
    ],
)
def test_s29_what_a_template_may_not_do(source, message):
    refused(source, message, limits=TemplateLimits(max_output_bytes=1000))


def test_a_template_that_does_not_compile_says_so():
    with pytest.raises(RenderError, match="does not compile"):
        ChatTemplate("{% for x in %}", {})


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "omniloop_tick"]
)
def test_s29_kwargs_never_replace_our_names(name):
    refused("x", "would replace", reason="invalid_parameter", kwargs={name: 1})


def test_kwargs_are_bounded():
    refused("x", "at most 32", reason="invalid_parameter", kwargs={f"k{n}": 1 for n in range(33)})
    refused("x", "16384 bytes", reason="invalid_parameter", kwargs={"k": "x" * 16384})
    refused("x", "may not come", 403, "override_not_trusted", kwargs={"chat_template": "y"})


def test_deep_values_do_not_end_the_process():
    deep = json.loads("[" * 900 + "]" * 900)
    for _ in range(300):
        deep = [deep]
    refused("{{ x | tojson }}", "too deeply", kwargs={"x": deep}, limits=TemplateLimits(max_kwargs_bytes=1 << 20))
