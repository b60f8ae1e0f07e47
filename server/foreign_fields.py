"""Fields of other servers' requests: vLLM, SGLang, llama.cpp, Ollama, TGI, and clients of hosted APIs.

Owner: none, values and pure functions. In: a field's name and value. Out: our settings, a refusal, or nothing for a
hint. `server/http/foreign_body.py` applies the table to bodies and to nested options. A field that changes answers
elsewhere is honoured or refused; all other unknown fields pass and are named in the answer's header `x-ignored-fields`.
Names come from the documentation of the five servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Sent = Mapping[str, Any]  # the fields of one body
Settings = Mapping[str, Any]  # values by the path of our field, such as structured_outputs.json


class Honoured(NamedTuple):
    """A field with an equivalent here. `settings` raises ValueError with what a wrong value must be."""

    ours: str  # for readers
    settings: Callable[[Any], Settings]


class Refused(NamedTuple):
    """A field without an equivalent here, except for values that switch it off."""

    advice: str  # what to send instead
    is_off: Callable[[Any, Sent], bool]
    every_route: bool = False  # also where no text is generated


def renamed(ours: str) -> Honoured:
    return Honoured(ours, lambda value: {ours: value})


def refused(advice: str, *off: Any, every_route: bool = False) -> Refused:
    """`off`: values that switch the field off, besides false and empty values."""
    return Refused(advice, lambda value, sent: not value or value in off, every_route)


def only_with(switch: str, advice: str) -> Refused:
    """A parameter of another field: without effect while that field is off."""
    return Refused(advice, lambda value, sent: not sent.get(switch))


# Our fields with different names on different routes: the first that the route has is set, and all are compared.
SPELLINGS = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    "stop": ("stop", "stop_sequences"),
    "response_format": ("response_format", "text.format"),
    "reasoning_effort": ("reasoning_effort", "reasoning.effort", "chat_template_kwargs.reasoning_effort"),
    "enable_thinking": ("chat_template_kwargs.enable_thinking",),
}
# Settings that mean nothing on a route without conversations.
OF_CHAT = ("reasoning_effort", "enable_thinking", "thinking_token_budget", "include_reasoning")
SAMPLERS = ("penalties", "dry", "top_n_sigma", "temperature", "top_k", "top_p", "min_p", "xtc")  # our order


def count(value: Any) -> Settings:
    """A number of tokens; negative: no limit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {} if is_number and value < 0 else {"max_tokens": value}


def texts(value: Any) -> Settings:
    return {"stop": [value] if isinstance(value, str) else value}


def top_logprobs(value: Any) -> Settings:
    if type(value) is not int or value < 0:
        raise ValueError("an integer of at least 0")
    return {"top_logprobs": value} if value else {}


def grammar(value: Any) -> Settings:
    """A grammar in GBNF, or TGI's object with type and value."""
    if isinstance(value, dict):
        kinds = {"json": "json", "json_schema": "json", "regex": "regex"}
        if value.get("type") not in kinds or "value" not in value:
            raise ValueError("a text, or an object with type json or regex and value")
        return {f"structured_outputs.{kinds[value['type']]}": value["value"]}
    return {"structured_outputs.grammar": value} if value != "" else {}


def output_format(value: Any) -> Settings:
    """Ollama's form of an answer."""
    if value not in ("", "json") and not isinstance(value, dict):
        raise ValueError("json or a JSON Schema")
    if value == "json":
        return {"structured_outputs.json_object": True}
    return {"structured_outputs.json": value} if value else {}


def structural_tag(value: Any) -> Settings:
    try:
        return {"structured_outputs.structural_tag": json.loads(value) if isinstance(value, str) else value}
    except ValueError:
        raise ValueError("a structural tag as JSON") from None


def json_object(value: Any) -> Settings:
    return {"structured_outputs.json_object": True} if value else {}


def switched(value: Any) -> Settings:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return {"enable_thinking": value}


def effort(value: Any) -> Settings:
    return {"reasoning_effort": value, **({"enable_thinking": False} if value == "none" else {})}


def think(value: Any) -> Settings:
    """Ollama's switch: true, false or an effort."""
    return switched(value) if isinstance(value, bool) else {**effort(value), "enable_thinking": value != "none"}


def thinking(value: Any) -> Settings:
    """Anthropic's object, as DeepSeek's and GLM's chat routes take it."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        raise ValueError("an object of type enabled, disabled or adaptive")
    budget = value.get("budget_tokens") if kind == "enabled" else None
    return {"enable_thinking": kind != "disabled"} | ({} if budget is None else {"thinking_token_budget": budget})


def reasoning(value: Any) -> Settings:
    """OpenRouter's object: effort, max_tokens, exclude, enabled."""
    if not isinstance(value, dict):
        raise ValueError("an object with effort")
    made: dict[str, Any] = {}
    if value.get("effort") is not None:
        made |= effort(value["effort"])
    if value.get("max_tokens") is not None:
        made["thinking_token_budget"] = value["max_tokens"]
    if value.get("enabled") is not None:
        made |= switched(value["enabled"])
    return made | ({"include_reasoning": False} if value.get("exclude") else {})


