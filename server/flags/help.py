"""The output of `--help`: an overview of one screen, a group, the flags that match a word, or all; texts of commands.

Owner: the main thread, before anything heavy is imported. In: the flags of server/flags. Out: text. The table of the
page `flags` is made from the same data (tests/tables/flags).
"""

from __future__ import annotations

import textwrap

from server import docs
from server.flags.command_line import GROUPS, Flag, UsageError, default_text, value_name

COMMANDS = {
    "serve": "start the server (the default command)",
    "check": "print whether a model can be served on this machine, and its memory",
    "explain": "print the layers of a model, and the kernels that compute them",
    "run-batch": "answer the requests of a file without a server",
    "convert": "write the weights of pickled files (.bin, .pt) as safetensors",
    "bench": "measure a server or the engine; omniloop bench --help lists the measurements",
    "info": "print versions, processor, driver, cards, flags and the model",
    "docs": "print a page of the documentation; without a name, the list of pages",
}
# The most used flags, in the order of the overview.
COMMON = (
    *("host", "port", "api-key", "served-model-name", "model", "max-model-len", "max-num-seqs"),
    *("gpu-memory-utilization", "kv-cache-dtype", "quantization", "dtype", "device", "limit-mm-per-prompt"),
    *("tool-call-parser", "log-level"),
)
EXAMPLES = (
    ("omniloop", "serve the model in the package"),
    ("omniloop Qwen/Qwen3-8B --max-model-len 32k", "download a model from the hub and serve it"),
    ("omniloop check ./model --kv-cache-dtype fp8", "print whether a folder fits this machine"),
)
WIDTH = 100
COLUMN = 36
USAGE = {
    "check": """\
usage: omniloop check [MODEL] [--flag value ...]

Prints whether the model can be served on this machine, and what its weights, its cache and a context take.
It reads configurations and the headers of the weight files; of a model on the hub nothing else is downloaded.
The exit status is 0 if the server would start, and 1 if not; the last line then gives the reason.

It takes the flags of serve (omniloop --help=all). These change the result:
  --max-model-len, --kv-cache-dtype, --quantization, --gpu-memory-utilization, --max-num-seqs,
  --language-model-only, --limit-mm-per-prompt, --load-format dummy (no weight files are needed)

examples:
  omniloop check Qwen/Qwen3-8B --max-model-len 32k
  omniloop check ./config-only --load-format dummy --skip-tokenizer-init""",
    "explain": """\
usage: omniloop explain [MODEL] [--flag value ...]

Prints, from config.json alone, the layers that a configuration makes: parts, shapes, caches, formats of weights, and
the kernels of steps with 1, 32 and 2,048 tokens on this device, or on the card of --device-target.
It takes the flags of serve (omniloop --help=all).""",
    "run-batch": """\
usage: omniloop run-batch -i IN -o OUT [MODEL] [--flag value ...]

Answers the requests of IN, a JSON object in each line as for /v1/batches, and ends:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
Lines may have different urls: chat and text completions, responses, embeddings, decisions. OUT gets the answers in the
order of their ends, OUT.errors the lines that failed. Lines whose custom_id is in one of these files do not run again,
so a second run continues an interrupted one. The exit status is 0 if all lines are answered, and 1 if a line is wrong
(then none runs) or failed.
It takes the flags of serve, and these:""",
    "convert": """\
usage: omniloop convert FOLDER

Writes the weights of pickled files as safetensors next to them. These files are converted: pytorch_model.bin, also in
parts or in a folder inside of FOLDER; sparse_linear.pt and colbert_linear.pt of BGE-M3; adapter_model.bin. Without one
of these names, every .bin, .pt, .pth and .ckpt file is converted.

A pickle can hold code. A separate process reads each file and makes nothing but tensors. It has no network, starts no
program and writes only its result. Its memory is bounded by twice the size of the file and 1 GiB. Existing files are
left as they are. If one file cannot be converted, nothing is written.
It needs Linux.""",
    "info": """\
usage: omniloop info [MODEL] [--flag value ...]

Prints what a report of a fault needs: versions of the libraries, processor and its vector extensions, driver, cards,
flags with another value than their default, and the model. Values of secret flags are replaced by ***.
It takes the flags of serve and loads nothing but configurations.""",
    "docs": """\
usage: omniloop docs [NAME]

Prints a page of the documentation as Markdown; without a name, the list of pages. A running server has the same pages
at /docs/.""",
    "serve": """\
usage: omniloop serve [MODEL] [--flag value ...]

Starts the server. MODEL is a folder, a GGUF file or ORG/NAME on the Hugging Face hub; without it the server uses the
small model in the package. `omniloop` alone means `omniloop serve`.

omniloop --help lists the flags that people use, omniloop --help=all every flag.""",
}


