"""The limits of a running engine, and the check that every request passes before it reaches the device thread.

Owner: made at start, read on the loop. The HTTP edge checks the same limits in the client's terms. The check is
repeated here because nothing unchecked may reach the device (SECURITY.md, ground rule 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from engine.base.bidirectional import Bidirectional, bi_spans_of
from engine.base.errors import RequestError
from engine.base.request import IDLE, ROWS, Modality, Request, SamplingParams

PLAIN = SamplingParams()
CHANGING = (  # parameters that name tokens or request log-probabilities; most requests leave them out
    "stop_token_ids", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs",
    "logprob_token_ids", "not_first_token_ids", "dry_multiplier", "top_n_sigma", "xtc_probability",
)  # fmt: skip
MAX_SIGMA = 100.0  # largest top_n_sigma
MAX_DRY = 100.0  # largest dry_multiplier and dry_base
MAX_HISTORY = 8192  # last tokens of a text in which DRY finds repetitions
MAX_EDITS = 2048  # token ids of one request whose logits are changed one by one


def idle_slots(rows: int) -> int:
    """Slots for idle choices of an engine with `rows` rows: those of a step, and some that replace the ended ones."""
    return rows + rows // 4 + 4


class RankMemory(NamedTuple):
    """Bytes that a rank holds."""

    weights: int
    kv_cache: int
    exchange: int  # where the sums of all ranks meet


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed at start."""

    max_model_len: int  # tokens of prompt and answer
    num_blocks: int  # KV blocks that requests can use
    max_open: int  # choices running and waiting
    vocab_size: int  # width of the logits
    num_embeddings: int  # rows of the embedding table
    max_logprobs: int
    encoder_capacity: int  # tower rows that one item may have
    modalities: tuple[str, ...]  # media modalities; also "prompt" if requests may send embedding rows in place of text
    hidden_size: int = 0  # width of an embedding row
    row_widths: Mapping[Modality, int] = field(default_factory=dict)  # modality -> width of a row of its tower
    pooled_width: int = 0  # width of a pooled row
    pools: bool = False  # the engine makes an array of each input, and no tokens
    bidirectional: Bidirectional = ""  # which tokens of a prompt see later tokens
    max_bi_span: int = 0  # tokens of the longest bidirectional span that a step can compute, whatever its other rows
    routed_experts: bool = False  # the experts of tokens are captured
    has_experts: bool = False  # some layer has experts
    axes: int = 1  # position axes per token
    adds_media: bool = False  # spans may extend beyond the prompt; the answer ends where the spans end
    max_rows: int = 1  # rows in a step
    adapters: tuple[str, ...] = ()  # the media of the checkpoint's own adapters
    of_ranks: tuple[RankMemory, ...] = ()
    num_drafts: int = 0  # most drafts of a row in a step
    picture_bytes: int = 0  # largest decoded picture that the device scales and cuts; 0: the device takes patches only

    @property
    def max_idle(self) -> int:
        """Idle choices that the engine holds in addition to `max_open`."""
        return idle_slots(self.max_rows)


class Held(Protocol):
    """The stream of an open choice."""

    @property
    def request(self) -> Request:
        """The choice's request."""


def lacks_room(request: Request, limits: Limits, routes: Mapping[int, tuple[Held, int]]) -> bool:
    """Whether a request's choices do not fit; `routes`: the open choices. Idle choices have slots of their own, and use
    those that other choices leave.
    """
    kinds = [stream.request.priority == IDLE for stream, _ in routes.values()]
    if request.priority == IDLE:
        return len(kinds) + request.n > limits.max_open + limits.max_idle
    return len(kinds) + request.n - min(limits.max_idle, sum(kinds)) > limits.max_open


def check(request: Request, limits: Limits) -> None:
    """Raises RequestError naming what was got, what is allowed and how to fix it."""
    ids = request.prompt_token_ids
    if (request.pooling is None) is limits.pools:
        raise RequestError(f"this engine {'pools its inputs' if limits.pools else 'generates'}; the request does not")
    count = len(ids) if request.pooling is None else _shortest_or_longest(request.pooling.starts, request.n, len(ids))
    if count == 0:
        raise RequestError("the prompt has no tokens; send at least one")
    # The last token of an answer is never computed, so one token may follow a prompt that fills the context.
    if count > limits.max_model_len or (count == limits.max_model_len and request.sampling.max_tokens > 1):
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. "
            f"However, your prompt contains {count} input tokens"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.num_embeddings:
        raise RequestError(
            f"token id {low if low < 0 else high} is out of range; ids are 0 to {limits.num_embeddings - 1}"
        )
    if request.n < 1:
        raise RequestError(f"n={request.n}; ask for at least 1")
    if request.lora is not None and limits.adapters and (own := request.adapter(limits.adapters)):
        raise RequestError(
            f"model={request.lora.name!r}: the prompt has media ({limits.adapters[own - 1]}) for which the base has an "
            "adapter of its own, and a request has one adapter; send the base model's name, or leave the media out"
        )
    if request.sampling.return_routed_experts:
        _check_routed(count, limits)
    if request.media or request.positions is not None:
        _check_media(request, limits)
    if limits.bidirectional:
        _check_spans(request, limits)
    _check_sampling(request.sampling, limits)


