"""Make SamplingParams from a request's fields: defaults, ranges, contradictions, and features refused by name.

Owner: loop, pure functions. Order of defaults: the request, --override-generation-config, the checkpoint's
generation_config.json, the table of API.md section 4. Every number that leaves here is finite and in range (SECURITY
S25, S27, S28); the engine checks again. jobs/job.py checks limits that depend on the prompt (context).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.base.errors import ConfigError
from engine.base.request import IDLE, SamplingParams
from server.errors import ApiError, invalid, not_here, quoted, size_within
from server.flags.config import FILE_DEFAULTS, Config, LimitsConfig
from server.jobs.samplers import has_samplers, samplers_of
from server.output.choices import ChoiceStream
from server.output.repetition import Repetition
from server.render.vocabulary import Vocabulary
from server.schema.common import RepetitionFields, SamplingFields
from server.schema.pooling import InputFields
from server.structure.structure import STRUCTURES, Structure, structure_of

COLDEST = 0.01  # lower temperatures are raised to this
PRIORITY = re.compile(r"-?[0-9]{1,9}\Z")  # X-Vllm-Priority
MAX_PATTERN = 256  # tokens of a repeated pattern
BEAM_CANNOT = (
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logprob_token_ids",
    "return_routed_experts", "top_n_sigma", "xtc_probability", "dry_multiplier",
)  # fmt: skip
# Fields that most requests leave out, read by `special_fields`.
SPECIAL = (
    "stop_token_ids", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids",
    "prompt_logprobs", "return_routed_experts", "return_progress",
)  # fmt: skip
PLAIN = SamplingParams()
INT32, INT64 = 2**31 - 1, 2**63 - 1
# Numbers with fixed bounds; top_k's upper bound is the vocabulary.
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0), "top_k": (-1, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "repetition_penalty": (0.0, 2.0),
}  # fmt: skip
ABOVE_ZERO, SMALLEST = ("top_p", "repetition_penalty"), 0.01  # must be above 0
log = logging.getLogger("omniloop")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's sampling, checked; `max_tokens` None means the rest of the context."""

    params: SamplingParams
    max_tokens: int | None  # 0: only score the prompt
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    interval: int  # tokens per chunk
    beam: bool = False  # the n best answers of beam search, instead of n samples
    length_penalty: float = 1.0
    repetition: Repetition | None = None
    structure: Structure | None = None  # the required form of the answers
    thinking_budget: int | None = None  # most tokens of reasoning; None: no limit
    choice: Callable[..., ChoiceStream] = ChoiceStream  # makes the text of a choice


