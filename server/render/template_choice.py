"""Chooses a server's chat templates: the operator's, otherwise the checkpoint's, otherwise its vocabulary's plain
format.

Owner: none, pure functions; called once while the server loads. In: a tokenizer and --chat-template (a name of one of
the checkpoint's templates, a file, or the text itself). Out: compiled templates by name. A checkpoint's template that
does not compile is left out with a warning, so that completions are still served; for the operator's, ConfigError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from server.render.errors import RenderError
from server.render.template import OUR_NAMES, ChatTemplate
from server.render.tokenizer import Tokenizer

log = logging.getLogger("server.render")

_NO_TOOLS = (
    "{% if tools %}{{ raise_exception('tools need a chat template of the model; see --chat-template') }}{% endif %}"
)
# (tokens that only this family has, its plain format), for checkpoints without a template.
FALLBACKS: dict[str, tuple[tuple[str, ...], str]] = {
    "PaliGemma": (  # its vocabulary also has Gemma's tokens
        ("<image>", "<loc0000>", "<seg000>"),
        _NO_TOOLS + "{% if messages | length != 1 or messages[0].role != 'user' %}"
        "{{ raise_exception('this model answers one message of the role user') }}{% endif %}"
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}{{ '<image>' }}{% endif %}"
        "{% endfor %}{{ bos_token }}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}{{ '\\n' }}{% endfor %}",
    ),
    "ChatML": (
        ("<|im_start|>", "<|im_end|>"),
        _NO_TOOLS
        + "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ),
    "Llama 3": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _NO_TOOLS + "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ m.content | trim ~ '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    "Gemma": (
        ("<start_of_turn>", "<end_of_turn>"),
        _NO_TOOLS + "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' ~ "
        "('model' if m.role == 'assistant' else 'user') ~ '\\n' ~ m.content | trim ~ '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
}


def choose(tokenizer: Tokenizer, given: str | None, content_format: str) -> dict[str, ChatTemplate]:
    """Compiled templates by name; "default" is for conversations without tools."""
    if given:
        text = tokenizer.chat_templates.get(given) or _text_of(given, tokenizer.chat_templates)
        return {"default": _given(text, tokenizer.special_tokens, content_format)}
    found: dict[str, ChatTemplate] = {}
    for name, text in tokenizer.chat_templates.items():
        try:
            found[name] = ChatTemplate(text, tokenizer.special_tokens, content_format)
        except RenderError as error:
            log.warning("the checkpoint's chat template %r is left out: %s", name, error.message)
    if found or tokenizer.chat_templates or tokenizer.chat_format is not None:
        return found
    for family, (tokens, text) in FALLBACKS.items():
        if set(tokens) <= {*tokenizer.special_spellings, *tokenizer.added_tokens}:
            log.warning("the checkpoint has no chat template; its tokens are those of %s, whose format is used", family)
            return {"default": ChatTemplate(text, tokenizer.special_tokens, content_format)}
    return {}


def missing(templates: Mapping[str, ChatTemplate]) -> RenderError:
    """The error for a conversation without a template."""
    names = ", ".join(sorted(templates))
    has = f"has only the chat templates {names}" if names else "has no chat template"
    named = " (one of these names, a file or text)" if names else ""
    return RenderError(
        400,
        "template_error",
        f"This model {has}; start the server with --chat-template{named}, or use /v1/completions.",
        "messages",
    )


def check_defaults(kwargs: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Check that --default-chat-template-kwargs replaces no name that the server itself passes."""
    for name in kwargs:
        if name in OUR_NAMES or name in tokenizer.special_tokens or name == "chat_template":
            raise ConfigError(
                f"--default-chat-template-kwargs: {name} would replace a name the server passes; leave it out"
            )


def check_given(given: str) -> None:
    """Refuse a --chat-template before anything is downloaded or loaded: a missing file, or a text that does not
    compile. A plain word may name one of the checkpoint's templates, so it is checked later."""
    if "{" in given or "/" in given or given.endswith((".jinja", ".jinja2", ".j2", ".txt")):
        _given(_text_of(given, ()), {}, "auto")


def _given(text: str, special_tokens: Mapping[str, str], content_format: str) -> ChatTemplate:
    try:
        return ChatTemplate(text, special_tokens, content_format)
    except RenderError as error:
        raise ConfigError(f"--chat-template: {error.message}") from error


def _text_of(given: str, names: Iterable[str]) -> str:
    """The template's text; a value without braces is a file."""
    if "{" in given:
        return given
    try:
        return Path(given).read_text("utf-8")
    except (OSError, ValueError) as error:
        named = ", ".join(sorted(names))
        which = f"a template, a readable file or one of the checkpoint's ({named})" if named else "a readable file"
        raise ConfigError(f"--chat-template {given}: is not {which}") from error