def sampled(value: Any) -> Settings:
    """`do_sample`: false means greedy."""
    return {"temperature": 0.0} if value is False else {}


def cut(value: Any) -> Settings:
    """TGI's number of tokens. Other servers have a switch of this name for inputs of embeddings."""
    return {"truncate_prompt_tokens": value} if type(value) is int else {}


def in_our_order(value: Any, sent: Sent) -> bool:
    """Whether the listed samplers run in our order, and all that the body sets are listed."""
    if not value:
        return True
    if not isinstance(value, list) or [name for name in SAMPLERS if name in value] != value:
        return False
    return all(name in value for name in ("temperature", "top_k", "top_p", "min_p") if sent.get(name) is not None)


def within_n(value: Any, sent: Sent) -> bool:
    return type(value) is int and value <= (sent.get("n") or 1)


def whole_text(value: Any, sent: Sent) -> bool:
    """`repeat_last_n`: -1 is the whole text, as here; 0 switches penalties off."""
    penalties = [sent.get(name) for name in ("repetition_penalty", "repeat_penalty")]
    return value == -1 or (value == 0 and all(penalty in (None, 1) for penalty in penalties))


def up_to(most: int) -> Callable[[Any, Sent], bool]:
    return lambda value, sent: isinstance(value, int | float) and value <= most


def no_scale(value: Any, sent: Sent) -> bool:
    """A list of adapters whose scales are all 0."""
    return not value or (isinstance(value, list) and all(isinstance(x, dict) and x.get("scale") == 0 for x in value))


MAX_TOKENS = Honoured("max_tokens", count)
TOP_LOGPROBS = Honoured("logprobs, top_logprobs", top_logprobs)
SAMPLING = "send temperature, top_k, top_p or min_p"
PENALTIES = "penalties count the whole text; leave it out, or send -1"
NO_ADAPTERS = "name the adapter as model (the server needs --enable-lora); leave it out"
NO_CODE = "code of a request never runs; send logit_bias, bad_words or structured_outputs"
NO_TRANSFER = "keys and values are not transferred between servers; leave it out"
NO_TIME = "answers are limited by tokens; send max_tokens"
NO_SHIFT = "a context is never shifted; leave it out"

