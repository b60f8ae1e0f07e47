"""The table of tool formats: every parser of PARSERS.md section 2, by the names of `--tool-call-parser`.

Owner: none, frozen values. A new format is an entry here, or a file of the operator's (`--tool-parser-plugin`).
`openai` is not in the table: output/harmony.py reads both reasoning and calls.
"""

from __future__ import annotations

from dataclasses import replace

from server.output.tools import json_calls, python_calls, tag_calls
from server.output.tools.base import ToolFormat

HARMONY_TOOLS = ("openai", "gpt_oss")

HERMES = ToolFormat(json_calls.calls, ("<tool_call>",), ("</tool_call>",))
QWEN3_CODER = ToolFormat(
    tag_calls.tagged,
    ("<tool_call>",),
    ("</tool_call>",),
    name=("<function=", ">"),
    end_call="</function>",
    key=("<parameter=", ">"),
    end_value="</parameter>",
)
INVOKE = ToolFormat(
    tag_calls.tagged,
    ("<minimax:tool_call>",),
    ("</minimax:tool_call>",),
    name=('<invoke name="', '">'),
    end_call="</invoke>",
    key=('<parameter name="', '">'),
    end_value="</parameter>",
)
DSML = ToolFormat(
    tag_calls.tagged,
    ("<｜DSML｜function_calls>",),
    ("</｜DSML｜function_calls>",),
    name=('<｜DSML｜invoke name="', '">'),
    end_call="</｜DSML｜invoke>",
    key=('<｜DSML｜parameter name="', '"'),
    end_value="</｜DSML｜parameter>",
    tag_end=">",
)
GLM = ToolFormat(
    tag_calls.keyed,
    ("<tool_call>",),
    ("</tool_call>",),
    key=("<arg_key>", "</arg_key>"),
    quotes=("<arg_value>",),
    end_value="</arg_value>",
)
DEEPSEEK = ToolFormat(
    json_calls.named,
    ("<｜tool▁call▁begin｜>",),
    ("<｜tool▁call▁end｜>",),
    skips=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    name=("", "<｜tool▁sep｜>"),
)
LLAMA = ToolFormat(json_calls.calls, ("<|python_tag|>",), bare="{", separator=";")
PYTHONIC = ToolFormat(python_calls.code, bare="[")
COHERE = ToolFormat(
    json_calls.calls,
    ("<|START_ACTION|>",),
    ("<|END_ACTION|>",),
    names=("tool_name", "name"),
    skips=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    variant="list",
)
LISTED = ToolFormat(json_calls.calls, ("<tool_calls>",), ("</tool_calls>",), variant="list")

ANY_MODEL = ToolFormat(json_calls.calls, bare="[", variant="sure")  # for forced calls of a model without its own format