def _shortest_or_longest(starts: np.ndarray, n: int, count: int) -> int:
    """Tokens of the longest input; 0 if any input has no tokens."""
    lengths = np.diff(starts)
    if len(lengths) != n or starts[0] != 0 or starts[-1] != count:
        raise RequestError(f"{len(lengths)} inputs with {starts[-1]} tokens for n={n} and {count} tokens")
    return 0 if lengths.min() < 1 else int(lengths.max())


def _check_routed(count: int, limits: Limits) -> None:
    if not limits.has_experts:
        raise RequestError(
            "return_routed_experts: this model's layers have no experts, or run through modules of "
            "transformers that do not report them; leave the field out",
            "return_routed_experts",
        )
    if not limits.routed_experts:
        raise RequestError(
            "return_routed_experts: this server keeps no experts; leave the field out, or start the server with "
            "--enable-return-routed-experts",
            "return_routed_experts",
        )
    if count == limits.max_model_len:
        raise RequestError(
            f"return_routed_experts: the prompt fills the context of {limits.max_model_len} tokens, and the experts of "
            "the answer's first token have no room; shorten the prompt by a token",
            "return_routed_experts",
        )


def _check_media(request: Request, limits: Limits) -> None:
    end, prompt_len = 0, len(request.prompt_token_ids)
    spans = sorted((start, length) for item in request.media for start, length in item.spans)
    for start, length in spans:
        leaves = start >= prompt_len or (start + length > prompt_len and not limits.adds_media)
        if length <= 0 or start < end or leaves:
            raise RequestError(f"media span ({start}, {length}) is empty, overlaps another or leaves the prompt")
        end = start + length
    if end > max(prompt_len, limits.max_model_len):
        raise RequestError(
            f"the media have rows for {end} tokens of prompt and answer; this engine's context is "
            f"{limits.max_model_len} tokens: send less, or raise --max-model-len"
        )
    for item in request.media:
        if item.modality not in limits.modalities:
            raise RequestError(f"this model takes {', '.join(limits.modalities) or 'text only'}, not {item.modality}")
        if item.num_tokens != sum(length for _, length in item.spans):
            raise RequestError(f"{item.modality}: {item.num_tokens} rows for spans of another total")
        if item.num_tokens > limits.encoder_capacity:
            raise RequestError(
                f"{item.modality}: {item.num_tokens} rows; at most {limits.encoder_capacity} fit per item"
            )
        if ROWS in item.features:
            width = limits.hidden_size if item.modality == "prompt" else limits.row_widths.get(item.modality, 0)
            rows = item.features[ROWS]
            if rows.shape != (item.num_tokens, width) or rows.dtype != np.float32:
                raise RequestError(
                    f"{item.modality}: rows are {rows.dtype} {list(rows.shape)}; float32 [{item.num_tokens}, {width}] "
                    "is needed"
                )
    if request.positions is not None and request.positions.shape != (limits.axes, len(request.prompt_token_ids)):
        raise RequestError(
            f"positions have shape {list(request.positions.shape)}; [{limits.axes}, prompt_len] is needed"
        )


def _check_spans(request: Request, limits: Limits) -> None:
    bi_spans = bi_spans_of(request, limits.bidirectional)
    if bi_spans is None:
        return
    longest = int((bi_spans[:, 1] - bi_spans[:, 0]).max())
    if longest > limits.max_bi_span:
        together = "one picture" if limits.bidirectional == "items" else "the prompt"
        raise RequestError(
            f"{longest} tokens that see each other ({together}) are computed in one step, which has room for "
            f"{limits.max_bi_span} of them here; send fewer, or raise --max-num-batched-tokens and --max-prefill-chunk"
        )
    if limits.bidirectional == "prompt" and request.media:
        inside = np.searchsorted(bi_spans[:, 0], [item.spans[0][0] for item in request.media], "right") - 1
        rows = int(np.bincount(inside, [item.num_tokens for item in request.media]).max())
        if rows > limits.encoder_capacity:
            raise RequestError(f"the media have {rows} rows; at most {limits.encoder_capacity} fit into a prompt here")


