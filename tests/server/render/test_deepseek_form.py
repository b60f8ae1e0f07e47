"""DeepSeek-V3.2's message form, from a checkpoint with the code of the form and without a chat template."""

from __future__ import annotations

import json
import shutil

import pytest

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from server.render.deepseek_form import CODE
from server.render.tokenizer_config import read_templates
from server.start.hub import other_files
from tests import tiny
from tests.server.conftest import config_of, maker, ready
from tests.server.render.templates import TOOLS, call

BOS, EOS, USER, ANSWER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
# Our own words in place of the published ones; the file must never run.
WRITTEN = '''
raise SystemExit("this code ran")
import anything
TOOLS_SYSTEM_TEMPLATE = """## Our tools: <{dsml_token}function_calls>, "quoted" \\\\ {thinking_end_token}
{tool_schemas}
That is all.
"""
bos_token: str = "<｜begin▁of▁sentence｜>"
thinking_start_token: str = "<think>"
thinking_end_token: str = "</think>"
dsml_token: str = "｜DSML｜"
'''
DESCRIBED = (
    '\n\n## Our tools: <｜DSML｜function_calls>, "quoted" \\ </think>\n'
    + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in TOOLS)
    + "\nThat is all.\n"
)
CALLS = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Zürich "1"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, {"é": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
CALLED = {
    "role": "assistant", "content": "Let me see.", "reasoning": "Hm.",
    "tool_calls": [call("weather", '{"city": "Zürich \\"1\\"", "days": [1, {"é": null}]}'), call("now", "{}", 1)],
}  # fmt: skip
RESULTS = [
    {"role": "tool", "tool_call_id": "call00000", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call00001", "content": "noon"},
]
SEEN = "\n\n<function_results>\n<result>sunny</result>\n<result>noon</result>\n</function_results>\n\n"
SYSTEM, FIRST, NEXT = (
    {"role": role, "content": text} for role, text in (("system", "Be kind."), ("user", "A"), ("user", "B"))
)
SAID = {"role": "assistant", "content": "one", "reasoning": "old"}
OPEN = {"thinking": True}


def folder_of(path, code=WRITTEN):
    """A tiny checkpoint with DeepSeek's tokens and code, without a template."""
    folder = shutil.copytree(tiny.checkpoint("llama"), path / "served")
    (folder / "chat_template.jinja").unlink()
    (folder / "encoding").mkdir()
    (folder / CODE).write_text(code)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
async def served(tmp_path):
    async with ready(config_of(model={"model": str(folder_of(tmp_path)), "num_threads": 1})) as state:
        yield state


async def prompt(state, messages, **fields):
    body = {"messages": messages, "max_tokens": 1, "return_prompt_text": True, **fields}
    reply = await maker(state)().post("/v1/chat/completions", json=body)
    return reply.json().get("prompt_text") or reply.json()


FORMS = {
    "question": ([FIRST], {}, f"{BOS}{USER}A{ANSWER}</think>"),
    "thinking": ([SYSTEM, FIRST], OPEN, f"{BOS}Be kind.{USER}A{ANSWER}<think>"),
    "older reasoning is left out": (
        [FIRST, SAID, NEXT], OPEN, f"{BOS}{USER}A{ANSWER}</think>one{EOS}{USER}B{ANSWER}<think>"
    ),
    "reasoning after the last user": (
        [FIRST, SAID, NEXT, CALLED, *RESULTS], OPEN,
        f"{BOS}{USER}A{ANSWER}</think>one{EOS}{USER}B{ANSWER}<think>Hm.</think>Let me see.{CALLS}{EOS}{SEEN}<think>",
    ),
    "calls without thinking": (
        [FIRST, CALLED, *RESULTS], {}, f"{BOS}{USER}A{ANSWER}</think>Let me see.{CALLS}{EOS}{SEEN}</think>"
    ),
    "calls before the last user": (
        [FIRST, CALLED, *RESULTS, SAID, NEXT], OPEN,
        f"{BOS}{USER}A{ANSWER}</think>Let me see.{CALLS}{EOS}{SEEN}</think>one{EOS}{USER}B{ANSWER}<think>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
async def test_conversations_have_the_published_form(served, name):
    messages, kwargs, want = FORMS[name]
    assert await prompt(served, messages, chat_template_kwargs=kwargs) == want


async def test_tools_follow_the_first_system_text(served):
    """The description is the checkpoint's, and its code never runs."""
    want = f"{BOS}Be kind.{DESCRIBED}{USER}A{ANSWER}</think>"
    assert await prompt(served, [SYSTEM, FIRST], tools=TOOLS) == want
    assert await prompt(served, [FIRST], tools=TOOLS) == want.replace("Be kind.", "")


async def test_an_open_answer_goes_on_without_a_mark(served):
    last = {"role": "assistant", "content": "on"}
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    assert await prompt(served, [FIRST, last], **open_end) == f"{BOS}{USER}A{ANSWER}</think>on"
    assert await prompt(served, [FIRST], add_generation_prompt=False) == f"{BOS}{USER}A"


async def test_its_parsers_are_chosen(served):
    assert (served.parsers.tools_name, served.parsers.reasoning_name) == ("deepseek_v32", "deepseek_v3")


@pytest.mark.parametrize("code", ["x = 1", "def broken(:", 'TOOLS_SYSTEM_TEMPLATE = "no place"'])
async def test_code_without_the_description_serves_chats_without_tools(tmp_path, code):
    async with ready(config_of(model={"model": str(folder_of(tmp_path, code)), "num_threads": 1})) as state:
        assert await prompt(state, [FIRST]) == f"{BOS}{USER}A{ANSWER}</think>"
        refused = await prompt(state, [FIRST], tools=TOOLS)
        assert "the description of tools is missing in encoding/encoding_dsv32.py" in refused["error"]["message"]


def test_the_hub_sends_the_code_too():
    assert other_files(["encoding/README.md", CODE, "encoding/test_input.json", "model.py"]) == [CODE]


def test_a_template_of_the_checkpoint_comes_first(tmp_path):
    folder = folder_of(tmp_path)
    assert "DSML" in read_templates(folder, {})["default"]
    assert read_templates(folder, {"chat_template": "mine"}) == {"default": "mine"}


def test_its_attention_is_refused_by_name(tmp_path):
    config = {**json.loads((tiny.checkpoint("deepseek_v3") / "config.json").read_text()), "model_type": "deepseek_v32"}
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="DeepseekV32ForCausalLM: has indexed_attention: only attention over all"):
        load_model_config(tmp_path)