TOOLS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen25": HERMES,
    "qwen": HERMES,
    "qwen3_json": HERMES,
    "ernie45": replace(HERMES, skips=("<response>\n", "\n</response>", "<response>", "</response>")),
    "granite4": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "nemotron_v3": QWEN3_CODER,
    "step3p5": QWEN3_CODER,
    "mimo": QWEN3_CODER,
    "seed_oss": replace(QWEN3_CODER, begins=("<seed:tool_call>",), ends=("</seed:tool_call>",)),
    "glm45": GLM,
    "glm47": GLM,
    "ling3": GLM,
    "hy_v3": replace(GLM, skips=("<tool_calls>", "</tool_calls>"), name=("<tool_sep>", "<tool_sep>")),
    "minimax_m2": INVOKE,
    "minimax_m3": ToolFormat(
        tag_calls.nested,
        ("]<]minimax[>[<tool_call>",),
        ("]<]minimax[>[</tool_call>",),
        name=(']<]minimax[>[<invoke name="', '">'),
        end_call="]<]minimax[>[</invoke>",
        key=("]<]minimax[>[", ""),
    ),
    "dots": replace(INVOKE, begins=("<dots_function_call>",), ends=("</dots_function_call>",)),
    "step3": replace(
        INVOKE,
        begins=("<｜tool_calls_begin｜>",),
        ends=("<｜tool_calls_end｜>",),
        skips=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        name=('<steptml:invoke name="', '">'),
        end_call="</steptml:invoke>",
        key=('<steptml:parameter name="', '">'),
        end_value="</steptml:parameter>",
    ),
    "deepseek_v3": replace(DEEPSEEK, variant="fenced"),
    "deepseek_v31": DEEPSEEK,
    "deepseek_v32": DSML,
    "deepseek_v4": replace(DSML, begins=("<｜DSML｜tool_calls>",), ends=("</｜DSML｜tool_calls>",)),
    "deepseek_v41": replace(
        DSML,
        begins=("<｜DSML｜ calls>",),
        ends=("</｜DSML｜ calls>",),
        name=('<｜DSML｜ invoke name="', '">'),
        end_call="</｜DSML｜ invoke>",
        key=('<｜DSML｜ parameter name="', '"'),
        end_value="</｜DSML｜ parameter>",
    ),
    "kimi_k2": ToolFormat(
        json_calls.named,
        ("<|tool_call_begin|>",),
        ("<|tool_call_end|>",),
        skips=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        name=("", "<|tool_call_argument_begin|>"),
        variant="kimi",
        ids="kimi",
    ),
    "kimi_k3": ToolFormat(
        tag_calls.tagged,
        ("<|open|>tools<|sep|>",),
        ("<|close|>tools<|sep|>",),
        skips=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        name=('<|open|>call tool="', '"'),
        end_call="<|close|>call<|sep|>",
        key=('<|open|>argument key="', '"'),
        end_value="<|close|>argument<|sep|>",
        tag_end="<|sep|>",
        block=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
    ),
    "mistral": ToolFormat(
        json_calls.named,
        ("[TOOL_CALLS]",),
        name=("", "[ARGS]"),
        key=("[CALL_ID]", ""),
        variant="mistral",
        ids="mistral",
    ),
    "llama3_json": LLAMA,
    "llama3": LLAMA,
    "llama4_json": LLAMA,
    "pythonic": PYTHONIC,
    "llama4_pythonic": replace(PYTHONIC, begins=("<|python_start|>",), ends=("<|python_end|>",)),
    "olmo3": ToolFormat(python_calls.code, ("<function_calls>",), ("</function_calls>",)),
    "lfm2": ToolFormat(python_calls.code, ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "gemma4": ToolFormat(
        python_calls.braces, ("<|tool_call>",), ("<tool_call|>",), name=("call:", "{"), quotes=('<|"|>',)
    ),
    "functiongemma": ToolFormat(
        python_calls.braces,
        ("<start_function_call>",),
        ("<end_function_call>",),
        name=("call:", "{"),
        quotes=("<escape>",),
    ),
    "phi4_mini_json": ToolFormat(json_calls.calls, ("functools",), variant="list"),
    "granite": ToolFormat(json_calls.calls, ("<|tool_call|>", "<tool_call>"), variant="list"),
    "granite-20b-fc": ToolFormat(json_calls.calls, ("<function_call>",), ("</function_call>",)),
    "jamba": LISTED,
    "hunyuan_a13b": replace(LISTED, skips=("<answer>\n", "\n</answer>", "<answer>", "</answer>")),
    "internlm": ToolFormat(json_calls.calls, ("<|action_start|><|plugin|>",), ("<|action_end|>",)),
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "nemotron_json": ToolFormat(json_calls.calls, ("<TOOLCALL>",), ("</TOOLCALL>",), variant="list"),
    "apertus": ToolFormat(json_calls.calls, ("<|tools_prefix|>",), ("<|tools_suffix|>",), variant="keyed"),
    "longcat": ToolFormat(json_calls.calls, ("<longcat_tool_call>",), ("</longcat_tool_call>",)),
    "xlam": ToolFormat(
        json_calls.calls, ("<tool_call>", "```json", "</think>"), ("</tool_call>",), end_call="```", bare="[",
        variant="sure",
    ),
    "gigachat3": ToolFormat(
        json_calls.calls, ("function call<|role_sep|>\n", "<|function_call|>"), skips=("<|message_sep|>",)
    ),
}  # fmt: skip
