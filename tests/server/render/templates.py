"""Chat templates composed of our own pieces (constructs.py), and conversations to render with them."""

from tests.server.render.constructs import compose

PLAIN = compose("briefing", "lines", "plain", "lines", "asked", "tight")
THOUGHTFUL = compose("briefing", "sorted", "thoughtful", "lines", "quick", "loose")
DATED = compose("dated", "dump", "edges", "pairs", "asked", "tight")
STRICT = compose("bare", "by hand", "strict", "numbered", "ended", "behind")
MARKED = compose("notes", "tagged", "marked", "indented", "open", "tight")

PLACES = """
{%- set seen = namespace(pictures=0) -%}
{%- if messages[0].role != 'system' %}[system] You are kind.<|im_end|>
{% endif -%}
{%- for turn in messages -%}
[{{ turn['role'] }}] {% if turn['content'] is string %}{{ turn['content'] }}{% else %}{% for part in turn['content'] -%}
    {%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
        {%- set seen.pictures = seen.pictures + 1 -%}
        {{ '(' ~ seen.pictures ~ ') ' if add_vision_id }}<|vision_bos|><|IMAGE|><|vision_eos|>
    {%- elif part['type'] == 'audio' or 'audio' in part -%}<|audio_bos|><|AUDIO|><|audio_eos|>
    {%- elif part['type'] == 'video' or 'video' in part -%}<|vision_bos|><|VIDEO|><|vision_eos|>
    {%- elif 'text' in part -%}{{ part['text'] }}
    {%- endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}[assistant] {% endif -%}
"""

MACROS = """
{%- macro show(content, numbered) -%}
  {%- for item in content -%}
    {%- if item.type == 'image' -%}<|vision_bos|><|IMAGE|><|vision_eos|>
    {%- elif item.type == 'audio' -%}<|audio_bos|><|AUDIO|><|audio_eos|>
    {%- elif item.type == 'video' -%}<|vision_bos|><|VIDEO|><|vision_eos|>
    {%- else -%}{{ loop.index if numbered }}{{ item.text }}{%- endif -%}
    {%- if loop.index > 6 %}{% break %}{% endif -%}
  {%- endfor -%}
{%- endmacro -%}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{% continue %}{% endif %}
  {{ m.role | capitalize }}{{ ' (' ~ m.name ~ ')' if m.name }}: {{ show(m.content, false) }}
{% endfor %}
{%- if documents %}{% for d in documents %}[{{ d.title | upper }}] {{ d.text }}
{% endfor %}{% endif -%}
{{- 'Assistant: ' if add_generation_prompt -}}
"""

STRING_TEMPLATES = {"plain": PLAIN, "thoughtful": THOUGHTFUL, "dated": DATED, "strict": STRICT, "marked": MARKED}
PART_TEMPLATES = {"places": PLACES, "macros": MACROS}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the <b>weather</b> & 'more' in «Zürich»",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

TEXTS = [
    "Hello", "  spaces around \n", "你好，世界 😀", "<b>html & 'quotes' \"double\"</b>", "{{ not a template }} {% x %}",
    "line one\nline two\n\n", "tab\tand \\ backslash", "", "<think>\nhm\n</think>\n\nyes", "é̂ combining ﷽ ‮rtl",
]  # fmt: skip


def call(name, arguments, at=0):
    return {"id": f"call{at:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    """40 text conversations: (messages, tools)."""
    found = []
    for k, text in enumerate(TEXTS):
        other = TEXTS[(k + 3) % len(TEXTS)]
        found.append(([{"role": "user", "content": text}], None))
        found.append(
            (
                [
                    {"role": "system", "content": other},
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": other},
                    {"role": "user", "content": other + text},
                ],
                TOOLS if k % 2 else None,
            )
        )
        found.append(
            (
                [
                    {"role": "user", "content": text},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [call("weather", {"city": other, "days": k}, k)],
                    },
                    {"role": "tool", "content": other, "tool_call_id": f"call{k:05d}"},
                    {"role": "assistant", "content": "It rains.", "reasoning_content": text},
                    {"role": "user", "content": "thanks"},
                ],
                TOOLS,
            )
        )
        calls = [call("now", {}, k), call("weather", {"city": text, "at": [1.5, None, True, {"x": 1}]}, k + 1)]
        found.append(
            (
                [
                    {"role": "user", "content": "two calls"},
                    {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": other},
                    {"role": "tool", "content": text, "tool_call_id": f"call{k:05d}"},
                    {"role": "tool", "content": other, "tool_call_id": f"call{k + 1:05d}"},
                ],
                TOOLS,
            )
        )
    return found


def part_conversations():
    """40 conversations with media, in the form that templates get."""
    kinds = ["image", "audio", "video"]
    found = []
    for k, text in enumerate(TEXTS * 4):
        parts = [{"type": kinds[(k + i) % 3]} for i in range(k % 4)]
        parts.insert(k % (len(parts) + 1), {"type": "text", "text": text})
        if k % 3 == 0:
            parts.append({"type": "text", "text": "and?"})
        found.append(
            [
                *([{"role": "system", "content": [{"type": "text", "text": "Sys"}]}] if k % 2 else []),
                {"role": "user", "content": parts, **({"name": "Ann"} if k % 5 == 0 else {})},
                {"role": "assistant", "content": [{"type": "text", "text": TEXTS[k % 7]}]},
                {"role": "user", "content": [{"type": "text", "text": "go on"}]},
            ]
        )
    return found
