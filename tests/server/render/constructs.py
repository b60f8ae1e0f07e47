# ruff: noqa: E501
"""Pieces of chat templates, written for these tests, and templates composed of the pieces.

A template has a head (text before the turns), a piece that renders tools, a body (the loop over the turns), a piece
that renders calls, a tail and a spacing. Each piece uses constructs of real checkpoints' templates: namespaces, macros,
loop controls, filters and tests, dumps of JSON, exceptions, clocks, generation blocks, white space control. TEMPLATES
has combinations that cover every pair of pieces, and single templates for the other constructs.

The body loops over `turns`; `turn` is the current turn. Only MEDIA loops over the content of a turn.
"""

from itertools import product

from tests.covering import covering

HEADS = {
    "bare": "{%- set turns = messages -%}{{ bos_token }}",
    "briefing": """
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set brief = messages[0].content | trim -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set brief = default_system | default('No briefing.') -%}{%- set turns = messages -%}
{%- endif -%}
{{ '# ' ~ brief ~ '\\n' if brief else '' }}""",
    "notes": """
{%- set desk = namespace(notes='', count=0, open=true) -%}
{%- for entry in messages if entry.role == 'system' -%}
    {%- set desk.notes = desk.notes ~ entry.content ~ '\\n' -%}{%- set desk.count = desk.count + 1 -%}
{%- endfor -%}
{{ desk.count ~ ' notes\\n' ~ desk.notes }}
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list -%}""",
    "dated": """
{%- if not date_string is defined -%}{%- set date_string = strftime_now('%Y') -%}{%- endif -%}
{%- if builtin_tools is defined -%}{{ builtin_tools | reject('equalto', 'code_interpreter') | join(', ') ~ '; ' }}{%- endif -%}
{{ 'On ' + date_string + '\\n' }}{%- set turns = messages -%}""",
    "modes": """
{%- set slow = enable_thinking is not defined or enable_thinking -%}
{%- set depth = {'low': 1, 'high': 9}.get(reasoning_effort, -1) -%}
{%- macro spell(n) -%}{{ 'any' if n < 0 else '%d steps' | format(n) }}{%- endmacro -%}
[{{ 'slow' if slow else 'fast' }}, {{ spell(depth) }}, {{ spell(5) }}]{%- set turns = messages -%}""",
    "papers": """
{%- for paper in documents or [] -%}
    {{ loop.index ~ '/' ~ loop.length ~ ' ' ~ paper.title | upper ~ ': ' ~ paper['text'] ~ '\\n' }}
    {%- for key, value in paper.items() -%}{{ key | title }}={{ value | string }}{{ ', ' if not loop.last }}{%- endfor -%}
{%- else -%}{{ 'no papers\\n' }}
{%- endfor -%}
{%- set turns = messages -%}""",
}

