"""LimitsConfig: the flags that limit requests, connections and waiting times.

Made with the other groups of flags (server/flags/config); a request may lower a limit, never raise it.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.flags.flag import MIB, flag

MAX_QUEUE_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits that are checked before the engine; SECURITY classes S1 to S12, S27, S28 and S42."""

    max_header_bytes: int = flag(16384, "all headers of a request", low=1024)
    max_headers: int = flag(100, "number of headers of a request", low=8)
    max_target_bytes: int = flag(8192, "path and query of a request", low=64)
    max_request_bytes: int = flag(64 * MIB, "body of a route with media", low=1024)
    max_text_request_bytes: int = flag(8 * MIB, "body of a route without media", low=1024)
    max_upload_bytes: int = flag(0, "file in a form; 0: as --audio-max-bytes", low=0)
    max_form_parts: int = flag(64, "fields of a form", low=1)
    max_form_field_bytes: int = flag(65536, "text in a field of a form; four times as much in all fields", low=256)
    body_budget_bytes: int = flag(
        1024 * MIB, "all request bodies in memory, without the first 64 KiB of each", low=1024
    )
    json_max_depth: int = flag(200, "nesting of a JSON body", low=4)
    json_max_nodes: int = flag(
        1_000_000, "values in a JSON body; 65,536 of them outside long lists of integers", low=16
    )
    max_messages: int = flag(2048, "messages of a conversation", low=1)
    max_content_parts: int = flag(1024, "parts of a message", low=1)
    max_tools: int = flag(512, "tools of a request", low=1)
    max_tool_calls: int = flag(128, "calls in an answer; text after them is content", low=1)
    max_tool_argument_bytes: int = flag(MIB, "arguments of a call; text after them is content", low=64)
    max_name_bytes: int = flag(256, "length of a model name", low=16)
    header_timeout: float = flag(10.0, "seconds for the headers of a request", low=0.1)
    body_idle_timeout: float = flag(15.0, "seconds between two pieces of a body", low=0.1)
    body_timeout: float = flag(120.0, "seconds for a whole body", low=0.1)
    min_upload_rate: int = flag(16384, "bytes per second of a body after its first 5 seconds", low=1)
    keepalive_timeout: float = flag(120.0, "seconds that an idle connection stays open", low=1)
    max_connections: int = flag(4096, "open connections; above this the answer is 503", low=1)
    stream_buffer_bytes: int = flag(262144, "unread part of a stream", low=4096)
    stream_stall_timeout: float = flag(30.0, "seconds before a stream that the client does not read is closed", low=0.1)
    request_timeout: float = flag(0.0, "seconds for a whole request; 0: no limit", low=0)
    queue_timeout: float = flag(120.0, "seconds to the first token", low=0.1)
    prepare_timeout: float = flag(90.0, "seconds for media, chat template and tokens", low=0.1)
    template_timeout: float = flag(5.0, "seconds that a chat template may run", low=0.01)
    template_max_output_bytes: int = flag(0, "text that a chat template may produce; 0: as --max-prompt-bytes", low=0)
    template_max_kwargs: int = flag(32, "number of chat_template_kwargs", low=0)
    template_max_kwargs_bytes: int = flag(16384, "chat_template_kwargs as JSON", low=2)
    max_prompt_bytes: int = flag(0, "text of a prompt; 0: 16 bytes per token of the context", low=0)
    tokenize_offload_bytes: int = flag(2048, "longer prompts are tokenised by the thread pool", low=0)
    max_queued_tokens: int = flag(4_194_304, "prompt tokens that run or wait; above this the answer is 429", low=1)
    max_inflight_per_key: int = flag(
        0, "choices and realtime sessions of one key; above this the answer is 429; 0: no limit", low=0
    )
    max_realtime_sessions: int = flag(256, "open realtime sessions; above this the answer is 429", low=1)
    realtime_idle_timeout: float = flag(
        120.0, "seconds that a realtime session stays open without an event or a turn", low=0.1
    )
    max_queue_wait: float = flag(
        MAX_QUEUE_WAIT_S, "seconds that a request may have to wait, by the measured rate; above this 429; 0: any", low=0
    )
    trust_clients: bool = flag(
        False, "for a private server: no shares per client, and --max-queue-wait only if it is given"
    )
    max_n: int = flag(128, "choices of a prompt", low=1)
    max_prompts: int = flag(1024, "prompts of a completion request", low=1)
    max_choices: int = flag(2048, "prompts times choices of a request", low=1)
    max_logprobs: int = flag(20, "log-probabilities per token; -1: the whole vocabulary", low=-1)
    max_logprob_ids: int = flag(128, "entries of logprob_token_ids", low=1)
    max_stop_strings: int = flag(32, "stop strings, of 256 bytes at most", low=1)
    max_stop_ids: int = flag(64, "entries of stop_token_ids", low=1)
    max_logit_bias: int = flag(1024, "entries of logit_bias", low=1)
    max_bad_words: int = flag(64, "entries of bad_words, of 128 bytes at most", low=1)
    response_store_max: int = flag(1024, "stored responses; 0: none", low=0)
    response_store_ttl: float = flag(3600.0, "seconds that a response is stored", low=0.01)
    response_store_bytes: int = flag(64 * MIB, "all stored responses and their inputs", low=1024)
    max_allowed_ids: int = flag(4096, "entries of allowed_token_ids", low=1)
    grammar_max_bytes: int = flag(131_072, "text of a grammar or a schema", low=64)
    grammar_timeout: float = flag(5.0, "seconds that a grammar may compile", low=0.01)
    grammar_memory_bytes: int = flag(1024 * MIB, "memory of one grammar while it compiles", low=16 * MIB)
    grammar_cache_bytes: int = flag(256 * MIB, "cache of compiled grammars", low=1024)
    schema_max_depth: int = flag(64, "nesting of a JSON Schema", low=1)
    schema_max_nodes: int = flag(8192, "values in a JSON Schema", low=1)
    schema_max_enum: int = flag(4096, "entries of an enum or a choice; tags and triggers of a structural tag", low=1)
    regex_max_bytes: int = flag(4096, "text of a regular expression", low=1)
    regex_max_repeat: int = flag(1000, "count of a repetition {n,m} in a regular expression", low=1)