def _check_sampling(params: SamplingParams, limits: Limits) -> None:
    _in_range("max_tokens", params.max_tokens, 1, 2**31 - 1)
    _in_range("min_tokens", params.min_tokens, 0, params.max_tokens)
    _in_range("temperature", params.temperature, 0.0, 2.0)
    _in_range("top_k", params.top_k, 0, 2**31 - 1)
    _in_range("top_p", params.top_p, 1e-9, 1.0)
    _in_range("min_p", params.min_p, 0.0, 1.0)
    _in_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _in_range("repetition_penalty", params.repetition_penalty, 1e-9, 2.0)
    if any(getattr(params, name) != getattr(PLAIN, name) for name in CHANGING):
        _check_changes(params, limits)
    for token in params.eos_token_ids:
        _in_range("token id", token, 0, limits.vocab_size - 1)


def _check_changes(params: SamplingParams, limits: Limits) -> None:
    """The parameters of `CHANGING`."""
    _check_samplers(params, limits)
    top = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None:
            _in_range(name, asked, -1 if limits.max_logprobs == -1 else 0, top)
    ids = [
        *params.stop_token_ids,
        *(token for token, _ in params.logit_bias),
        *(params.allowed_token_ids or ()),
        *(token for word in params.bad_words for token in word),
        *params.logprob_token_ids,
    ]
    for token in (min(ids), max(ids)) if ids else ():
        _in_range("token id", token, 0, limits.vocab_size - 1)
    for _, value in params.logit_bias:
        _in_range("logit_bias", value, -100.0, 100.0)
    if len(params.edited_token_ids) > MAX_EDITS:
        raise RequestError(
            f"logit_bias and, with min_tokens, stop tokens name {len(params.edited_token_ids)} ids; "
            f"at most {MAX_EDITS} are allowed: name fewer, or use allowed_token_ids",
            "logit_bias",
        )
    if params.allowed_token_ids is not None:
        _check_some_allowed(params, set(params.allowed_token_ids))


def _check_samplers(params: SamplingParams, limits: Limits) -> None:
    """Top-n-sigma, XTC and DRY."""
    _in_range("top_n_sigma", params.top_n_sigma, 0.0, MAX_SIGMA)
    _in_range("xtc_probability", params.xtc_probability, 0.0, 1.0)
    _in_range("xtc_threshold", params.xtc_threshold, 0.0, 1.0)
    _in_range("dry_multiplier", params.dry_multiplier, 0.0, MAX_DRY)
    _in_range("dry_base", params.dry_base, 1.0, MAX_DRY)
    _in_range("dry_allowed_length", params.dry_allowed_length, 1, MAX_HISTORY)
    _in_range("dry_penalty_last_n", params.dry_penalty_last_n, -1, MAX_HISTORY)
    size, needed = len(params.dry_breakers), -(-limits.vocab_size // 8)
    if size not in (0, needed):
        raise RequestError(f"dry_breakers has {size} bytes; a bit per token is needed, {needed} bytes, or none")


def _check_some_allowed(params: SamplingParams, allowed: set[int]) -> None:
    """Raises RequestError if the request's rules allow no token at all: sampling needs at least one candidate."""
    name = "allowed_token_ids"
    if not allowed:
        raise RequestError(f"{name} is empty; name at least one id or leave it out", name)
    left = allowed.difference(params.ending_token_ids if params.min_tokens else ())
    said = _nothing_left_behind(frozenset(left), params.bad_words)
    if said is not None:
        behind = f" behind the tokens {list(said[-8:])}" if said else ""
        raise RequestError(
            f"{name}: bad_words forbid every id that is allowed{behind}, or min_tokens does because all of them end "
            "the answer; allow another one",
            name,
        )


@lru_cache(maxsize=16)  # all prompts of a request have the same arguments
def _nothing_left_behind(allowed: frozenset[int], words: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    """A context, () or the beginning of a word, after which `words` forbid every allowed token; None: there is none."""
    if not allowed.issubset(word[-1] for word in words):
        return None
    # As texts: comparing the ends of the longest list takes 2 ms (14 ms as tuples).
    begun = ["".join(map(chr, word[:-1])) for word in words]
    for said in dict.fromkeys(("", *begun)):
        if allowed.issubset(word[-1] for word, begin in zip(words, begun) if said.endswith(begin)):
            return tuple(map(ord, said))
    return None


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # not a number is in no range
        raise RequestError(f"{name}={value}: allowed is {low} to {high}", name if hasattr(PLAIN, name) else None)
