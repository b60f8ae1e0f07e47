"""The message form of DeepSeek-V3.2 as a chat template. The checkpoint has none: it has Python code for the form.

Owner: none, pure functions; called while a tokenizer is loaded. In: the checkpoint's folder. Out: the template's text.
The form: system texts stand alone, with the tools after the first; a user's text is followed by the mark of the answer
and by an open or a closed thinking block; results of calls stand together, followed by such a block; an answer after
the last user has its reasoning, in thinking mode. Calls are tagged values: texts verbatim, others as JSON. The
description of tools, which the model was trained with, is a constant in the checkpoint's code; the file is read as
text and parsed, and never runs.
"""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path

log = logging.getLogger("server.render")

CODE = "encoding/encoding_dsv32.py"
DESCRIPTION, SCHEMAS = "TOOLS_SYSTEM_TEMPLATE", "{tool_schemas}"  # the constant, and the place of the tools in it
MAX_BYTES = 1 << 20  # of the file; the published one has 14,300

_NO_TOOLS = "{{- raise_exception('the description of tools is missing in " + CODE + "') -}}"
_FORM = "".join(
    (
        "{%- set open = thinking if thinking is defined else enable_thinking | default(false) -%}",
        "{%- set at = namespace(user=-1) -%}",
        "{%- for m in messages if m.role == 'user' -%}{%- set at.user = at.user + 1 -%}{%- endfor -%}",
        "{%- set seen = namespace(users=-1) -%}",
        "{%- macro described() -%}DESCRIBED{%- endmacro -%}",
        "{{- bos_token -}}",
        "{%- if tools and messages[0].role != 'system' -%}{{- described() -}}{%- endif -%}",
        "{%- for m in messages -%}",
        "{%- set answers = add_generation_prompt or not loop.last -%}",
        "{%- if m.role == 'system' -%}",
        "{{- m.content -}}{%- if tools and loop.first -%}{{- described() -}}{%- endif -%}",
        "{%- elif m.role == 'user' -%}",
        "{%- set seen.users = seen.users + 1 -%}",
        "{{- '<｜User｜>' ~ m.content -}}",
        "{%- if answers -%}",
        "{{- '<｜Assistant｜>' -}}{{- '<think>' if open and seen.users == at.user else '</think>' -}}",
        "{%- endif -%}",
        "{%- elif m.role == 'assistant' -%}",
        "{%- if open and seen.users == at.user -%}{{- (m.reasoning or '') ~ '</think>' -}}{%- endif -%}",
        "{{- m.content or '' -}}",
        "{%- for c in m.tool_calls or [] -%}",
        "{{- '\\n\\n<｜DSML｜function_calls>\\n' if loop.first -}}",
        "{{- '<｜DSML｜invoke name=\"' ~ c.function.name ~ '\">\\n' -}}",
        "{%- for key, value in c.function.arguments.items() -%}",
        "{{- '<｜DSML｜parameter name=\"' ~ key ~ '\" string=\"' ~ ('true\">' if value is string else 'false\">') -}}",
        "{{- value if value is string else value | tojson -}}",
        "{{- '</｜DSML｜parameter>' ~ ('' if loop.last else '\\n') -}}",
        "{%- endfor -%}",
        "{{- '\\n</｜DSML｜invoke>' ~ ('\\n</｜DSML｜function_calls>' if loop.last else '\\n') -}}",
        "{%- endfor -%}",
        "{{- eos_token -}}",
        "{%- elif m.role == 'tool' -%}",
        "{{- '\\n\\n<function_results>' if loop.first or loop.previtem.role != 'tool' -}}",
        "{{- '\\n<result>' ~ m.content ~ '</result>' -}}",
        "{%- if loop.last or loop.nextitem.role != 'tool' -%}",
        "{{- '\\n</function_results>' -}}",
        "{%- if answers -%}",
        "{{- '\\n\\n' ~ ('<think>' if open and seen.users == at.user else '</think>') -}}",
        "{%- endif -%}",
        "{%- endif -%}",
        "{%- endif -%}",
        "{%- endfor -%}",
    )
)


def read_form(folder: Path) -> str | None:
    """The template, if the folder has the code of the form; None otherwise."""
    path = folder / CODE
    if not path.is_file():
        return None
    constants = _constants(path)
    description = constants.get(DESCRIPTION, "")
    for name, value in constants.items():
        description = description.replace("{" + name + "}", value)
    head, found, tail = description.partition(SCHEMAS)
    if not found:
        log.warning("%s has no constant %s with %s; chats with tools are refused", path, DESCRIPTION, SCHEMAS)
        return _FORM.replace("DESCRIBED", _NO_TOOLS)
    each = "{%- for t in tools -%}{{- t.function | tojson ~ ('' if loop.last else '\\n') -}}{%- endfor -%}"
    return _FORM.replace("DESCRIBED", _printed("\n\n" + head) + each + _printed(tail))


def _printed(text: str) -> str:
    """A statement that prints the text; jinja2 reads escapes in its strings as JSON does."""
    return "{{- " + json.dumps(text, ensure_ascii=False) + " -}}"


def _constants(path: Path) -> dict[str, str]:
    """The texts that are assigned to names at the top level of a Python file; empty if it cannot be parsed."""
    try:
        with path.open("rb") as file:
            body = ast.parse(file.read(MAX_BYTES)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        log.warning("%s cannot be parsed (%s)", path, error)
        return {}
    found = {}
    for line in body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[target.id] = value.value
    return found
