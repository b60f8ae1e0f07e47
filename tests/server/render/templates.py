"""Chat templates in the styles that checkpoints use, written for the tests, and conversations to render with them."""

CHATML = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = 'Be brief.' -%}{%- set rest = messages -%}
{%- endif -%}
{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}
{%- for message in rest %}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

QWEN_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" and message.content is string %}
        {%- set ns.seen = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
            {%- for arg_name, arg_val in call.arguments | items %}
                {{- arg_name + '="' + arg_val|string + '"' }}{% if not loop.last %}, {% endif %}
            {%- endfor %}
            {{- "<|eot_id|>" }}
        {%- endfor %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] not in ["user", "assistant", "tool"] %}
        {{- raise_exception("Only user, assistant and tool roles follow the system prompt") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{- " " + message["content"]|trim + eos_token}}{%- endgeneration %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

OMNI = """{% set pictures = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are kind.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}{% set pictures.value = pictures.value + 1 %}{% if add_vision_id %}Picture {{ pictures.value }}: {% endif %}<|vision_bos|><|IMAGE|><|vision_eos|>{% elif content['type'] == 'audio' or 'audio' in content %}<|audio_bos|><|AUDIO|><|audio_eos|>{% elif content['type'] == 'video' or 'video' in content %}<|vision_bos|><|VIDEO|><|vision_eos|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501

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

STRING_TEMPLATES = {"chatml": CHATML, "qwen_tools": QWEN_TOOLS, "llama": LLAMA, "mistral": MISTRAL}
PART_TEMPLATES = {"omni": OMNI, "macros": MACROS}

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
    """40 conversations with media, in the form that templates read."""
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