def overview(flags: dict[str, Flag]) -> str:
    """One screen: commands, the most used flags, examples, and how to list the other flags."""
    lines = ["usage: omniloop [COMMAND] [MODEL] [--flag value ...]", "", "commands:"]
    lines += [f"  {name:9} {text}" for name, text in COMMANDS.items()]
    lines += ["", "flags that people use, with their defaults:"]
    lines += [line(flags[name]) for name in COMMON]
    lines += [CONFIG, "", "examples:"]
    lines += [f"  {command:46} {text}" for command, text in EXAMPLES]
    lines += ["", "more:"]
    lines += [f"  {words:46} {text}" for words, text in further()]
    return "\n".join(lines)


def further() -> list[tuple[str, str]]:
    """Commands that print more help."""
    return [
        ("omniloop --help=all", "every flag"),
        ("omniloop --help=WORD", "the flags whose lines hold a word"),
        ("omniloop COMMAND --help", "a command"),
        ("omniloop docs flags", "choosing flags; flags of vLLM"),
        ("omniloop --help=GROUP", "a group:"),
        *((f"  --help={name}", text) for name, text in GROUPS.items()),
    ]


def row(name: str, text: str) -> str:
    return f"  {name:{COLUMN}} {text}"


CONFIG = row("--config FILE.yaml", "flags by the same names; the command line wins")


def line(flag: Flag) -> str:
    """One flag: name, value, text and default. A long text continues on the lines below."""
    name = f"--{flag.name}{value_name(flag)}"
    text = f"{flag.hints['help']} ({default_text(flag)})"
    if len(row(name, text)) <= WIDTH:
        return row(name, text)
    indent = " " * (COLUMN + 3)
    wrapped = textwrap.wrap(text, WIDTH - len(indent), break_on_hyphens=False)
    first = [row(name, wrapped.pop(0))] if len(name) <= COLUMN else [f"  {name}"]
    return "\n".join([*first, *(indent + part for part in wrapped)])


def grouped(flags: dict[str, Flag], groups: dict[str, str] = GROUPS) -> str:
    """Flags under the headings of their groups."""
    lines: list[str] = []
    group = ""
    for flag in flags.values():
        if flag.group != group:
            group = flag.group
            lines += ["", f"{group}: {groups[group]}" if group in groups else f"{group}:"]
        lines.append(line(flag))
    return "\n".join(lines).lstrip("\n")


def of_word(flags: dict[str, Flag], word: str) -> str:
    """The flags of a group, or the flags whose lines contain a word."""
    asked = word.strip("-").replace("_", "-").lower()
    if asked in GROUPS:
        return grouped({name: flag for name, flag in flags.items() if flag.group == asked})
    found = [line(flag) for flag in flags.values() if asked in line(flag).lower()]
    if not found:
        raise UsageError(f"--help={word}: no flag has this word; use --help=all, or a group: {', '.join(GROUPS)}")
    return "\n".join(found)


def help_text(flags: dict[str, Flag], word: str, command: str = "") -> str:
    """The output of `--help` (word ""), of `--help=WORD`, and of `COMMAND --help`."""
    if not word:
        return USAGE.get(command) or overview(flags)
    return f"{CONFIG}\n\n{grouped(flags)}" if word == "all" else of_word(flags, word)


def page(words: list[str]) -> str:
    """The output of `omniloop docs [NAME]`. Raises UsageError for an unknown name."""
    if not words:
        return "\n".join(["usage: omniloop docs NAME", "", "pages:", *docs.listing()])
    if words[0] in ("-h", "--help"):
        return USAGE["docs"]
    if len(words) > 1 or words[0] not in docs.NAMES:
        raise UsageError(f"docs {' '.join(words)}: there is no such page; use one of {', '.join(docs.NAMES)}")
    return docs.text(words[0])
