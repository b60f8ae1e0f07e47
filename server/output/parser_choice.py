"""Chooses a server's parsers: those that the operator names, otherwise by signs in the checkpoint's chat template.

Owner: none, pure functions; called once while the server loads. In: --tool-call-parser, --reasoning-parser, the
operator's plugin files, the tokenizer and its chat templates. Out: Parsers. The first entry of a table whose signs are
all in the template decides, so the most specific signs come first; without signs, the model_type decides.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.base.errors import ConfigError
from server.output.harmony import Harmony
from server.output.markers import Markers
from server.output.parser import Parsers
from server.output.reasoning import HARMONY_NAMES, REASONING, ReasoningFormat
from server.output.tools.base import ToolFormat, spelled, texts_of
from server.output.tools.formats import HARMONY_TOOLS, TOOLS
from server.render.tokenizer import Tokenizer

TOOLS_FLAG, REASONING_FLAG = "--tool-call-parser", "--reasoning-parser"
# (texts that are all in the chat template, parser). Templates may build markers from parts: "<" + dsml + "invoke".
TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "functions"), "openai"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_sep>", "<arg_key>"), "hy_v3"),
    (("</arg_key>\n",), "glm45"),
    (("</arg_key>\\n",), "glm45"),
    (("<arg_key>",), "glm47"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<｜DSML｜ calls>",), "deepseek_v41"),
    (("<｜DSML｜tool_calls>",), "deepseek_v4"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<steptml:invoke",), "step3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tool_call>call:",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|action_start|>",), "internlm"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|tools_prefix|>",), "apertus"),
    (("<longcat_tool_call>",), "longcat"),
    (("<dots_function_call>",), "dots"),
    (("<function_calls>",), "olmo3"),
    (("<|tool_call_start|>",), "lfm2"),
    (('"parameters": dictionary of argument name', "<|python_start|>"), "llama4_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<tool_calls>",), "jamba"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>", '"name"'), "hermes"),
    (("<tool_call>", "name"), "hermes"),
    (("<|role_sep|>", "'role': 'function call'"), "gigachat3"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
    (("functools[",), "phi4_mini_json"),
)
REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>analysis",), "openai_gptoss"),
    (("<|channel|>", "<|message|>", "analysis"), "openai_gptoss"),
    (("<seed:think>",), "seed_oss"),
    (("<mm:think>",), "minimax_m3"),
    (("◁think▷",), "kimi"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("[THINK]",), "mistral"),
    (("<|channel>thought",), "gemma4"),
    (("<|START_THINKING|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<ifm|think>",), "k2_horizon"),
    (("Here is my thought process:",), "granite"),
    (("<answer>", "</think>"), "hunyuan_a13b"),
    (("<response>", "</think>"), "ernie45"),
    (("<minimax:tool_call>", "</think>"), "minimax_m2"),
    (("<|tool_calls_section_begin|>", "</think>"), "kimi_k2"),
    (("<tool_sep>", "<arg_key>", "</think"), "hy_v3"),
    (("<arg_key>", "</think>"), "glm45"),
    (("<tool_call>", "</think>"), "qwen3"),
    (("<｜Assistant｜>", "</think>", "thinking"), "deepseek_v3"),
    (("<｜Assistant｜>", "</think>"), "deepseek_r1"),
    (("<think>", "</think>"), "deepseek_v3"),
)
# model_type of config.json, for checkpoints whose template has no sign
TOOLS_OF_TYPE = {"gpt_oss": "openai", "phi3": "phi4_mini_json", "jamba": "jamba", "minimax_m2": "minimax_m2"}
REASONING_OF_TYPE = {"gpt_oss": "openai_gptoss", "minimax_m2": "minimax_m2", "step3": "step3"}


def choose_parsers(
    tokenizer: Tokenizer,
    templates: Iterable[str],
    model_type: str,
    *,
    tools: str = "auto",
    reasoning: str = "auto",
    plugins: Iterable[str] = (),
) -> Parsers:
    """The server's parsers; raises ConfigError for an unknown name."""
    tool_table, reasoning_table = tables(plugins)
    templates_text = "\n".join(templates)
    chat_format = getattr(tokenizer, "chat_format", None)
    if chat_format is not None:
        templates_text += "[TOOL_CALLS][THINK]" if "[THINK]" in tokenizer.special_spellings else "[TOOL_CALLS]"
    tools = by_signs(templates_text, TOOL_SIGNS) or TOOLS_OF_TYPE.get(model_type, "none") if tools == "auto" else tools
    if reasoning == "auto":
        reasoning = by_signs(templates_text, REASONING_SIGNS) or REASONING_OF_TYPE.get(model_type, "none")
    tools = known(TOOLS_FLAG, tools, (*tool_table, *HARMONY_TOOLS))
    reasoning = known(REASONING_FLAG, reasoning, (*reasoning_table, *HARMONY_NAMES))
    return made(tokenizer, tools, tool_table.get(tools), reasoning, reasoning_table.get(reasoning))


