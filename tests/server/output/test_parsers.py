"""Parsers of answers: golden transcripts, whole and cut anywhere, marker tokens, fuzz, and CPU time."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import orjson
import pytest
from tokenizers import AddedToken

from engine.base.errors import ConfigError
from server.output.events import Said
from server.output.harmony import Harmony
from server.output.markers import Markers
from server.output.parser import OutputParser, Parsers, Parsing
from server.output.parser_choice import REASONING_SIGNS, TOOL_SIGNS, check_names, choose_parsers
from server.output.reasoning import REASONING, state_of
from server.output.tools.base import Schemas, spelled, texts_of
from server.output.tools.formats import TOOLS
from server.output.tools.json_text import number
from server.render.hf_tokenizer import HfTokenizer
from server.render.load_tokenizer import load_tokenizer
from server.render.prompt import Prompt, id_array
from tests.pace import slowness
from tests.server.output import transcripts as golden

EMBEDDED = Path(__file__).parents[3] / "server" / "embedded"
TAILS = {"open": "...<think>\n", "closed": "...<think>\n\n</think>\n\n", "may open": "...assistant\n"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED)


@pytest.fixture(scope="module")
def marked():
    """A tokenizer in which markers are tokens, some of them special."""
    core = load_tokenizer(EMBEDDED).core
    core.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    core.add_special_tokens([AddedToken('<|"|>', normalized=False), AddedToken("<|x|>", normalized=False)])
    return HfTokenizer(core, {}, {})


def prompt(state: str, form=None) -> Prompt:
    text = TAILS[state]
    if form is not None and form.begins:
        text = text.replace("<think>", form.begins[0]).replace("</think>", form.ends[0])
    return Prompt(id_array([1]), text=text)


def parser_of(
    tokenizer, tools="", reasoning="", state="may open", harmony=False, offered=None, **wishes
) -> OutputParser:
    form = REASONING.get(reasoning)
    parsers = Parsers(
        Markers(tokenizer.table),
        reasoning=form,
        written=form,
        tools=TOOLS.get(tools),
        harmony=Harmony() if harmony else None,
        reads_reasoning=harmony,
        reads_calls=harmony,
    )
    offered = offered or (golden.TOOLS if tools or harmony else None)
    found = Parsing(parsers, offered, **wishes).parser(prompt(state, form))
    assert found is not None
    return found


def said(parser: OutputParser, pieces) -> tuple[str, str, list[tuple[str, str]]]:
    events = []
    for piece in pieces:
        parser.feed(piece)
        events += parser.take()
    parser.finish()
    found = Said(events + parser.take())
    return found.reasoning, found.content, [(call.name, call.arguments) for call in found.calls]


CASES = [
    *((f"{name}-{at}", {"tools": name}, text, ("", content, calls))
      for at, (name, text, content, calls) in enumerate(golden.TOOL_CASES)),
    *((f"{name}-{at}", {"reasoning": name, "state": state}, text, (thought, content, []))
      for at, (name, state, text, thought, content) in enumerate(golden.REASONING_CASES)
      if state != "closed"),
    *((f"harmony-{at}", {"harmony": True}, text, (thought, content, calls))
      for at, (text, thought, content, calls) in enumerate(golden.HARMONY_CASES)),
]  # fmt: skip


@pytest.mark.parametrize(("wishes", "text", "meant"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_transcript_means_the_same_however_it_is_cut(tokenizer, wishes, text, meant):
    assert said(parser_of(tokenizer, **wishes), [text]) == meant
    assert said(parser_of(tokenizer, **wishes), text) == meant
    for at in range(len(text)):
        assert said(parser_of(tokenizer, **wishes), [text[:at], text[at:]]) == meant, at


def test_every_parser_has_a_transcript():
    names = {case[0] for case in golden.TOOL_CASES}
    shown = [TOOLS[name] for name in names]
    assert not [
        name for name, form in TOOLS.items() if name not in names and form not in shown and name != "deepseek_v41"
    ]
    thought = {case[0] for case in golden.REASONING_CASES}
    forms = [REASONING[name] for name in thought]
    assert not [name for name, form in REASONING.items() if name not in thought and form not in forms]


def test_a_thousand_random_cuts_change_nothing(tokenizer):
    draw = random.Random(16)
    for _ in range(1000):
        _, wishes, text, meant = draw.choice(CASES)
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(1, 9)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
        assert said(parser_of(tokenizer, **wishes), pieces) == meant, pieces


def fragments(form) -> list[str]:
    loose = ['{"name": "f", "arguments": {', '"a": "x"', "(a=1)", "call:f{", "\\u12", "\\ud83d", "text", "null", "```"]
    loose += [*"}][\n f{\"\\é',:1=)(<", "to="]
    return [*loose, *[text for text in texts_of(form) if text] * 3]


# Words of a harmony header up to its message, and attributes of a tag, are part of the marker.
WORD = re.compile(r"w\d+z")
MARKUP = re.compile(r'(<\|start\|>|<\|channel\|>|to=).*?<\|message\|>|(tool|key)=".*?(<\|sep\|>|\Z)', re.DOTALL)


def test_whatever_a_model_writes_no_parser_fails_or_loses_a_word_and_cuts_change_nothing(tokenizer):
    draw = random.Random(7)
    forms = [({"tools": name}, form) for name, form in TOOLS.items()] + [({"harmony": True}, Harmony())]
    for turn in range(2500):
        wishes, form = forms[turn % len(forms)]
        if "tools" in wishes:
            reasoning = draw.choice(["", "qwen3", "granite", "deepseek_r1", "hunyuan_a13b"])
            wishes = {**wishes, "reasoning": reasoning, "state": draw.choice(["open", "may open"])}
        pieces = []
        for at in range(draw.randrange(1, 14)):
            around = draw.choice(
                ["{}", " {} ", '"{}"', ', "{}": 1', '"name": "{}"', '{{"name": "{}", "arguments": {{}}']
            )
            pieces += [draw.choice(fragments(form)), around.format(f"w{at}z") if draw.random() < 0.4 else ""]
        text = "".join(pieces)
        whole = said(parser_of(tokenizer, **wishes), [text])
        told = "".join([*whole[:2], *(part for call in whole[2] for part in call)])
        assert {*WORD.findall(MARKUP.sub("", text))} <= {*WORD.findall(told)}, (wishes, text, whole)
        assert said(parser_of(tokenizer, **wishes), "".join(pieces)) == whole, (wishes, pieces)
        assert said(parser_of(tokenizer, **wishes), pieces) == whole, (wishes, pieces)


@pytest.mark.parametrize("name", TOOLS)
def test_text_without_markers_is_content_to_the_last_character(tokenizer, name):
    draw = random.Random(name)
    for _ in range(20):
        words = ["".join(draw.choice("ab <|{[]}>\n\t\"'\\:,=/é😀\u2028") for _ in range(30)) for _ in range(4)]
        text = "x" + "".join(words)
        assert said(parser_of(tokenizer, name), words[:1] and [text[:1], text[1:]]) == ("", text, [])


# -- marker tokens


def test_a_marker_is_a_token_and_its_letters_are_text(marked):
    parsers = made(marked, "hermes", "qwen3")
    assert list(parsers.markers.chars) == ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    call = '{"name": "f", "arguments": {"s": "<tool_call>"}}'
    ids = [*marked.encode("<think>a</think>b <tool_call>"), *marked.encode(call), *marked.encode("</tool_call>")]
    letters = [token for part in ("<", "tool_call>", "{}") for token in marked.encode(part)]
    parser = Parsing(parsers, golden.TOOLS).parser(prompt("may open"))
    texts = text_of(marked, parsers, [*ids, *letters])
    assert said(parser, texts) == ("a", "b<tool_call>{}", [("f", '{"s": "<tool_call>"}')])


def test_special_markers_in_a_text_are_hidden_unless_asked_for(marked):
    parsers = made(marked, "gemma4", "none")
    ids = marked.encode('a<|"|>b<|x|>c')
    for shows, text in ((False, "abc"), (True, 'a<|"|>bc')):  # <|x|> is no marker: the detokenizer leaves it out
        parser = Parsing(parsers, golden.TOOLS, shows_special=shows).parser(prompt("may open"))
        assert said(parser, text_of(marked, parsers, ids)) == ("", text, [])


def made(tokenizer, tools, reasoning):
    return choose_parsers(tokenizer, [], "", tools=tools, reasoning=reasoning)


def text_of(tokenizer, parsers, ids):
    from server.output.text import TextStream

    stream = TextStream(tokenizer, table=parsers.markers.table)
    return [stream.feed([token]) for token in ids]


def test_reasoning_tokens_are_those_between_the_markers(tokenizer, marked):
    parser = parser_of(tokenizer, reasoning="qwen3")
    said(parser, ["<think>", "\n", "a", "b", "\n", "</think>", "\n\n", "c"])
    assert parser.reasoning_tokens == 4
    parser = parser_of(tokenizer, reasoning="qwen3", state="open")
    said(parser, ["a", " <", "b", " </", "think", ">", "c"])
    assert parser.reasoning_tokens == 3
    parser = parser_of(tokenizer, reasoning="qwen3", state="open")
    said(parser, ["a", "", "b </th"])
    assert parser.reasoning_tokens == 3


def test_text_that_needs_no_parsing_has_no_parser_and_keeps_its_lane(tokenizer):
    parsers = choose_parsers(tokenizer, [], "", tools="hermes", reasoning="qwen3")
    assert Parsing(parsers).parser(prompt("closed")) is None
    assert Parsing(parsers).parser(prompt("may open")) is not None
    assert Parsing(parsers, golden.TOOLS).parser(prompt("closed")) is not None
    assert choose_parsers(tokenizer, [], "").is_empty


# -- rules


def test_calls_beyond_the_first_are_dropped_where_one_is_wanted(tokenizer):
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    assert said(parser_of(tokenizer, "hermes", most_calls=1), text) == ("", "", [("f", '{"a": 1}')])


def test_a_call_inside_reasoning_is_reasoning_unless_the_format_ends_there(tokenizer):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert said(parser_of(tokenizer, "hermes", "qwen3", "open"), [f"x{call}"]) == ("x", "", [("f", "{}")])
    assert said(parser_of(tokenizer, "", "qwen3", "open"), [f"x{call}</think>y"]) == (f"x{call}", "y", [])
    thought = said(parser_of(tokenizer, "hermes", "deepseek_r1", "open"), [f"x{call}</think>y"])
    assert thought == (f"x{call}", "y", [])


@pytest.mark.parametrize("tools", ["hermes", "ernie45", "qwen3_coder", "glm45", "pythonic", "mistral", "minimax_m3"])
@pytest.mark.parametrize("call", [False, True])
def test_markers_around_an_answer_are_no_content_with_tools_either(tokenizer, tools, call):
    """A template may imply one family's reasoning and another family's calls."""
    written = CALLS[tools][1] % "f" if call and tools in ("hermes", "qwen3_coder", "glm45") else ""
    text = f"hm\n</think>\n\n<response>\nHi\n</response>\n{written}"
    for pieces in ([text], text):
        thought, content, calls = said(parser_of(tokenizer, tools, "ernie45", state="open"), pieces)
        assert (thought, content) == ("hm", "Hi")
        assert [name for name, _ in calls] == (["f"] if written else [])


def test_ids_are_as_the_model_family_wants_them(tokenizer):
    def ids(name, text, **wishes):
        parser = parser_of(tokenizer, name, **wishes)
        parser.feed(text)
        parser.finish()
        return [call.id for call in Said(parser.take()).calls]

    (found,) = ids("hermes", '<tool_call>{"name": "f"}</tool_call>')
    assert found.startswith("chatcmpl-tool-")
    assert len(found) == 14 + 32
    (found,) = ids("mistral", "[TOOL_CALLS]f[ARGS]{}")
    assert len(found) == 9
    assert found.isalnum()
    text = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids("kimi_k2", text * 2) == ["functions.f:0", "functions.f:1"]
    assert ids("mistral", "[TOOL_CALLS]f[ARGS]{}", own_ids=False, id_prefix="toolu_")[0].startswith("toolu_")


def test_whether_the_prompt_opens_the_block_is_read_from_its_end():
    form = REASONING["qwen3"]
    assert state_of(form, "<|im_start|>assistant\n<think>\n") == ("open", False)
    assert state_of(form, "<|im_start|>assistant\n<think>") == ("open", True)
    assert state_of(form, "assistant\n<think>\n\n</think>\n\n") == ("closed", False)
    assert state_of(form, "user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n") == ("may open", False)


@pytest.mark.parametrize(
    ("said", "meant"), [("1", "1"), ("-2.50", "-2.50"), (".5", "0.5"), ("1_000", "1000"), ("+3", "3"), ("inf", ""),
                        ("nan", ""), ("x", ""), ("1e5", "1e5"), ("9" * 30, "9" * 30)],
)  # fmt: skip
def test_numbers_keep_their_spelling(said, meant):
    assert number(said) == meant


# -- which parser


def test_the_checkpoint_chooses_and_the_operator_wins(tokenizer, marked):
    def chosen(template, model_type="", **flags):
        found = choose_parsers(tokenizer, [template], model_type, **flags)
        return found.tools_name, found.reasoning_name

    assert chosen("") == ("none", "none")
    assert chosen('<tool_call>{"name"', "qwen2") == ("hermes", "none")
    assert chosen('<tool_call>\\n{"name"...</think>') == ("hermes", "qwen3")
    assert chosen("<tool_call><function=x><parameter=y></think>") == ("qwen3_coder", "qwen3")
    assert chosen("[TOOL_CALLS][THINK]") == ("mistral", "mistral")
    assert chosen("<tool_call>f<tool_sep><arg_key></think:x>") == ("hy_v3", "hy_v3")
    assert chosen("<tool_call>f<arg_key></think>") == ("glm47", "glm45")
    assert chosen("<｜Assistant｜></think>") == ("none", "deepseek_r1")
    assert chosen("", "gpt_oss") == ("openai", "openai_gptoss")
    dsml = "<｜Assistant｜>thinking</think>{% set dsml = '｜DSML｜' %}<{{ dsml }}invoke{{ message.tool_calls }}"
    assert chosen(dsml + "<{{ dsml }}function_calls>") == ("deepseek_v32", "deepseek_v3")
    assert chosen(dsml + "<{{ dsml }}tool_calls>") == ("deepseek_v4", "deepseek_v3")
    assert chosen("'<|open|>' + tag + '<|sep|>' + '<|close|>'") == ("kimi_k3", "kimi_k3")
    assert chosen("role_sep='<|role_sep|>' {'role': 'function call'}") == ("gigachat3", "none")
    asked = '{"name": function name, "parameters": dictionary of argument name and its value}'
    assert chosen(f"<|python_start|>{asked}") == ("llama4_json", "none")
    assert chosen("<|python_start|>[f(a=1)]") == ("llama4_pythonic", "none")
    assert chosen("<tool_call>name", tools="none", reasoning="deepseek-r1") == ("none", "deepseek_r1")
    with pytest.raises(
        ConfigError, match="--tool-call-parser nothing: is not known; give auto, none or one of apertus"
    ):
        chosen("", tools="nothing")
    with pytest.raises(ConfigError, match="--reasoning-parser nothing: is not known"):
        check_names("auto", "nothing", ())
    check_names("auto", "auto", ())
    check_names("none", "gpt-oss", ())
    names = {name for _, name in (*TOOL_SIGNS, *REASONING_SIGNS)}
    assert names <= {*TOOLS, *REASONING, "openai", "openai_gptoss"}


def test_a_plugin_adds_formats_and_a_bad_one_is_named(tokenizer, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from server.output.tools.base import ToolFormat\nfrom server.output.tools.json_calls import calls\n"
        "TOOLS = {'mine': ToolFormat(calls, ('<<',), ('>>',))}\n"
    )
    found = choose_parsers(tokenizer, [], "", tools="mine", plugins=[str(path)])
    parser = Parsing(found, golden.TOOLS).parser(prompt("may open"))
    assert said(parser, '<<{"name": "f"}>>') == ("", "", [("f", "{}")])
    for text, words in (("TOOLS = 3", "must map names"), ("", "holds no parser"), ("1 / 0", "ZeroDivisionError")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            choose_parsers(tokenizer, [], "", plugins=[str(path)])
    with pytest.raises(ConfigError, match="there is no such file"):
        choose_parsers(tokenizer, [], "", plugins=[str(tmp_path / "none.py")])


def test_formats_are_spelled_with_the_vocabularys_characters():
    form = spelled(TOOLS["internlm"], {"<|action_start|>": "\U00100000", "<|plugin|>": "\U00100001"})
    assert form.begins == ("\U00100000\U00100001",)
    assert form.ends == ("<|action_end|>",)


# -- cost


@pytest.mark.alone
@pytest.mark.parametrize(("tools", "reasoning"), [("hermes", "qwen3"), ("qwen3_coder", "deepseek_r1")])
def test_plain_text_costs_a_few_microseconds_per_token(tokenizer, tools, reasoning):
    words = [f" word{at % 97}" if at % 20 else ".\n" for at in range(20000)]

    def once() -> float:
        parser = parser_of(tokenizer, tools, reasoning)
        parser.feed("<think>x</think>")
        begun = time.process_time()
        for word in words:
            parser.feed(word)
            parser.take()
        return (time.process_time() - begun) / len(words)

    assert any(min(once() for _ in range(5)) < 4e-6 * slowness() for _ in range(3))  # 1.7e-6 to 2.2e-6 on an idle core


def test_a_long_hostile_answer_takes_linear_time(tokenizer):
    """The parser reads each character a bounded number of times, even if many markers are open."""
    for tools, begin, piece in (
        ("hermes", "", "<"),
        ("hermes", '<tool_call>{"arguments": "', "a"),
        ("hermes", '<tool_call>{"x": {', "["),
        ("hermes", "x", "\n"),
        ("pythonic", "[f(a='", "\\"),
        ("qwen3_coder", "<function=f><parameter=n>", "</parameter"),
    ):
        parser = parser_of(tokenizer, tools)
        parser.feed(begin)
        begun = time.process_time()
        for _ in range(20000):
            parser.feed(piece)
            parser.take()
        parser.finish()
        assert time.process_time() - begun < 1.5 * slowness(3), (tools, piece)


def test_types_of_a_parameter_are_found_once_where_alternatives_share_a_reference():
    """The parser of a call reads the types on the loop, and a client may write 64 alternatives on each level."""
    defs = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 64} for n in range(20)}
    defs |= {"a20": {"type": "null"}, "r": {"anyOf": [{"$ref": "#/$defs/r"}, {"type": "integer"}]}}
    named = {"a": {"$ref": "#/$defs/a0"}, "r": {"$ref": "#/$defs/r"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": named, "$defs": defs}}}
    begun = time.process_time()
    assert Schemas([tool]).kinds("f", "a") == {"null"}
    assert Schemas([tool]).kinds("f", "r") == {"integer"}
    tool["function"]["parameters"] = {"$ref": "#/$defs/a0", "$defs": defs}
    assert Schemas([tool]).kinds("f", "a") == {"unknown"}
    assert time.process_time() - begun < 0.1 * slowness()


def test_arguments_are_json_whenever_the_model_wrote_json(tokenizer):
    draw = random.Random(3)

    def value(depth):
        kind = draw.randrange(7 if depth < 4 else 5)
        if kind == 5:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 6:
            return {draw.choice('abcé"\\'): value(depth + 1) for _ in range(draw.randrange(4))}
        return [None, True, draw.randrange(-9, 10**6), draw.random(), 'x"\\\n😀</tool_call>'][kind]

    for _ in range(200):
        arguments = {"k": value(0)}
        text = orjson.dumps(
            {"name": "f", "arguments": arguments}, option=draw.choice([None, orjson.OPT_INDENT_2])
        ).decode()
        (call,) = said(parser_of(tokenizer, "hermes"), f"<tool_call>{text}</tool_call>")[2]
        assert orjson.loads(call[1]) == arguments


CALLS = {  # formats of calls of f and g: text before, each call, text after
    "hermes": ("", '<tool_call>{"name": "%s", "arguments": {"a": 1}}</tool_call>', ""),
    "llama3_json": ("", '{"name": "%s", "parameters": {"a": 1}}; ', ""),
    "pythonic": ("[", "%s(a=1), ", "]"),
    "mistral": ("[TOOL_CALLS][", '{"name": "%s", "arguments": {"a": 1}}, ', "]"),
    "qwen3_coder": ("", "<tool_call>\n<function=%s>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n", ""),
    "glm45": ("", "<tool_call>%s\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n", ""),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_s31_calls_beyond_the_limit_are_content_as_the_model_wrote_them(tokenizer, name, size):
    before, call, behind = CALLS[name]
    text = before + call % "f" + call % "g" + call % "h" + behind
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    _, content, calls = said(parser_of(tokenizer, name, call_limit=1), pieces)
    assert [(called, orjson.loads(arguments)) for called, arguments in calls] == [("f", {"a": 1})]
    left = (call % "g" + call % "h" + behind).strip()
    assert content.strip().lstrip(",; ") == left
    assert len(said(parser_of(tokenizer, name, call_limit=3), pieces)[2]) == 3


@pytest.mark.parametrize("size", [1, 1000])
def test_s31_calls_of_harmony_beyond_the_limit_are_content(tokenizer, size):
    form = "<|start|>assistant<|channel|>commentary to=functions.%s <|message|>%s<|call|>"
    text = (
        form % ("f", "{}") + form % ("g", '{"a": 1}') + "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    _, content, calls = said(parser_of(tokenizer, harmony=True, call_limit=1), pieces)
    assert calls == [("f", "{}")]
    assert "to=functions.g" in content
    assert '{"a": 1}' in content
    assert content.endswith("Done.")


def test_s31_arguments_beyond_the_limit_are_content_and_the_next_call_is_one(tokenizer):
    text = '<tool_call>{"name": "%s", "arguments": {"a": "%s"}}</tool_call>'
    pieces = [*(text % ("f", "x" * 500)), text % ("g", "é")]
    _, content, calls = said(parser_of(tokenizer, "hermes", argument_limit=100), pieces)
    assert [name for name, _ in calls] == ["f", "g"]
    assert calls[0][1].startswith('{"a": "xxx')
    assert len(calls[0][1]) == 100
    assert content == "x" * (500 - 100 + len('{"a": "')) + '"}'
    assert orjson.loads(calls[1][1]) == {"a": "é"}