TOOLS = {
    "lines": "{%- if tools -%}{{ 'Can:' }}{%- for tool in tools -%}{{ '\\n- ' ~ (tool | tojson) }}{%- endfor -%}{{ '\\n' }}{%- endif -%}",
    "dump": "{%- if tools is not none and tools -%}{{ tools | tojson(indent=4) }}{{ '\\n' }}{%- endif -%}",
    "sorted": """
{%- for tool in tools or () -%}
    {{ tool.function | tojson(ensure_ascii=true, sort_keys=true) ~ (tool | tojson(separators=(',', ':'))) ~ '\\n' }}
{%- endfor -%}""",
    "signatures": """
{%- macro kind(spec) -%}
    {%- set plain = {'string': 'text', 'integer': 'whole', 'number': 'real', 'boolean': 'flag'} -%}
    {%- if plain[spec.type] is defined -%}{{ plain[spec.type] }}
    {%- elif spec.type == 'array' -%}{{ 'many ' ~ kind(spec['items'] or {}) }}
    {%- elif spec.type == 'object' -%}{{ '{' ~ spec.properties | default({}) | length ~ '}' }}
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join('|') }}
    {%- else -%}{{ 'any' }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
    {%- if tool.function is defined -%}{%- set tool = tool.function -%}{%- endif -%}
    {{ tool.name ~ '(' }}
    {%- for name, spec in tool.parameters.properties | items -%}
        {{ name }}{{ '?' if name not in (tool.parameters.required or []) }}: {{ kind(spec) }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}
    {%- endfor -%}
    {{ ') ' ~ (tool.description or 'no words') | trim ~ '\\n' }}
{%- endfor -%}""",
    "tagged": """
{%- macro others(fields, known) -%}
    {%- if fields is mapping -%}
        {%- for key in fields if key not in known -%}
            {%- if fields[key] is mapping or (fields[key] is sequence and fields[key] is not string) -%}
                {{ '<' ~ key ~ '>' ~ (fields[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else -%}{{ '<' ~ key ~ '>' ~ fields[key] | string ~ '</' ~ key ~ '>' }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools is iterable and tools | length > 0 -%}
    {%- for tool in tools -%}{{ '<can>' ~ tool.function.name ~ others(tool.function, ['name']) ~ others(tool, known=['function']) ~ '</can>\\n' }}{%- endfor -%}
{%- endif -%}""",
    "by hand": """
{%- for tool in tools or [] -%}
    {{ '{' }}
    {%- for key, value in tool.function.items() if key != 'return' -%}
        {{ '"' ~ key ~ '": ' }}{{ '"' ~ value ~ '"' if value is string else value | tojson }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}
    {%- endfor -%}
    {{ '}' ~ ('; ' if not loop.last else '\\n') }}
{%- endfor -%}
{%- set listed = namespace(text='') -%}{%- for tool in (tools or [])[:] -%}{%- set listed.text = listed.text ~ tool | string -%}{%- endfor -%}{{ listed.text | length }}""",
}

CALLS = {
    "lines": """
{%- for call in turn.tool_calls or [] -%}
    {%- if call.function is defined -%}{%- set call = call.function -%}{%- endif -%}
    {{ '\\n=> ' ~ call.name ~ ' ' }}{%- if call.arguments is string -%}{{ call.arguments }}{%- else -%}{{ call.arguments | tojson }}{%- endif -%}
{%- endfor -%}""",
    "pairs": """
{%- if 'tool_calls' in turn -%}
    {%- for call in turn.tool_calls -%}
        {{ '\\n' ~ call.function.name ~ ': ' }}
        {%- for key, value in call.function.arguments | items -%}{{ key ~ '="' ~ value | string ~ '"' }}{%- if not loop.last %}, {% endif -%}{%- endfor -%}
    {%- endfor -%}
{%- endif -%}""",
    "numbered": """
{%- for call in turn.get('tool_calls') or [] -%}
    {%- if not call.id is defined or call.id | length != 9 -%}{{ raise_exception('A call needs an id of nine letters') }}{%- endif -%}
    {{ (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ (', ' if not loop.last else ']') }}
{%- endfor -%}""",
    "indented": """
{%- if turn.tool_calls is defined and turn.tool_calls is not none -%}
    {%- for call in turn.tool_calls -%}
        {{ {'do': call.function.name, 'with': call.function.arguments} | tojson(indent=2) | indent(4, true) }}{{ ',\\n' if not loop.last }}
    {%- endfor -%}
{%- endif -%}""",
    "typed": """
{%- for call in turn.tool_calls | default([], true) -%}
    {{ '\\n' ~ call.function.name }}
    {%- for key, value in call.function.arguments | dictsort %} {{ key }}={% if value is string %}{{ value }}{% elif value is boolean %}{{ value | lower }}{% elif value is number %}{{ value }}{% elif value is none %}null{% else %}{{ value | tojson }}{% endif %}{%- endfor -%}
{%- endfor -%}""",
}