FIELDS: dict[str, Honoured | Refused] = {
    "max_new_tokens": MAX_TOKENS,
    "n_predict": MAX_TOKENS,
    "num_predict": MAX_TOKENS,
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), renamed("max_tokens")),
    **dict.fromkeys(("stop", "stop_sequences"), Honoured("stop", texts)),
    "response_format": renamed("response_format"),
    "min_new_tokens": renamed("min_tokens"),
    "repeat_penalty": renamed("repetition_penalty"),
    "sampling_seed": renamed("seed"),
    "no_stop_trim": renamed("include_stop_str_in_output"),
    "return_tokens": renamed("return_token_ids"),
    "extra_key": renamed("cache_salt"),
    "do_sample": Honoured("temperature", sampled),
    "truncate": Honoured("truncate_prompt_tokens", cut),
    "n_probs": TOP_LOGPROBS,
    "top_n_tokens": TOP_LOGPROBS,
    # Forms of the answer.
    "regex": renamed("structured_outputs.regex"),
    "ebnf": renamed("structured_outputs.grammar"),
    "grammar": Honoured("structured_outputs.grammar", grammar),
    "json_schema": renamed("structured_outputs.json"),
    "guided_json": renamed("structured_outputs.json"),
    "guided_regex": renamed("structured_outputs.regex"),
    "guided_choice": renamed("structured_outputs.choice"),
    "guided_grammar": renamed("structured_outputs.grammar"),
    "guided_json_object": Honoured("structured_outputs.json_object", json_object),
    "guided_whitespace_pattern": renamed("structured_outputs.whitespace_pattern"),
    "structural_tag": Honoured("structured_outputs.structural_tag", structural_tag),
    "format": Honoured("structured_outputs.json", output_format),
    # Reasoning.
    "reasoning_effort": Honoured("reasoning_effort", effort),
    "reasoning": Honoured("reasoning_effort, thinking_token_budget, include_reasoning", reasoning),
    "enable_thinking": Honoured("chat_template_kwargs.enable_thinking", switched),
    "thinking": Honoured("chat_template_kwargs.enable_thinking, thinking_token_budget", thinking),
    "think": Honoured("chat_template_kwargs.enable_thinking, reasoning_effort", think),
    "thinking_budget": renamed("thinking_token_budget"),
    "reasoning_format": Refused(
        "reasoning is always separated; start the server with --reasoning-parser none",
        lambda value, sent: value not in ("none", "deepseek-legacy"),
    ),
    "separate_reasoning": Refused(
        "reasoning is always separated; start the server with --reasoning-parser none",
        lambda value, sent: value is not False,
    ),
    # Samplers that are not built.
    "mirostat": refused(SAMPLING),
    "mirostat_tau": only_with("mirostat", SAMPLING),
    "mirostat_eta": only_with("mirostat", SAMPLING),
    "typical_p": refused(SAMPLING, 1),
    "tfs_z": refused(SAMPLING, 1),
    "top_a": refused(SAMPLING),
    "dynatemp_range": refused(SAMPLING),
    "dynatemp_exponent": only_with("dynatemp_range", SAMPLING),
    "adaptive_target": Refused(SAMPLING, up_to(0)),
    "samplers": Refused(f"the order is {', '.join(SAMPLERS)}; list them so, with every sampler set", in_our_order),
    "min_keep": Refused("top_p and min_p keep one token; leave it out", up_to(1)),
    "best_of": Refused("send n, and choose among the answers by logprobs", within_n),
    "repeat_last_n": Refused(PENALTIES, whole_text),
    "penalize_nl": refused(PENALTIES),
    "penalize_newline": refused(PENALTIES),
    "n_keep": Refused(NO_SHIFT, up_to(0)),
    "num_keep": Refused(NO_SHIFT, up_to(0)),
    "n_discard": Refused(NO_SHIFT, up_to(0)),
    "n_indent": Refused("send structured_outputs.regex", up_to(0)),
    "stop_regex": refused("send stop with texts, or structured_outputs.regex"),
    "grammar_lazy": refused("send structured_outputs.structural_tag with triggers"),
    "t_max_predict_ms": Refused(NO_TIME, up_to(0)),
    "t_max_prompt_ms": Refused(NO_TIME, up_to(0)),
    # Adapters, code and tensors.
    "lora": Refused(NO_ADAPTERS, no_scale, every_route=True),
    "lora_request": refused(NO_ADAPTERS, every_route=True),
    "lora_path": refused(NO_ADAPTERS, every_route=True),
    "adapter_id": refused(NO_ADAPTERS, every_route=True),
    "custom_logit_processor": refused(NO_CODE),
    "custom_params": refused(NO_CODE),
    "logits_processors": refused(NO_CODE),
    "vllm_xargs": refused(NO_CODE),
    "watermark": refused("answers are not marked; leave it out"),
    "return_hidden_states": refused("hidden states are not returned; a pooling model's /pooling returns vectors"),
    "kv_transfer_params": refused(NO_TRANSFER, every_route=True),
    "bootstrap_host": refused(NO_TRANSFER, every_route=True),
    "input_embeds": refused("send prompt_embeds to /v1/completions", every_route=True),
    "image_data": refused("send messages with parts of type image_url", every_route=True),
    "audio_data": refused("send messages with parts of type audio_url", every_route=True),
    "video_data": refused("send messages with parts of type video_url", every_route=True),
    "multimodal_data": refused("send it in an object with prompt_string, as prompt of /completion", every_route=True),
    "session_params": refused("send the whole prompt: the cache finds its beginning", every_route=True),
    "context": refused("send the conversation as messages", every_route=True),
    "template": refused("send chat_template, which needs --trust-request-chat-template", every_route=True),
    "web_search_options": Refused("nothing is searched here; send a tool of type function", lambda value, sent: False),
    "audio": Refused("answers are text; leave it out", lambda value, sent: False),
    "post_sampling_probs": refused("start the server with --logprobs-mode processed_logprobs"),
    "decoder_input_details": refused("send prompt_logprobs"),
}

# Fields that concern speed, accounts and storage: the answer's text is the same without them.
HINTS = frozenset((
    "backend_sampling", "cache_control", "cache_prompt", "client_metadata", "conversation_id", "custom_labels",
    "data_parallel_rank", "details", "f16_kv", "guided_decoding_backend", "id_slot", "inference_geo", "keep_alive",
    "log_metrics", "logits_all", "low_vram", "main_gpu", "max_tool_calls", "metadata", "n_cache_reuse", "no_logs",
    "num_batch", "num_ctx", "num_gpu", "num_thread", "numa", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "rid", "safety_identifier", "service_tier", "session_id", "slot_id",
    "speculative.n_max", "speculative.n_min", "speculative.p_min", "speed", "store", "stream_options",
    "stream_reasoning", "timings_per_token", "use_mlock", "use_mmap", "user", "verbosity", "vocab_only",
))  # fmt: skip
