# ruff: noqa: E501
"""The plainer half of the fifty templates (see families.py): small families, and constructs that only some use."""

from tests.server.render import families as big

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

VICUNA = """{% set seps = [' ', '</s>'] %}A chat.
{%- for m in messages %}{{ seps[loop.index0 % 2] if not loop.first }}{{ {'user': 'USER', 'assistant': 'ASSISTANT'}\
.get(m.role, m.role | upper) }}: {{ m.content.strip() }}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"""

ALPACA = """{% for m in messages %}
### {{ 'Instruction' if m.role == 'user' else 'Response' if m.role == 'assistant' else m.role | capitalize }}:
{{ m.content | trim | replace('\\n\\n', '\\n') }}

{% endfor %}
{% if add_generation_prompt %}
### Response:
{% endif %}
"""

INTERNLM = """{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] \
+ '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

YI = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|im_start|>system\\n' + message['content'] + \
'<|im_end|>\\n' }}{% endif %}{% endfor %}
{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

OLMO = """{{ eos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

OLMO2 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + \
message['content'] + '\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token \
+ '\\n' }}{% else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and \
add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""

FALCON = """{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{% if message['role'] == 'system' \
%}{{ 'System: ' }}{% elif message['role'] == 'user' %}{{ 'User: ' }}{% elif message['role'] == 'assistant' %}\
{{ 'Falcon: ' }}{% endif %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '\\nFalcon:' }}{% endif %}"""

FALCON3 = """{% if tools %}{{ '<|system|>\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}\
{% set remaining_messages = messages[1:] %}{% else %}{% set remaining_messages = messages %}{% endif %}
{{ 'Tools: ' }}{{ tools }}{% else %}{% set remaining_messages = messages %}{% endif %}
{% for message in remaining_messages %}{{ '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

OPENCHAT = """{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ': ' + \
message['content'] + '<|end_of_turn|>'}}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"""

SOLAR = """{% for message in messages %}{% if message['role'] == 'system' %}{% if message['content']%}{{'### System:\\n' \
+ message['content']+'\\n\\n'}}{% endif %}{% elif message['role'] == 'user' %}{{'### User:\\n' + message['content']+\
'\\n\\n'}}{% elif message['role'] == 'assistant' %}{{'### Assistant:\\n'  + message['content']}}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}{% endfor %}"""

EXAONE = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '[|system|][|endofturn|]\\n' \
}}{% endif %}{{ '[|' + message['role'] + '|]' + message['content'] }}{% if message['role'] == 'user' %}{{ '\\n' }}\
{% else %}{{ '[|endofturn|]\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"""

JAMBA = """{%- set bom_str = bom_str or "<|bom|>" -%}{%- set eom_str = eom_str or "<|eom|>" -%}
{%- set ns = namespace(message_count=0, is_last_checked_defined=False, last='') -%}
{{- bos_token if bos_token else '' -}}
{%- for message in messages -%}
    {%- set ns.message_count = ns.message_count + 1 -%}{%- set ns.last = message -%}
    {{- bom_str ~ '<|' ~ message.role ~ '|>' ~ ' ' -}}{{- message.content | default('', true) -}}{{- eom_str -}}
{%- endfor -%}{%- if add_generation_prompt and ns.last.role != 'assistant' -%}{{- bom_str ~ '<|assistant|> ' -}}{%- endif -%}
{{- '#' ~ ns.message_count -}}"""