BODIES = {
    "plain": """
{%- for turn in turns -%}{{ '<' + turn['role'] + '> ' + turn['content'] }}CALLS{{ '\\n' }}{%- endfor -%}""",
    "edges": """
{%- for turn in turns -%}
    {%- if loop.first or loop.previtem.role != turn.role -%}{{ '[' ~ turn.role ~ ' ' ~ loop.index ~ '/' ~ loop.length ~ ']\\n' }}{%- endif -%}
    {{ turn.content | trim }}CALLS
    {%- if loop.last or turns[loop.index0 + 1].role != turn.role -%}{{ '\\n[/' ~ turn['role'] ~ ']' }}{%- endif -%}{{ '\\n' if not loop.last }}
{%- endfor -%}""",
    "strict": """
{%- set talk = turns | selectattr('role', 'equalto', 'user') | list -%}
{%- for turn in turns -%}
    {%- if turn.role not in ['system', 'user', 'assistant', 'tool'] -%}{{ raise_exception('Who is ' ~ turn.role ~ '?') }}{%- endif -%}
    {%- if turn.role == 'user' and turn == talk[-1] -%}{{ '(last) ' }}{%- endif -%}
    {%- if turn.role == 'assistant' and loop.first -%}{{ raise_exception('Nobody has asked yet') }}{%- endif -%}
    {{ turn.role[0] ~ ': ' ~ turn.content ~ eos_token }}CALLS
{%- endfor -%}""",
    "alternating": """
{%- for turn in turns if turn.role != 'system' -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Turns must alternate') }}{%- endif -%}
    {{ 'Q: ' + turn['content'] + '\\n' if turn['role'] == 'user' else 'A: ' + turn['content'] + eos_token + '\\n' }}CALLS
{%- else -%}nobody spoke{%- endfor -%}""",
    "marked": """
{%- for turn in turns -%}
    {%- if turn.role == 'assistant' -%}
        {{ '<a>' }}{%- generation -%}{{ turn.content.lstrip('\\n') }}CALLS{{ '</a>' }}{%- endgeneration -%}
    {%- else -%}{{ '<' ~ turn.role[:1] ~ '>' ~ turn.content ~ '</' ~ turn.role[:1] ~ '>' }}{%- endif -%}
{%- endfor -%}""",
    "thoughtful": """
{%- set seen = namespace(last=turns | length - 1, found=false) -%}
{%- for turn in turns[::-1] -%}
    {%- if not seen.found and turn.role == 'user' -%}{%- set seen.found = true -%}{%- set seen.last = turns | length - 1 - loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for turn in turns -%}
    {%- set said = turn.content if turn.content is string else '' -%}{%- set thought = '' -%}
    {%- if turn.reasoning_content is string -%}{%- set thought = turn.reasoning_content -%}
    {%- elif '</think>' in said -%}
        {%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
        {%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{ turn.role ~ ':' }}{%- if loop.index0 > seen.last and thought -%}{{ ' (' ~ thought.strip() ~ ')' }}{%- endif -%}{{ ' ' ~ said }}CALLS{{ '\\n' }}
{%- endfor -%}""",
    "called": """
{%- macro frame(role, mark='~', width=2) -%}{{ mark * width ~ role ~ varargs | join('+') ~ kwargs | length ~ ' ' }}{{ caller(width) }}{{ '\\n' }}{%- endmacro -%}
{%- for turn in turns -%}
    {%- call(n) frame(turn.role, '-', 3, 'x', 'y', z=1) -%}{{ ' ' * n ~ turn.content }}CALLS{%- endcall -%}
{%- endfor -%}{{ frame.name }}""",
    "named": """
{%- for turn in turns -%}
    {%- if turn.role == 'system' and loop.index > 1 -%}{%- continue -%}{%- endif -%}
    {%- if loop.index > 9 -%}{%- break -%}{%- endif -%}
    {%- set who = turn.get('name') or {'user': 'Guest', 'assistant': 'Host'}.get(turn.role, turn.role | capitalize) -%}
    {%- set first = turn.role == 'tool' and (loop.first or turns[loop.index0 - 1].role != 'tool') -%}
    {%- set text -%}{{ 'Results\\n' if first }}{{ turn.content | replace('\\n\\n', '\\n') }}CALLS{%- endset -%}
    {{ who ~ ': ' ~ text ~ '\\n' }}
{%- endfor -%}""",
}

TAILS = {
    "asked": "{%- if add_generation_prompt -%}{{ '<assistant> ' }}{%- endif -%}",
    "ended": "{{ 'Host:' if add_generation_prompt else eos_token }}",
    "quick": "{%- if add_generation_prompt -%}{{ 'A:' }}{%- if enable_thinking is defined and enable_thinking is false -%}{{ ' ()' }}{%- endif -%}{%- endif -%}",
    "open": "{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = false -%}{%- endif -%}{{ '>' if add_generation_prompt }}\n",
}


def loosened(source: str) -> str:
    """Puts blocks on lines of their own, which the environment trims; expressions stay in place."""
    return source.replace("{%- ", "\n    {% ").replace(" -%}", " %}\n")


