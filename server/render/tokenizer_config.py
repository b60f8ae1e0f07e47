"""The small files next to a tokenizer: tokenizer_config.json, special_tokens_map.json, chat templates.

Owner: none, pure functions; called while a tokenizer is loaded. In: a checkpoint's folder. Out: plain data; every error
names the file. Chat templates have names: "default", and "tool_use" for conversations with tools.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from server.render.deepseek_form import read_form

VOCABULARY, MERGES, WORDS = "vocab.json", "merges.txt", "vocab.txt"  # files of slow tokenizers
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, plus the entries that only special_tokens_map.json has; null is no entry."""
    config = read_json(folder / "tokenizer_config.json")
    for name, value in read_json(folder / "special_tokens_map.json").items():
        if config.get(name) is None:
            config[name] = value
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is needed")
    return value


def read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Later ones win: tokenizer_config, chat_template.json, additional_chat_templates/,
    chat_template.jinja. A folder without any may have a form that we know (deepseek_form.py).
    """
    found: dict[str, str] = {}
    for value in (config.get("chat_template"), read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, dict):
            found.update({name: text for name, text in value.items() if isinstance(text, str)})
        elif isinstance(value, list):
            found.update({entry["name"]: entry["template"] for entry in value})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text("utf-8")
    single = folder / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text("utf-8")
    if not found and (form := read_form(folder)) is not None:
        found["default"] = form
    return found


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The usual names, every other `..._token`, and the names listed as extra."""
    named = {name: config.get(name) for name in NAMED_TOKENS}
    named.update({name: value for name, value in config.items() if name.endswith("_token")})
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), dict):
            named.update(config[key])
    texts = {name: content(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def content(value: Any) -> str | None:
    """A token's text, written as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