HERMES = """{%- macro json_to_python_type(json_spec) %}
{%- set basic_type_map = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if basic_type_map[json_spec.type] is defined %}{{- basic_type_map[json_spec.type] }}
{%- elif json_spec.type == "array" %}{{- "list[" +  json_to_python_type(json_spec|items) + "]"}}
{%- elif json_spec.type == "object" %}
    {%- if json_spec.additionalProperties is defined %}{{- "dict[str, " + json_to_python_type(json_spec.additionalProperties) + ']'}}
    {%- else %}{{- "dict" }}{%- endif %}
{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\n<tools> ' }}
{%- for tool in tools or () %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for param_name, param_fields in tool.parameters.properties|items %}
        {{- param_name + ": " + json_to_python_type(param_fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}{{- ")" }}
    {%- if tool.return is defined %}{{- " -> " + json_to_python_type(tool.return) }}{%- endif %}
    {{- " - " + tool.description + "\\n\\n" if tool.description else "" }}
    {{- '", "parameters": ' }}
    {%- if tool.parameters.properties | length == 0 %}{{- "{}" }}{%- else %}{{- tool.parameters|tojson }}{%- endif %}{{- "}" }}
    {%- if not loop.last %}{{- "\\n" }}{%- endif %}
{%- endfor %}{{- " </tools><|im_end|>\\n" }}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '{' }}{{- '"name": "' }}{{- tool_call.name }}{{- '"' }}
            {%- if tool_call.arguments is defined %}{{- ', ' }}{{- '"arguments": ' }}{{- tool_call.arguments|tojson }}{%- endif %}
            {{- '}' }}{{- '\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' }}{{- message.content }}
        {%- if not loop.last %}{{- '\\n</tool_response>\\n' }}{%- else %}{{- '\\n</tool_response>' }}{%- endif %}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}{%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}"""