SPACINGS = {"tight": str, "loose": loosened, "behind": lambda source: source.replace(" -%}", " %}")}


SORTS = [HEADS, TOOLS, BODIES, CALLS, TAILS, SPACINGS]


def compose(*names: str) -> str:
    """A template of these pieces: head, tools, body, calls, tail, spacing."""
    head, tools, body, calls, tail, spacing = (sort[name] for sort, name in zip(SORTS, names))
    return spacing(head + tools + body.replace("CALLS", calls) + tail)


def composed() -> dict[str, str]:
    """Templates by name that together have every possible pair of pieces of different sorts."""
    rows = []
    for head, body, tail, spacing in product(*(range(len(sort)) for sort in (HEADS, BODIES, TAILS, SPACINGS))):
        places = head, (head + body) % len(TOOLS), body, (2 * head + body) % len(CALLS), tail, spacing
        rows.append({str(sort): place for sort, place in enumerate(places)})
    found = {}
    for number in covering(rows, 2):
        names = [list(sort)[place] for sort, place in zip(SORTS, rows[number].values())]
        found[", ".join(names)] = compose(*names)
    return found


MEDIA = {
    "pictures": """{{ bos_token }}
{%- for turn in messages -%}
    {{ '<' ~ (turn.role if turn.role != 'assistant' else 'model') ~ '>' }}
    {%- if turn['content'] is string -%}{{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}
            {%- if part['type'] == 'text' -%}{{ part['text'] | trim }}
            {%- elif part['type'] in ('image', 'image_url') -%}{{ '(picture)' }}
            {%- else -%}{{ raise_exception('Text and pictures only') }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('What is this?') }}{%- endif -%}{{ '\\n' }}
{%- endfor -%}""",
    "visible": """
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}{%- if part is mapping and part.type == 'text' -%}{{ part.text }}{%- elif part is string -%}{{ part }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{%- for turn in messages -%}{{ turn.role }}: {{ visible(turn.content) }}{{ '!' if visible(turn.content).endswith('?') }}
{% endfor -%}""",
    "first": """
{%- if messages[0].content is string -%}{%- set opening = messages[0].content -%}{%- else -%}{%- set opening = messages[0].content[0]['text'] | default('-') -%}{%- endif -%}
{{ opening | length }}{% for turn in messages %}{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}{{ loop.index0 }}{{ part.text or part.type }}{% endfor %}{% endif %};{% endfor %}""",
}

# Constructs that the pieces above do not use.
CYCLES = """{% set comma = joiner(', ') %}{% set colour = cycler('odd', 'even') %}{% for m in messages %}{{ comma() }}\
{{ colour.next() }}:{{ loop.cycle('a', 'b', 'c') }}{{ '*' if loop.changed(m.role) }}{{ m.role | center(11) }}{{ loop.revindex }}\
{% endfor %}"""
GROUPS = """{% for role, group in messages | groupby('role') %}{{ role }}={{ group | map(attribute='content') | join('|') }};\
{% endfor %}{{ messages | map(attribute='role') | unique | sort | join(',') }}{% for row in messages | batch(2, '-') %}\
[{{ row | length }}]{% endfor %}{{ [3, 1, 2] | sort(reverse=true) }}{{ [1, 2] | sum }}{{ messages | length is divisibleby 2 }}"""
BLOCKS = """{%- set body -%}{% for m in messages %}<{{ m.role }}>{{ m.content | e }}</{{ m.role }}>{% endfor %}{%- endset -%}
{% block main %}{{ body | wordcount }}{{ body | striptags | truncate(40, true) }}{% endblock %}
{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{% raw %}{{ raw }}{% endraw %}{# gone #}{{ body | length }}"""
CALLERS = """{% macro turn(role, indent=2) -%}<{{ role }}{{ varargs | join('+') }}{{ kwargs | length }}>{{ caller(indent) }}\
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

SINGLE = {
    "cycles": CYCLES, "groups": GROUPS, "blocks": BLOCKS, "calls": CALLERS, "loops": LOOPS, "numbers": NUMBERS,
    "strings": STRINGS,
}  # fmt: skip
TEMPLATES = {**composed(), **MEDIA, **SINGLE}
