"""Golden transcripts: a model's text by parser, and the message that the parser must return.

TOOL_CASES: (tool parser, text, content, calls). REASONING_CASES: (reasoning parser, state of the prompt, text,
reasoning, content). HARMONY_CASES: (text, reasoning, content, calls).
"""

# ruff: noqa: E501

from __future__ import annotations

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "b": {"type": "boolean"},
                    "o": {"type": "object"},
                    "l": {"type": "array"},
                    "m": {"type": ["string", "null"]},
                    "a": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "r": {"$ref": "#/$defs/deep"},
                    "e": {"enum": ["one", "two"]},
                },
                "$defs": {"deep": {"type": "integer"}},
            },
        },
    }
]
V31 = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
M3 = "]<]minimax[>["
STEP = "<｜tool_call_begin｜>function<｜tool_sep｜>"
DSML_CALL = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">V\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{0}>'
)

TOOL_CASES = [
    (
        "hermes",
        'Hi.\n<tool_call>\n{"name": "f", "arguments": {"s":"a\\u00e9\\n","n":4}}\n</tool_call>\n'
        '<tool_call>{"name":"g"}</tool_call> bye ',
        "Hi. bye",
        [("f", '{"s": "aé\\n", "n": 4}'), ("g", "{}")],
    ),
    ("hermes", "<tool_call>hello</tool_call> x", "<tool_call>hello</tool_call> x", []),
    ("hermes", "plain <tool text \n", "plain <tool text \n", []),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"o": {"k": [1, 2.50, {"z": "}"}]}, "m": null}}</tool_call>\nok',
        "\nok",
        [("f", '{"o": {"k": [1, 2.50, {"z": "}"}]}, "m": null}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "cut of', "", [("f", '{"s": "cut of')]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", 'Hi. <tool_call>{"name": "f", "arguments": {"n": 4}}\n</tool', "Hi.", [("f", '{"n": 4}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments"', "", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> No </tool', " No </tool", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\ud83d\\ude00\\ud83d\\/"}}', "",
     [("f", '{"s": "😀\\ud83d/"}')]),
    (
        "qwen3_coder",
        "ok\n<tool_call>\n<function=f>\n<parameter=s>\nline1\nline2\n</parameter>\n<parameter=n>\n42\n</parameter>\n"
        '<parameter=o>{"a":[1,2]}</parameter></function>\n</tool_call>\nDone',
        "ok\nDone",
        [("f", '{"s": "line1\\nline2", "n": 42, "o": {"a": [1, 2]}}')],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=m>\nNone\n</parameter>\n<parameter=a>7</parameter>\n<parameter=b>True</parameter>\n"
        "<parameter=x>1e3</parameter><parameter=l>[1, 'x']</parameter><parameter=r>9<parameter=e>two</function>",
        "",
        [("f", '{"m": null, "a": 7, "b": true, "x": 1e3, "l": [1, "x"], "r": 9, "e": "two"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=g>\n<parameter=zip>\n01234\n</parameter>\n<parameter=k>\n[1]\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=none>\n</function>\n</tool_call>",
        "",
        [("g", '{"zip": "01234", "k": [1]}'), ("none", "{}")],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\npart", "", [("f", '{"s": "part')]),
    ("qwen3_coder", "<tool_call> no", "<tool_call> no", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<para", "", [("f", "")]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=uni", "", [("f", "")]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</fun", "", [("f", '{"s": "x"')]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=filter[state]>\nopen\n</parameter>\n"
        "<parameter=unit price>\n5\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"filter[state]": "open", "unit price": 5}')],
    ),
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=s>V</parameter>\n</function>\n</seed:tool_call>", "",
     [("f", '{"s": "V"}')]),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n"
        "</tool_call>",
        "",
        [("f", '{"s": "x y", "n": 5}')],
    ),
    (
        "glm47",
        "Yes.<tool_call>f<arg_key>s</arg_key><arg_value>x\n</arg_value></tool_call><tool_call>g</tool_call>",
        "Yes.",
        [("f", '{"s": "x\\n"}'), ("g", "{}")],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">V</parameter>\n</invoke>\n<invoke name="f">\n'
        '<parameter name="n">7</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        [("f", '{"s": "V"}'), ("f", '{"n": 7}')],
    ),
    (
        "minimax_m3",
        f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<s>hey{M3}</s>{M3}<o>{M3}<a>1{M3}</a>{M3}<b>{M3}<item>x{M3}</item>'
        f"{M3}<item>2{M3}</item>{M3}</b>{M3}</o>{M3}</invoke>{M3}</tool_call>",
        "",
        [("f", '{"s": "hey", "o": {"a": 1, "b": ["x", 2]}}')],
    ),
    (
        "deepseek_v3",
        'text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "x"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "text",
        [("f", '{"s": "x"}'), ("g", "{}")],
    ),
    ("deepseek_v31", f'{V31[0]}f{V31[1]}{{"s": "x"}}{V31[2]}', "", [("f", '{"s": "x"}')]),
    ("deepseek_v32", "Sure\n\n" + DSML_CALL.format("function_calls"), "Sure", [("f", '{"s": "V\\n", "n": 5}')]),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{"s": "x"}</｜DSML｜invoke>', "",
     [("f", '{"s": "x"}')]),
    ("deepseek_v4", DSML_CALL.format("tool_calls"), "", [("f", '{"s": "V\\n", "n": 5}')]),
    (
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s":"x"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [("f", '{"s": "x"}')],
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>V'
        '<|close|>argument<|sep|><|open|>argument key="a&quot;b" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        "",
        [("f", '{"s": "V", "a\\"b": 3}')],
    ),
    (
        "kimi_k3",
        'Hi<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"s":"<|close|>"}'
        '<|close|>json<|sep|><|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        "Hi",
        [("f", '{"s": "<|close|>"}'), ("g", "{}")],
    ),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="obj', "", [("f", "")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "x"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', "", [("f", '{"s": "x"}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"s": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", '{"s": 1}'), ("g", "{}")]),
    ("mistral", 'Hm [TOOL_CALLS]f{"s": "x"}', "Hm", [("f", '{"s": "x"}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"s": "x"}}; {"name":"g","parameters":{}}', "",
     [("f", '{"s": "x"}'), ("g", "{}")]),
    ("llama3_json", '{"type":"function","name": "f", "parameters": {"s": "x"}}', "", [("f", '{"s": "x"}')]),
    ("llama3_json", '{"name": "f", "parameters": {"s": "x"}}\n{"name": "g", "parameters": {}}', "",
     [("f", '{"s": "x"}'), ("g", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "Bob", "age": 3} is it',
     '\n{"name": "Bob", "age": 3} is it', [("f", "{}")]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n{"name": "g", "arguments": {}}\n</tool_call>\n', "",
     [("f", '{"n": 1}'), ("g", "{}")]),
    ("llama3_json", '{"name": "Bob", "age": 3} is it', '{"name": "Bob", "age": 3} is it', []),
    ("llama3_json", "Plain {text}.", "Plain {text}.", []),
    ("hermes", 'a <tool_call>{"why": "\\u00e9", "name": "f", "id": 3, "arguments": {"s": "x"}, "n": [1,2]}</tool_call>',
     'a"why": "é", "n": [1, 2]', [("f", '{"s": "x"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}, "wh', '"arguments": {"a": 1}, "wh',
     [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "argu', "", [("f", "")]),
    ("pythonic", '[f(a=1, b="x\\n", c=[1,{"k":None}], d=True), g()]', "",
     [("f", '{"a": 1, "b": "x\\n", "c": [1, {"k": null}], "d": true}'), ("g", "{}")]),
    ("pythonic", "[f(a=-1_000, b=\"it's\", c=(1, .5), d={'k': '''t'''}, e=0x)]", "",
     [("f", '{"a": -1000, "b": "it\'s", "c": [1, 0.5], "d": {"k": "t"}, "e": "0x"}')]),
    ("pythonic", "[see (this)] is", "[see (this)] is", []),
    ("pythonic", "[f(a=1, b", "", [("f", '{"a": 1')]),
    ("pythonic", "[f(a=1), ", "", [("f", '{"a": 1}')]),
    ("gemma4", '<|tool_call>call:f{k:<|"', "", [("f", '{"k": ')]),
    ("jamba", '<tool_calls>[{"name": "f", "arguments": {}}, ', "", [("f", "{}")]),
    ("deepseek_v3", f"{V31[0]}function{V31[1]}f\n```js", "", [("f", "")]),
    ("pythonic", '[größe(länge=1, 城市="x")]', "", [("größe", '{"länge": 1, "城市": "x"}')]),
    ("llama4_pythonic", "<|python_start|>[f(s='it\"s')]<|python_end|>", "", [("f", '{"s": "it\\"s"}')]),
    ("olmo3", "<function_calls>f(a=1)\ng()</function_calls>", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("lfm2", "<|tool_call_start|>[f(a=1.5)]<|tool_call_end|> ok", " ok", [("f", '{"a": 1.5}')]),
    ("lfm2", '<|tool_call_start|>[{"name":"f","arguments":{"a":1}}]<|tool_call_end|>ok', "ok", [("f", '{"a": 1}')]),
    ("gemma4", '<|tool_call>call:f{k:<|"|>te"xt<|"|>,n:42,flag:true,o:{k:1},l:[1,2]}<tool_call|>', "",
     [("f", '{"k": "te\\"xt", "n": 42, "flag": true, "o": {"k": 1}, "l": [1, 2]}')]),
    ("functiongemma", "<start_function_call>call:f{k:<escape>v<escape>,b:2}<end_function_call>", "",
     [("f", '{"k": "v", "b": 2}')]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}]', "",
     [("f", '{"a": 1}'), ("f", '{"a": 2}')]),
    ("phi4_mini_json", "import functools\n", "import functools\n", []),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("granite4", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
    ("granite-20b-fc", '<function_call> {"name":"f","arguments":{}} <function_call> {"name":"g","arguments":{}}', "",
     [("f", "{}"), ("g", "{}")]),
    ("jamba", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]</tool_calls>', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    ("hunyuan_a13b", '<answer>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>\n</answer>', "", [("f", "{}")]),
    (
        "hy_v3",
        "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>V</arg_value>\n</tool_call>\n</tool_calls>",
        "",
        [("f", '{"s": "V"}')],
    ),
    ("internlm", 'x<|action_start|><|plugin|>\n{"name":"f","parameters":{"a":1}}<|action_end|>\n', "x", [("f", '{"a": 1}')]),
    ("ernie45", '<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>', "", [("f", "{}")]),
    (
        "step3",
        f'<｜tool_calls_begin｜>{STEP}<steptml:invoke name="f"><steptml:parameter name="s">V</steptml:parameter>'
        f'</steptml:invoke><｜tool_call_end｜>{STEP}<steptml:invoke name="g"></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
        "",
        [("f", '{"s": "V"}'), ("g", "{}")],
    ),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_call_id":"0","tool_name":"f","parameters":{"a":1}},\n'
        '{"tool_call_id":"1","tool_name":"g","parameters":{}}\n]<|END_ACTION|>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("nemotron_json", '<TOOLCALL>[{"name":"f","arguments":{}}]</TOOLCALL>', "", [("f", "{}")]),
    ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("xlam", '[{"name":"f","arguments":{"a":1}}]', "", [("f", '{"a": 1}')]),
    ("xlam", 'Text\n```json\n[{"name":"f","arguments":{"a":1}}]\n```\nmore', "Text\nmore", [("f", '{"a": 1}')]),
    ("xlam", 'Text\n```json\n[{"name":"f"}]\n```\nmore', 'Text\n```json\n[{"name":"f"}]\n```\nmore', []),
    ("gigachat3", 'function call<|role_sep|>\n{"name":"f","arguments":{"a":1}}', "", [("f", '{"a": 1}')]),
    ("gigachat3", 'Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{"name":"f","arguments":{"a":1}}<|message_sep|>\n\n', "Hi",
     [("f", '{"a": 1}')]),
    ("dots", '<dots_function_call>\n<invoke name="f">\n<parameter name="s">V</parameter></invoke></dots_function_call>',
     "", [("f", '{"s": "V"}')]),
    ("longcat", '<longcat_tool_call>{"name":"f","arguments":{}}</longcat_tool_call>', "", [("f", "{}")]),
]  # fmt: skip

OPEN, MAY, CLOSED = "open", "may open", "closed"
REASONING_CASES = [
    ("qwen3", MAY, "<think>\nhm\n</think>\n\nHello", "hm", "Hello"),
    ("qwen3", OPEN, "hm\nho\n</think>\n\nHello\n", "hm\nho", "Hello\n"),
    ("qwen3", OPEN, "never ends\n", "never ends\n", ""),
    ("qwen3", OPEN, "a</think>b</think>c", "a", "b</think>c"),
    ("qwen3", MAY, "\n Hello <think>", "", "\n Hello <think>"),
    ("qwen3", MAY, "<thin", "", "<thin"),
    ("qwen3", CLOSED, "Hello <think>", "", "Hello <think>"),
    ("deepseek_r1", MAY, "no marker</think>Hi", "no marker", "Hi"),
    ("deepseek_v3", OPEN, "x\n</think>\nHi", "x\n", "\nHi"),
    ("deepseek_v4", OPEN, "x</think>Hi", "x", "Hi"),
    ("glm45", MAY, "\n<think>x</think>\nHi", "x", "Hi"),
    ("minimax_m2", OPEN, "x\n</think>\n\nHi", "x", "Hi"),
    ("minimax_m2_append_think", MAY, "x\n</think>\n\nHi", "", "<think>x\n</think>\n\nHi"),
    ("minimax_m3", MAY, "<mm:think>x</mm:think>Hi", "x", "Hi"),
    ("kimi_k2", MAY, "<think>x</think>Hi", "x", "Hi"),
    ("kimi", MAY, "◁think▷x◁/think▷Hi", "x", "Hi"),
    (
        "kimi_k3", OPEN, "x<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>", "x", "Hi",
    ),
    ("mistral", MAY, "[THINK]x[/THINK]Hi", "x", "Hi"),
    ("mistral", MAY, "<think>\nx\n</think>\nHi", "x", "Hi"),
    ("gemma4", MAY, "<|channel>thought\nx<channel|>Hi", "x", "Hi"),
    ("seed_oss", MAY, "<seed:think>x</seed:think>Hi", "x", "Hi"),
    ("nemotron_v3", OPEN, "x\n</think>\nHi", "x", "Hi"),
    ("granite", MAY, "Here is my thought process:\n\nx\n\nHere is my response:\n\nHi", "x", "Hi"),
    ("hunyuan_a13b", MAY, "<think>\nx\n</think>\n<answer>\nHi\n</answer>", "x", "Hi"),
    ("hy_v3", MAY, "<think:fast>x</think:fast>Hi", "x", "Hi"),
    ("hy_v3", MAY, "<think:fast>x</think y\n</think:fast>Hi", "x</think y", "Hi"),  # a tag without `>` is text
    ("hy_v3", MAY, "<think of it> Hi", "", "<think of it> Hi"),
    ("hy_v3", MAY, "<think:fas", "", "<think:fas"),
    ("hy_v3", OPEN, "x</think:" + "y" * 33 + ">", "x</think:" + "y" * 33 + ">", ""),
    ("ernie45", OPEN, "x\n</think>\n\n<response>\nHi\n</response>\n", "x", "Hi"),
    ("step3", OPEN, "x\n</think>\n\nHi", "x", "Hi"),
    ("olmo3", OPEN, "x</think>Hi", "x", "Hi"),
    ("cohere_command3", MAY, "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", "x", "Hi"),
    ("cohere_command4", MAY, "<|START_THINKING|>x<|END_THINKING|><|START_TEXT|>Hi<|END_TEXT|>", "x", "Hi"),
    ("k2_horizon", OPEN, "x</ifm|think_fast>Hi", "x", "Hi"),
]  # fmt: skip

HARMONY_CASES = [
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"s\":1}<|call|>",
        "hm", "I look.", [("f", '{"s": 1}')],
    ),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi\n<|return|>",
        "ab", "Hi\n", [],
    ),
    (" to=functions.g<|channel|>commentary json<|message|>{}", "", "", [("g", "{}")]),
    ("<|channel|>commentary to=f<|message|>{\"s\": \"cu", "", "", [("f", '{"s": "cu')]),
    ("Well<|channel|>final<|message|>Hi<|channel|>analysis<|message|>x", "x", "WellHi", []),
    ("<|channel|>final <|constrain|>json<|message|>{\"a\": 1}", "", '{"a": 1}', []),
    ("<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>comment", "", "Hi", []),
    ("<|channel|>analysis<|message|>a<|end|>It is<|start|>4.", "a", "It is<|start|>4.", []),
    ("<|channel|>commentary to=functions.f<|call|>", "", "<|channel|>commentary to=functions.f", []),
]  # fmt: skip