KIMI = """{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{% for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>system<|im_middle|>Kind.<|im_end|>{%- endif -%}
    {%- set role_name = message.get('name') or message['role'] -%}
    {%- if message['role'] == 'user' -%}<|im_user|>{{ role_name }}<|im_middle|>
    {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ role_name }}<|im_middle|>
    {%- else -%}<|im_system|>{{ role_name }}<|im_middle|>{%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {%- if message['content'] -%}{{ message['content'] }}{%- endif -%}<|tool_calls_section_begin|>
        {%- for tool_call in message['tool_calls'] -%}
            {%- set func_name = tool_call['function']['name'] -%}{%- set formatted_id = 'functions.' + func_name + ':' + loop.index0|string -%}
            <|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>{% if tool_call['function']['arguments'] is string %}\
{{ tool_call['function']['arguments'] }}{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>
        {%- endfor -%}<|tool_calls_section_end|>
    {%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}\n{{ message['content'] }}
    {%- elif message['content'] is string -%}{{ message['content'] }}{%- endif -%}<|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

HARMONY = """{%- macro render_typescript_type(spec, required, is_nullable=false) -%}
    {%- if spec.type == "array" -%}{{ render_typescript_type(spec['items'], required) + '[]' if spec['items'] else 'any[]' }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}{{ spec.type | join(' | ') }}
    {%- elif spec.type == "string" -%}{{ '"' + spec.enum|join('" | "') + '"' if spec.enum else 'string' }}
    {%- elif spec.type in ("number", "integer") -%}{{- "number" }}
    {%- elif spec.type == "object" -%}{{- '{' ~ spec.properties | default({}) | length ~ '}' }}
    {%- else -%}{{- "any" }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y") + "\\nReasoning: " + (reasoning_effort or 'medium') + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer_message = "" %}{%- set loop_messages = messages %}{%- endif %}
{{- "<|start|>developer<|message|># Instructions\\n" + developer_message }}
{%- if tools -%}{{- "\\nnamespace functions {\\n" }}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- "// " + (tool.description or '') + "\\ntype "+ tool.name + " = (_: {\\n" }}
        {%- for param_name, param_spec in tool.parameters.properties.items() %}
            {{- param_name }}{%- if param_name not in (tool.parameters.required or []) %}{{- "?" }}{%- endif %}
            {{- ": " ~ render_typescript_type(param_spec, tool.parameters.required or []) ~ ",\\n" }}
        {%- endfor %}{{- "}) => any;\\n\\n" }}
    {%- endfor %}{{- "} // namespace functions" }}
{%- endif -%}{{- "<|end|>" }}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message %}
            {%- if message.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {%- for tool_call in message.tool_calls %}{%- set last_tool_call.name = tool_call.function.name %}
                {{- "<|start|>assistant to=functions." ~ tool_call.function.name ~ "<|message|>" ~ tool_call.function.arguments|tojson ~ "<|call|>" }}
            {%- endfor %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}{{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception("Message has tool role, but there was no call!") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

NEMOTRON = """{{- bos_token }}{%- for m in messages -%}
{{ '<extra_id_0>System\\n' if m.role == 'system' else '<extra_id_1>' ~ m.role|title ~ '\\n' -}}
{% filter trim %}{{ m.content }}{% endfilter %}{{ '\\n' }}{%- else -%}nobody spoke{%- endfor %}
{%- if add_generation_prompt %}<extra_id_1>Assistant\n{% endif %}"""

SEED = """{%- set effort = {'low': 512, 'high': 0}.get(reasoning_effort, -1) %}{%- macro budget(n) -%}
{{ 'unlimited' if n < 0 else '%d tokens' | format(n) }}{%- endmacro -%}
<seed:bos>system
{{ budget(effort) }}, {{ budget(5) }}{% for m in messages %}<seed:eos><seed:bos>{{ m.role }}
{% if m.reasoning_content is defined and m.reasoning_content is string and m.reasoning_content | trim | length > 0 -%}
<seed:think>{{ m.reasoning_content | trim }}</seed:think>{% endif %}{{ m.content if m.content }}
{%- if m.tool_calls %}{% for t in m.tool_calls %}
<seed:tool_call><function={{ t.function.name }}>
{%- for k, v in t.function.arguments | dictsort %}<parameter={{ k }}>{% if v is string %}{{ v }}{% elif v is boolean %}\
{{ v | lower }}{% elif v is number %}{{ v }}{% elif v is none %}null{% else %}{{ v | tojson }}{% endif %}</parameter>
{%- endfor %}</function></seed:tool_call>{% endfor %}{% endif %}{% endfor %}"""

MINIMAX = """{%- macro render_tool_namespace(namespace_name, tool_list) -%}
{%- for tool in tool_list -%}<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}{%- endmacro -%}
{%- set ns = namespace(last_tool_call=none, last_user_index=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user_index = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- ']~!b[' ~ ']~b]system' ~ '\\n' -}}{{- render_tool_namespace('functions', tools) if tools -}}{{- '[e~[\\n' -}}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}{{- ']~b]ai' ~ '\\n' -}}
        {%- if message.reasoning_content is string and loop.index0 > ns.last_user_index -%}{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' -}}{%- endif -%}
        {{- message.content -}}
        {%- if message.tool_calls -%}{{- '\\n<minimax:tool_call>\\n' -}}
            {%- for tool_call in message.tool_calls -%}{{- '<invoke name="' + tool_call.function.name + '">' }}
                {% set _args = tool_call.function.arguments %}
                {%- for k, v in _args.items() %}{{- '<parameter name="' + k + '">' -}}{{- v | tojson(ensure_ascii=False) if v is not string else v -}}{{- '</parameter>\\n' }}{% endfor %}
                {{- '</invoke>\\n' -}}{%- endfor -%}{{- '</minimax:tool_call>' -}}
            {%- set ns.last_tool_call = message.tool_calls[-1].function.name -%}
        {%- endif -%}{{- '[e~[' ~ '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if ns.last_tool_call is none -%}{{- raise_exception("no previous assistant message with a tool call!") -}}{%- endif -%}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') -%}{{- ']~b]tool' -}}{%- endif -%}{{- '\\n<response>' ~ message.content ~ '</response>' -}}
    {%- else -%}{{- ']~b]' ~ message.role ~ '\\n' ~ message.content ~ '[e~[' ~ '\\n' -}}{%- endif -%}
{%- endfor -%}"""

# Constructs that the families above do not use.
CYCLES = """{% set comma = joiner(', ') %}{% set colour = cycler('odd', 'even') %}{% for m in messages %}{{ comma() }}\
{{ colour.next() }}:{{ loop.cycle('a', 'b', 'c') }}{{ '*' if loop.changed(m.role) }}{{ m.role | center(11) }}{{ loop.revindex }}\
{% endfor %}"""
GROUPS = """{% for role, group in messages | groupby('role') %}{{ role }}={{ group | map(attribute='content') | join('|') }};\
{% endfor %}{{ messages | map(attribute='role') | unique | sort | join(',') }}{% for row in messages | batch(2, '-') %}\
[{{ row | length }}]{% endfor %}{{ [3, 1, 2] | sort(reverse=true) }}{{ [1, 2] | sum }}{{ messages | length is divisibleby 2 }}"""
BLOCKS = """{%- set body -%}{% for m in messages %}<{{ m.role }}>{{ m.content | e }}</{{ m.role }}>{% endfor %}{%- endset -%}
{% block main %}{{ body | wordcount }}{{ body | striptags | truncate(40, true) }}{% endblock %}
{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{% raw %}{{ raw }}{% endraw %}{# gone #}{{ body | length }}"""
CALLS = """{% macro turn(role, indent=2) -%}<{{ role }}{{ varargs | join('+') }}{{ kwargs | length }}>{{ caller(indent) }}\
{%- endmacro %}{% for m in messages %}{% call(n) turn(m.role, 3, 'x', y=1) %}{{ ' ' * n }}{{ m.content }}{% endcall %}
{% endfor %}{{ turn.name }}{{ turn.arguments }}"""
LOOPS = """{% for m in messages recursive %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if loop.index > 3 %}{% break %}\
{% endif %}{{ loop.depth }}{{ m.content[:5] }}{{ m.content[::-1] }}{{ loop.nextitem.role if not loop.last }}{% else %}none{% endfor %}\
{% for a, (b, c) in [(1, (2, 3))] %}{{ a + b * c }}{% endfor %}{{ range(2, 9, 3) | list }}{{ 'x' in 'xyz' and not false }}"""
NUMBERS = """{{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ -3 % 5 }} {{ 3.0 }} {{ 1e3 | int }} {{ '12' | int + 1 }} {{ 2.567 | round(1) }} \
{{ 5 | string | length }} {{ [1, 2.5, none, true, 'a'] }} {{ {'a': [1, (2,)], 'b': none} }} {{ none }} {{ true and 'x' or 'y' }} \
{{ messages | length > 1 }} {{ 1 < 2 < 3 }} {{ '%05.2f|%s' % (3.14159, 'z') }} {{ 10 | filesizeformat }} {{ [1, [2]] | tojson(indent=1) }}"""
STRINGS = """{% for m in messages %}{% set c = m.content or '' %}{{ c.splitlines() | length }}{{ c.partition(' ')[0] }}|{{ c.rsplit(' ', 1) \
| last }}|{{ c.find('a') }}{{ c.startswith(('H', ' ')) }}{{ c.isdigit() }}{{ c.encode().hex()[:6] }}{{ c | trim | first | default('?') }}\
{{ c | urlencode | lower }}{{ c.removeprefix('He') }}{{ c.count('\\n') }}{{ 'q{}{x}'.format(1, x=2) }}{{ c | list | length }}{{ c ~ 1 ~ none }}\
{{ c.casefold().swapcase().zfill(3)[-3:] }}{{ "a'b" | tojson }}{{ c | replace('a', 'b', 1) | indent(2) }}
{% endfor %}"""

DERIVED = {
    "chatml-stripped": big.CHATML.replace("message['content'] +", "message['content'].strip() +"),
    "chatml-dashes": big.CHATML.replace("{% for", "\n\n{%- for").replace("{% endfor %}", "{%- endfor -%}\n  "),
    "llama3-named": big.LLAMA3.replace("message['role'] +", "(message.name | default(message['role'])) +"),
    "qwen25-inline": big.QWEN25.replace("tool | tojson", "tool | tojson(indent=2, sort_keys=true)"),
    "zephyr-tight": ZEPHYR.replace("{% ", "{%- "),
    "granite-documents": big.GRANITE.replace("document['text']", "document | tojson"),
    "seed-marked": SEED.replace("{{ m.content if m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
    "kimi-trimmed": KIMI.replace("{%- endif -%}", "{% endif %}"),
}

FAMILIES = {
    **{name.lower(): text for name, text in {**vars(big), **globals()}.items() if name.isupper() and name != "DERIVED"},
    **DERIVED,
}