def defaults_from(generation: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """The model's sampling defaults: its generation_config.json, overridden by the operator's."""
    found = {name: generation[name] for name in FILE_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:  # the checkpoint's default is greedy
        found["temperature"] = 0.0
        found.pop("top_p", None)
        found.pop("top_k", None)
    return found | dict(override)


def within_bounds(generation: Mapping[str, Any], width: int) -> dict[str, Any]:
    """A checkpoint's generation_config.json with its values inside the bounds of requests; each change is logged.

    top_k above the vocabulary's `width` is no limit. Values of a wrong type are left to `check_defaults`.
    """
    found = dict(generation)
    for name, (low, high) in BOUNDS.items():
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name == "top_k":
            found[name] = value if -1 <= value <= width else 0
        elif name in ABOVE_ZERO and value <= 0:
            found[name] = SMALLEST
        else:
            found[name] = min(max(value, low), high)
        if found[name] != value:
            log.warning("generation_config.json: %s=%s is used as %s", name, value, found[name])
    return found


def check_defaults(defaults: Mapping[str, Any], config: Config, vocabulary: Vocabulary) -> None:
    """Raise ConfigError if a default is invalid, which would refuse even a request without sampling fields."""
    try:
        resolve(SamplingFields(), None, None, defaults, config, vocabulary)
        if "max_new_tokens" in defaults:
            in_range("max_new_tokens", defaults["max_new_tokens"], 1, INT32)
    except ApiError as error:
        raise ConfigError(
            f"sampling defaults of generation_config.json or --override-generation-config: {error.message}; "
            "--generation-config vllm ignores the file"
        ) from None


def resolve(
    body: SamplingFields,
    logprobs: int | None,
    max_tokens: int | None,
    defaults: Mapping[str, Any],
    config: Config,
    vocabulary: Vocabulary,
) -> Asked:
    """Check all fields that both routes share; raises ApiError naming the first wrong one."""
    limits, number = config.limits, partial(number_of, body, defaults)
    stream = bool(body.stream)
    options = body.stream_options
    for name, only, with_stream in (("stream_options", "only allowed", True), ("prompt_logprobs", "not", False)):
        if getattr(body, name) is not None and stream is not with_stream:
            raise invalid(name, f"{name}: {only} with stream: true")
    temperature = number("temperature", *BOUNDS["temperature"], 1.0)
    is_special = logprobs is not None or any(getattr(body, name) is not None for name in SPECIAL)
    params = SamplingParams(
        max_tokens=max_tokens or 1,
        temperature=max(temperature, COLDEST) if temperature > 0.0 else 0.0,
        top_k=max(0, int(number("top_k", -1, vocabulary.width, 0))),
        top_p=number("top_p", *BOUNDS["top_p"], 1.0),
        min_p=number("min_p", *BOUNDS["min_p"], 0.0),
        presence_penalty=number("presence_penalty", *BOUNDS["presence_penalty"], 0.0),
        frequency_penalty=number("frequency_penalty", *BOUNDS["frequency_penalty"], 0.0),
        repetition_penalty=number("repetition_penalty", *BOUNDS["repetition_penalty"], 1.0),
        seed=None if body.seed in (None, -1) else int(in_range("seed", body.seed, -INT64 - 1, INT64)),
        eos_token_ids=vocabulary.eos,
        ignore_eos=bool(body.ignore_eos),
        **(samplers_of(number, body, defaults, vocabulary) if has_samplers(body, defaults) else {}),
        **(special_fields(body, logprobs, max_tokens, limits, vocabulary) if is_special else {}),
    )
    n = 1 if body.n is None else int(in_range("n", body.n, 1, limits.max_n))
    if body.use_beam_search:
        check_beam(body, params, n, max_tokens, limits, config.model.logprobs_mode)
    interval = 1 if body.stream_interval is None else int(in_range("stream_interval", body.stream_interval, 1, 1 << 20))
    return Asked(
        params=params,
        max_tokens=max_tokens,
        n=n,
        stop=() if body.stop is None else stop_strings(body.stop, limits, vocabulary),
        include_stop=bool(body.include_stop_str_in_output),
        stream=stream,
        include_usage=bool(options and options.include_usage) or config.chat.enable_force_include_usage,
        continuous_usage=bool(options and options.continuous_usage_stats),
        interval=max(interval, config.scheduler.stream_interval),  # the request's, but at least the server's
        beam=bool(body.use_beam_search),
        length_penalty=1.0 if body.length_penalty is None else in_range("length_penalty", body.length_penalty, -10, 10),
        repetition=None if body.repetition_detection is None else repetition_of(body.repetition_detection),
        structure=structure_of(body, limits) if any(getattr(body, name) is not None for name in STRUCTURES) else None,
    )


def with_ends(asked: Asked, ends: tuple[int, ...], vocabulary: Vocabulary) -> Asked:
    """The sampling of answers that also end at these tokens."""
    known = (*vocabulary.eos, *(token for token in ends if token < vocabulary.width))
    return replace(asked, params=replace(asked.params, eos_token_ids=tuple(dict.fromkeys(known))))


def special_fields(
    body: SamplingFields, logprobs: int | None, max_tokens: int | None, limits: LimitsConfig, vocabulary: Vocabulary
) -> dict[str, Any]:
    """The SamplingParams for the fields in `SPECIAL` and for log-probabilities."""
    return {
        "stop_token_ids": token_ids("stop_token_ids", body.stop_token_ids, limits.max_stop_ids, vocabulary),
        "min_tokens": min_tokens_of(body, max_tokens),
        "logit_bias": logit_bias_of(body, limits, vocabulary),
        "allowed_token_ids": allowed_of(body, limits, vocabulary),
        "bad_words": bad_words_of(body, limits, vocabulary),
        "logprobs": top_count("logprobs", 0 if logprobs is None and body.logprob_token_ids else logprobs, limits),
        "logprob_token_ids": token_ids("logprob_token_ids", body.logprob_token_ids, limits.max_logprob_ids, vocabulary),
        "prompt_logprobs": top_count("prompt_logprobs", body.prompt_logprobs, limits),
        "return_routed_experts": bool(body.return_routed_experts),
        "return_progress": bool(body.return_progress and body.stream),
    }


def check_beam(
    body: SamplingFields, params: SamplingParams, n: int, max_tokens: int | None, limits: LimitsConfig, mode: str
) -> None:
    """Check that beam search of width n has no fields that it would ignore."""
    if body.stream:
        raise invalid(
            "use_beam_search",
            "use_beam_search: not with stream: true, because the best answer is known at the end; send stream: false",
        )
    if max_tokens == 0:
        raise invalid("max_tokens", "max_tokens: must be at least 1 with use_beam_search")
    if mode != "raw_logprobs":
        raise not_here("use_beam_search", f"use_beam_search: not on a server with --logprobs-mode {mode}")
    if limits.max_logprobs != -1 and 2 * n > limits.max_logprobs:
        most = limits.max_logprobs // 2
        raise invalid("n", f"n: got {n}; beam search on this server is at most {most} wide (--max-logprobs)")
    for name in BEAM_CANNOT:
        if getattr(params, name) != getattr(PLAIN, name):
            raise invalid(name, f"{name}: has no effect in beam search; leave out this field or use_beam_search")


def repetition_of(fields: RepetitionFields) -> Repetition | None:
    """`repetition_detection`, checked; None if its patterns have length 0."""
    if not fields.max_pattern_size:
        return None
    name = "repetition_detection"
    longest = int(in_range(f"{name}.max_pattern_size", fields.max_pattern_size, 0, MAX_PATTERN))
    shortest = int(in_range(f"{name}.min_pattern_size", fields.min_pattern_size or 1, 1, longest))
    if fields.min_count is None:
        raise invalid(f"{name}.min_count", f"{name}.min_count: is missing and required")
    return Repetition(shortest, longest, int(in_range(f"{name}.min_count", fields.min_count, 2, 1 << 20)))


def number_of(
    body: SamplingFields, defaults: Mapping[str, Any], name: str, low: float, high: float, default: float
) -> float:
    """The request's value, otherwise the model's, otherwise `default`."""
    value = getattr(body, name)
    if value is None and name not in defaults:
        return default
    found: float = in_range(name, defaults[name] if value is None else value, low, high)
    if name == "top_k" and int(found) != found:
        raise invalid(name, f"{name}: got {quoted(found)}; must be an integer")
    if name in ABOVE_ZERO and found <= 0:
        raise invalid(name, f"{name}: got {quoted(found)}; must be greater than 0")
    return found


def in_range(name: str, value: Any, low: float, high: float) -> Any:
    """Check `low <= value <= high` on a finite number; NaN fails both comparisons."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(name, f"{name}: got {quoted(value)}; must be {_bound(low)} to {_bound(high)}")
    return value


def min_tokens_of(body: SamplingFields, max_tokens: int | None) -> int:
    if not body.min_tokens:
        return 0
    value = int(in_range("min_tokens", body.min_tokens, 0, 2**31 - 1))
    if max_tokens is not None and value > max_tokens:
        raise invalid("min_tokens", f"min_tokens: got {value}; must not be above max_tokens={max_tokens}")
    return value


def top_count(name: str, value: int | None, limits: LimitsConfig) -> int | None:
    if value is None:
        return None
    if limits.max_logprobs == -1:
        return int(in_range(name, value, -1, 1 << 20))
    return int(in_range(name, value, 0, limits.max_logprobs))


def token_ids(name: str, ids: list[int] | None, most: int, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Checked ids within the vocabulary, at most `most`."""
    if not ids:
        return ()
    if len(ids) > most:
        raise invalid(name, f"{name}: got {len(ids)} entries; at most {most} are allowed")
    for at, token in enumerate(ids):
        check_id(f"{name}[{at}]", token, vocabulary)
    return tuple(ids)


def check_id(param: str, token: int, vocabulary: Vocabulary) -> int:
    if not 0 <= token < vocabulary.width:
        raise token_out_of_range(param, token, vocabulary.width)
    return token


def token_out_of_range(param: str, token: Any, width: int) -> ApiError:
    text = f"{param}: token id {quoted(token)} is out of range; ids are 0 to {width - 1}"
    return invalid(param, text, "token_id_out_of_range")


def logit_bias_of(body: SamplingFields, limits: LimitsConfig, vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    if not body.logit_bias:
        return ()
    if len(body.logit_bias) > limits.max_logit_bias:
        most = limits.max_logit_bias
        raise invalid("logit_bias", f"logit_bias: got {len(body.logit_bias)} entries; at most {most} are allowed")
    found = []
    for text, value in body.logit_bias.items():
        if not (text.isascii() and text.isdigit() and len(text) < 12):
            raise invalid("logit_bias", f"logit_bias: key {quoted(text)} is not a token id")
        token = check_id("logit_bias", int(text), vocabulary)
        found.append((token, float(in_range(f"logit_bias.{text}", value, -100.0, 100.0))))
    return tuple(found)


def allowed_of(body: SamplingFields, limits: LimitsConfig, vocabulary: Vocabulary) -> tuple[int, ...] | None:
    if body.allowed_token_ids is None:
        return None
    if not body.allowed_token_ids:
        raise invalid("allowed_token_ids", "allowed_token_ids: is empty; name at least one id or leave it out")
    return token_ids("allowed_token_ids", body.allowed_token_ids, limits.max_allowed_ids, vocabulary)


def bad_words_of(body: SamplingFields, limits: LimitsConfig, vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, with and without a leading space."""
    words = body.bad_words or []
    if len(words) > limits.max_bad_words:
        raise invalid("bad_words", f"bad_words: got {len(words)} entries; at most {limits.max_bad_words} are allowed")
    found: dict[tuple[int, ...], None] = {}
    if body.bad_words:
        vocabulary.require_texts("bad_words")
    for at, word in enumerate(words):
        size = size_within(word, 128)
        if size > 128 or not word.strip():
            got = f"{size} bytes" if size > 128 else "no more than spaces"
            raise invalid(f"bad_words[{at}]", f"bad_words[{at}]: got {got}; must be a word of 1 to 128 bytes")
        for form in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(vocabulary.encode(form))
            if ids:
                found[tuple(check_id(f"bad_words[{at}]", token, vocabulary) for token in ids)] = None
    return tuple(found)


def stop_strings(asked: str | list[str], limits: LimitsConfig, vocabulary: Vocabulary) -> tuple[str, ...]:
    stop = [asked] if isinstance(asked, str) else asked
    if stop:
        vocabulary.require_texts("stop")
    if len(stop) > limits.max_stop_strings:
        raise invalid("stop", f"stop: got {len(stop)} strings; at most {limits.max_stop_strings} are allowed")
    for at, text in enumerate(stop):
        size = size_within(text, 256)
        if not 1 <= size <= 256:
            raise invalid(f"stop[{at}]", f"stop[{at}]: got {size} bytes; must be a text of 1 to 256 bytes")
    return tuple(stop)


def salt_of(body: SamplingFields | InputFields) -> str:
    """The client's cache_salt, checked."""
    salt = body.cache_salt
    if salt is None:
        return ""
    if not 1 <= len(salt) <= 128 or any(c in salt for c in "@/\\\0"):
        got = f"{len(salt)} characters, {quoted(salt)}"
        raise invalid("cache_salt", f"cache_salt: got {got}; must have 1 to 128 characters and none of @ / \\ NUL")
    return salt


def priority_of(body: SamplingFields | InputFields, config: Config, header: str = "") -> int:
    """The priority; lower runs first, only under the priority policy. A gateway's header counts if the body
    has none.
    """
    priority = body.priority or 0
    if body.priority is None and config.scheduler.scheduling_policy == "priority" and PRIORITY.match(header):
        priority = int(header)
    if not priority:
        return 0
    if config.scheduler.scheduling_policy != "priority":
        raise invalid(
            "priority", f"priority: got {priority}; this server runs first come, first served, so it must be 0"
        )
    return int(in_range("priority", priority, -(2**31), IDLE - 1))


def _bound(value: float) -> str:
    """A limit as a client would write it."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