def tables(plugins: Iterable[str]) -> tuple[dict[str, ToolFormat], dict[str, ReasoningFormat]]:
    """All formats by name, including the operator's."""
    tools, reasoning = dict(TOOLS), dict(REASONING)
    for path in plugins:
        read_plugin(path, tools, reasoning)
    return tools, reasoning


def check_names(tools: str, reasoning: str, plugins: Iterable[str]) -> None:
    """Refuse unknown names and invalid plugins, before anything is loaded."""
    tool_table, reasoning_table = tables(plugins)
    if tools != "auto":
        known(TOOLS_FLAG, tools, (*tool_table, *HARMONY_TOOLS))
    if reasoning != "auto":
        known(REASONING_FLAG, reasoning, (*reasoning_table, *HARMONY_NAMES))


def made(
    tokenizer: Tokenizer,
    tools_name: str,
    tools: ToolFormat | None,
    reasoning_name: str,
    reasoning: ReasoningFormat | None,
) -> Parsers:
    """Parsers with markers in the spelling of this vocabulary."""
    by_harmony = tools_name in HARMONY_TOOLS or reasoning_name in HARMONY_NAMES
    harmony = Harmony() if by_harmony else None
    used = [form for form in (tools, reasoning, harmony) if form is not None]
    markers = Markers.of(tokenizer, [text for form in used for text in texts_of(form)])
    return Parsers(
        markers,
        reasoning=None if reasoning is None else spelled(reasoning, markers.chars),
        tools=None if tools is None else spelled(tools, markers.chars),
        written=reasoning,
        written_tools=tools,
        harmony=None if harmony is None else spelled(harmony, markers.chars),
        reads_reasoning=by_harmony and reasoning_name != "none",
        reads_calls=tools_name in HARMONY_TOOLS,
        reasoning_name=reasoning_name,
        tools_name=tools_name,
    )


def by_signs(template: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> str:
    """The first parser whose signs are all in the template; "" if there is none."""
    return next((name for texts, name in signs if all(text in template for text in texts)), "")


def known(flag: str, name: str, names: Iterable[str]) -> str:
    """The name as in the table; `-` and `_` are equal."""
    if name in ("none", ""):
        return "none"
    table = {entry.replace("-", "_"): entry for entry in names}
    found = table.get(name.replace("-", "_"))
    if found is None:
        raise ConfigError(f"{flag} {name}: is not known; give auto, none or one of {', '.join(sorted(table))}")
    return found


def read_plugin(path: str, tools: dict[str, ToolFormat], reasoning: dict[str, ReasoningFormat]) -> None:
    """Add the formats of an operator's Python file: its TOOLS and REASONING, in the form of the tables here."""
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"parser plugin {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"parser_plugin_{source.stem}", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"parser plugin {path}: {type(error).__name__}: {error}") from error
    found = 0
    for name, table, kind in (("TOOLS", tools, ToolFormat), ("REASONING", reasoning, ReasoningFormat)):
        entries = getattr(module, name, {})
        if not isinstance(entries, Mapping) or not all(isinstance(entry, kind) for entry in entries.values()):
            raise ConfigError(f"parser plugin {path}: {name} must map names to {kind.__name__}")
        table.update(entries)
        found += len(entries)
    if not found:
        raise ConfigError(f"parser plugin {path}: holds no parser; give it TOOLS or REASONING, a dict of formats")
