"""The command line: subcommands, Config from flags (server/flags), contradictions between flags, one-line refusals.

`omniloop [serve] [MODEL] [--flag value ...]`, `--config file.yaml` with the same names (the command line wins). A
refusal ends with status 2 and one line. Runs before the loop exists; imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from engine.base.errors import ConfigError, EngineError
from mm.item import MediaOptions
from server import __version__
from server.flags.arguments import Arguments
from server.flags.command_line import UsageError, all_flags
from server.flags.config import MODALITIES, SAMPLING_DEFAULTS, ChatConfig, Config, environment_keys, unread_key
from server.flags.help import COMMANDS, help_text, page
from server.flags.lora_flags import check_lora
from server.flags.media_flags import check_media
from server.ops.proxies import TrustedProxies
from server.start import signals

# Flags that restrict access, which must not be empty: `--api-key "$UNSET"` must not open the server to all.
CLOSING = (
    *("api-key", "api-key-file", "admin-api-key", "ssl-keyfile", "ssl-certfile", "host", "uds"),
    *("allowed-hosts", "allowed-media-domains"),
)


def build(values: dict[str, Any]) -> Config:
    """Make a Config from the given values and defaults."""
    flags = all_flags()
    if limits := values.get("limit-mm-per-prompt"):  # vLLM's longer form also gives the sizes of its trial items
        counts = {name: each.get("count") if isinstance(each, dict) else each for name, each in limits.items()}
        values = {**values, "limit-mm-per-prompt": counts}
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        grouped.setdefault(flags[name].group, {})[flags[name].field] = value
    sections = typing.get_type_hints(Config)
    config = Config(**{group: sections[group](**items) for group, items in grouped.items()})
    for name in CLOSING:
        if name in values and not values[name]:
            raise UsageError(f"--{name}: is empty; give a value, or leave the flag out")
    try:
        keys = (*config.server.api_key, *environment_keys())
    except ValueError as error:
        raise UsageError(str(error)) from None
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, api_key=keys))
    check(config)
    return config


def check(config: Config) -> None:
    """Check for contradictions between flags."""
    server = config.server
    if "*" in server.allowed_origins and server.allow_credentials:
        raise UsageError("--allowed-origins '*' with --allow-credentials: name the origins, or drop credentials")
    if server.root_path and (not server.root_path.startswith("/") or server.root_path.endswith("/")):
        raise UsageError(f"--root-path {server.root_path}: must begin with / and not end with it")
    if server.enable_dev_endpoints and not server.admin_api_key and not config.is_loopback:
        raise UsageError("--enable-dev-endpoints: needs --admin-api-key, or a loopback address (--host 127.0.0.1)")
    if bool(server.ssl_keyfile) != bool(server.ssl_certfile):
        raise UsageError("--ssl-keyfile and --ssl-certfile: give both or neither")
    try:
        TrustedProxies(server.trusted_proxies)
    except ValueError as error:
        raise UsageError(f"--trusted-proxies {error}: must be an address, a CIDR such as 10.0.0.0/8, or unix") from None
    if config.model.generation_config not in ("auto", "vllm"):
        raise UsageError(f"--generation-config {config.model.generation_config}: must be auto or vllm")
    for name, count in config.media.limit_mm_per_prompt.items():
        if name not in MODALITIES or type(count) is not int or count < 0:
            named = ", ".join(MODALITIES)
            raise UsageError(f"--limit-mm-per-prompt {name}={count}: must be whole numbers of {named}")
    try:
        MediaOptions.of(config.chat.mm_processor_kwargs)
    except ValueError as error:
        raise UsageError(f"--mm-processor-kwargs: {error}") from None
    try:
        check_media(config.media)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        check_lora(config.lora, config.model_names)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if config.lora.enable_runtime_lora and not server.admin_api_key and not config.is_loopback:
        raise UsageError("--enable-runtime-lora: needs --admin-api-key, or a loopback address (--host 127.0.0.1)")
    folder = config.media.allowed_local_media_path
    if folder and not os.path.isdir(folder):
        raise UsageError(f"--allowed-local-media-path {folder}: there is no such folder")
    for name in config.model.override_generation_config.keys() - {*SAMPLING_DEFAULTS}:
        known = ", ".join(SAMPLING_DEFAULTS)
        raise UsageError(f"--override-generation-config: there is no default {name!r}; known are {known}")
    if config.chat.media_io_kwargs or config.chat.image_background != "white":
        check_reading(config.chat)


def check_reading(chat: ChatConfig) -> None:
    """Check the options for reading media."""
    from server.jobs.media_options import colour, merged

    flag = "--media-io-kwargs"
    try:
        merged({}, chat.media_io_kwargs)
        flag = "--image-background"
        colour(chat.image_background)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def parse(argv: Sequence[str]) -> tuple[str, Config]:
    """(command, config); raises UsageError, or SystemExit(0) after printing help."""
    words = list(argv)
    named = words.pop(0) if words and words[0] in COMMANDS else ""
    command = named or "serve"
    flags = all_flags()
    if not named and words:
        check_command(words[0])
    arguments = Arguments(flags)
    try:
        arguments.read(words)
    except UsageError as error:
        raise UsageError("\n".join((str(error), *contradictions(arguments.values)))) from None
    if arguments.version and arguments.help is None:
        say(f"omniloop {__version__}")
        raise SystemExit(0)
    if arguments.help is not None:
        say(help_text(flags, arguments.help, named))
        raise SystemExit(0)
    config = build(arguments.values)
    other, server = unread_key(), config.server
    if command == "serve" and other and not (server.api_key or server.api_key_file):
        raise UsageError(f"{other}: is not read here; name it SERVER_API_KEY, or unset it to serve without a key")
    return command, config


def contradictions(values: dict[str, Any]) -> list[str]:
    """The error of flags that are right one by one, reported together with the wrong ones."""
    try:
        build(values)
    except UsageError as error:
        return [str(error)]
    return []


def check_command(word: str) -> None:
    """Refuse a misspelt command, which would be read as a model. A folder or file of that name is a model."""
    if word.startswith("-") or "/" in word or os.path.exists(word):
        return
    near = difflib.get_close_matches(word, [*COMMANDS, "help", "version"], n=1, cutoff=0.7)
    if near:
        meant = near[0] if near[0] in COMMANDS else f"--{near[0]}"
        raise UsageError(f"{word}: there is no such command, file or folder; did you mean {meant}?")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # a command other than serve
        print("omniloop: interrupted", file=sys.stderr)
        return 130


def run(words: Sequence[str]) -> int:
    if words and words[0] == "bench":
        from server.bench.command import main as bench

        signals.release()
        return bench(words[1:], say, build)
    if words and words[0] == "explain":
        from server.start.explain import main as explain

        signals.release()
        return explain(words[1:], say, build)
    if words and words[0] == "run-batch":
        from server.start.run_batch import main as run_batch

        signals.release()
        return run_batch(words[1:], say, build)
    if words and words[0] == "convert":
        from server.start.convert import main as convert

        signals.release()
        return convert(words[1:], say)
    try:
        if words and words[0] == "docs":
            say(page(list(words[1:])))
            return 0
        command, config = parse(words)
    except UsageError as error:
        print(error.report, file=sys.stderr)
        return 2
    if command != "serve":
        signals.release()
    commands: dict[str, Callable[[Config], int]] = {"serve": serve, "check": check_model, "info": info}
    try:
        return commands[command](config)
    except EngineError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1


def serve(config: Config) -> int:
    from server.start.process import serve as run

    return run(config)


def info(config: Config) -> int:
    from server.start.info import lines

    for line in lines(config):
        say(line)
    return 0


def check_model(config: Config) -> int:
    from server.start.check import lines, refused

    try:
        for line in lines(config):
            say(line)
    except ConfigError as error:
        say(refused(error))
        return 1
    return 0


def say(text: str) -> None:
    """Print a line; ignores a closed pipe (`--help | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python would write again at exit and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
