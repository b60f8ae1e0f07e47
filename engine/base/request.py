"""The data that the loop and the device thread exchange: Request, and Delta on the way back.

Owner: a Request is made on the loop and never changed afterwards; the device thread reads it.
In: token ids, media features (CPU arrays), sampling rules. Out: Delta objects, one per choice and step.
`_fast` uses none of these classes: the scheduler works on ids, counts and lengths only.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from engine.base.errors import EngineError
    from engine.base.grammar import Grammar

Modality = Literal["image", "audio", "video"]
RowsOf = Literal["image", "audio", "video", "prompt"]  # "prompt": embedding rows in place of text


IDLE = 2**31 - 1  # the priority of requests that run only while no other request needs their place


class FinishReason(enum.IntEnum):
    """Why a choice ended; NONE while it continues. The numbers are shared with `_fast/types.pxd`."""

    NONE = 0
    STOP = 1  # end-of-sequence token
    STOP_TOKEN = 2  # one of the request's stop_token_ids
    LENGTH = 3  # max_tokens or the end of the context
    ABORT = 4
    ERROR = 5
    REPETITION = 6
    COMPLETE = 7  # its grammar allows nothing more; the last token, if there is one, belongs to the answer

    @property
    def wire(self) -> str | None:
        """The word in `finish_reason` that clients receive."""
        return _WIRE[self]


_WIRE = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.REPETITION: "repetition",
    FinishReason.COMPLETE: "stop",
}


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """Whisper's rules for timestamps in a text: ids from `first` on are times, ids from `end` on are not text."""

    first: int
    end: int
    latest_start: int  # the largest first time, in steps after `first`


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """The settings of DRY, top-n-sigma and XTC, which engine/kernels/sampling/{dry,top_n_sigma,xtc} define."""

    top_n_sigma: float = 0.0  # standard deviations of the logits below the largest logit
    xtc_probability: float = 0.0  # of each token
    xtc_threshold: float = 0.1  # least probability of the tokens that XTC may exclude; above 0.5 there are none
    dry_multiplier: float = 0.0  # penalty of a repetition of dry_allowed_length tokens
    dry_base: float = 1.75  # factor of the penalty for each further token
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # last tokens of the text in which repetitions are found; -1: as many as possible
    dry_breakers: bytes = b""  # the tokens at which repetitions end: token t is bit t % 8 of byte t // 8


@dataclass(frozen=True, slots=True)
class SamplingParams(Samplers):
    """Sampling settings of one request. All values are resolved and in range (checked at the HTTP edge).

    Order of operations: logit_bias, allowed ids, bad words, min_tokens, mask -> penalties -> DRY -> top_n_sigma
    -> temperature -> min_p -> top_k -> top_p -> XTC -> draw. temperature 0 is greedy; top_k 0, top_p 1, min_p 0,
    dry_multiplier 0, top_n_sigma 0 and xtc_probability 0 are off.
    """

    max_tokens: int = 16  # tokens to generate at most, >= 1; the engine caps it to the context
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    seed: int | None = None  # int64; None draws one
    eos_token_ids: tuple[int, ...] = ()  # end-of-sequence ids of the model
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # EOS and stop tokens are masked until min_tokens tokens are generated
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    not_first_token_ids: tuple[int, ...] = ()  # forbidden only as the answer's first token
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    timestamps: TimestampRules | None = None
    logprobs: int | None = None  # None off; k >= 0: the sampled token's and the k most likely; -1 all
    logprob_token_ids: tuple[int, ...] = ()  # reported at each place of the answer and of prompt_logprobs
    prompt_logprobs: int | None = None  # as logprobs, for each prompt position
    return_routed_experts: bool = False  # the last Delta of a choice brings the experts of its tokens
    return_progress: bool = False  # each step of the prompt brings a Progress

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return self.stop_token_ids if self.ignore_eos else (*self.eos_token_ids, *self.stop_token_ids)

    @property
    def edited_token_ids(self) -> set[int]:
        """The ids whose logits change individually: by a bias, by min_tokens, or for the first token."""
        ending = self.ending_token_ids if self.min_tokens else ()
        return {token for token, _ in self.logit_bias} | {*ending, *self.not_first_token_ids}


@dataclass(frozen=True, slots=True)
class MediaInput:
    """One picture, audio or video, processed on the CPU, ready for its tower; or a client's own rows (`ROWS`).

    `spans` are (start, length) runs of prompt positions, ascending and disjoint. In order, they take the `num_tokens`
    rows that the tower makes for this item. A video's audio uses several runs. `hash` (16 bytes) identifies the content
    together with the processor settings; the server computes it and never takes it from a client. If the model adds
    media rows to token embeddings, a growing audio keeps its hash, because its first rows do not change.
    """

    modality: RowsOf
    hash: bytes
    spans: tuple[tuple[int, int], ...]
    num_tokens: int
    features: dict[str, np.ndarray]  # arrays by the names the tower documents


# The feature of an item that needs no tower: float32 [num_tokens, width], the tower's output. The key is not "rows",
# because pixel features use that name.
ROWS = "given rows"
ADAPTER = "adapter"  # int64, added at admission: the number of the request's adapter, if the model has adapters


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """The inputs of a pooling request, which gets an array for each input: choice k is input k."""

    starts: np.ndarray  # int64 [n + 1]: offset of each input in the request's token ids, and the end of the last input
    seconds: np.ndarray | None = None  # int32 [n]: offset in each input of the second text of a pair; 0: no pair
    pool_starts: np.ndarray | None = None  # int32 [n]: the first token of each input that pooling includes
    per_token: bool = False  # a result row for every token; else one row per input
    adapters: np.ndarray | None = None  # int32 [n]: the number of each input's adapter, from 1; 0: no adapter


class Flow(NamedTuple):
    """The client of a request: requests of one client wait in one queue, and the queues are served in turn."""

    name: str = ""
    weight: int = 1  # the share of the queue


NO_FLOW = Flow()


class NamedAdapter(Protocol):
    """An adapter that a request chooses by name (engine/lora/adapter.py), without its matrices."""

    @property
    def name(self) -> str:
        """The name at the time of the load."""

    @property
    def sha256(self) -> bytes:
        """32 bytes that identify the content."""

    @property
    def in_towers(self) -> bool:
        """Whether the adapter changes the rows of media."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way to the device thread; `sampling` applies to each of its `n` choices.

    With `pooling` the request holds n inputs, concatenated in prompt_token_ids, and generates no tokens.
    """

    prompt_token_ids: np.ndarray  # int32 [prompt_len], media placeholders already widened
    sampling: SamplingParams
    media: tuple[MediaInput, ...] = ()
    positions: np.ndarray | None = None  # int32 [axes, prompt_len] for M-RoPE; None: 0, 1, 2 ...
    position_delta: int = 0  # position of token i >= prompt_len is i + position_delta
    n: int = 1  # choices; choice k uses seed + k
    priority: int = 0  # lower first; IDLE: behind all others, under every policy
    cache_salt: bytes = b""  # scope (key) and salt; requests share cached prefixes only when equal
    arrival: float = 0.0  # time.monotonic() seconds
    grammar: Grammar | None = None  # the grammar of the answers; each choice gets its own matcher
    pooling: PoolingParams | None = None
    flow: Flow = NO_FLOW
    deadline: float = math.inf  # latest time of the first step, on the clock of `arrival`
    boundaries: tuple[int, ...] = ()  # at most 8 positions of the prompt after which other requests may differ
    lora: NamedAdapter | None = None  # the adapter that the request chose by name

    @property
    def is_masked(self) -> bool:
        """Whether every step masks the tokens of this request's choices."""
        return self.grammar is not None

    @property
    def late_extras(self) -> tuple[str, ...]:
        """Names of extras that arrive separately, after the last token of a choice has been computed."""
        return ("routed_experts",) if self.sampling.return_routed_experts else ()

    def adapter(self, adapters: Sequence[str]) -> int:
        """The number of the input's adapter, or of the first adapter for a modality in the request's media; 0: none."""
        if self.pooling is not None and self.pooling.adapters is not None:
            return int(self.pooling.adapters[0])
        visible = {item.modality for item in self.media}
        return next((number for number, media in enumerate(adapters, 1) if media in visible), 0)

    def input(self, k: int) -> Request:
        """Input k of a request with `pooling`, as a separate request."""
        assert self.pooling is not None
        start, end = self.pooling.starts[k : k + 2].tolist()
        seconds, counted, adapters = (
            None if column is None else column[k : k + 1]
            for column in (self.pooling.seconds, self.pooling.pool_starts, self.pooling.adapters)
        )
        own = PoolingParams(np.array([0, end - start]), seconds, counted, self.pooling.per_token, adapters)
        media = tuple(
            replace(item, spans=tuple((first - start, length) for first, length in item.spans))
            for item in self.media
            if start <= item.spans[0][0] < end
        )
        positions = None if self.positions is None else self.positions[:, start:end]
        ids = self.prompt_token_ids[start:end]
        return replace(self, prompt_token_ids=ids, media=media, positions=positions, n=1, pooling=own)


class Progress(NamedTuple):
    """How far the computation of a prompt is after a step."""

    total: int  # tokens of the prompt
    cached: int  # of them, tokens found in the prefix cache
    computed: int  # tokens that are computed, with the cached ones
    seconds: float  # since the start of the prompt's first step


@dataclass(slots=True)
class TokenLogprob:
    """Log-probabilities at one position: of the token itself, and of the most likely ones (descending)."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class Delta:
    """The tokens that one step, or several if the reader was slow, adds to one choice of a request."""

    index: int  # choice, 0 .. n-1
    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None  # set with STOP_TOKEN
    logprobs: list[TokenLogprob] | None = None  # one entry per token id
    cached_tokens: int | None = None  # on the first delta of choice 0: prompt tokens found in the prefix cache
    queued: float | None = None  # on the first delta of a choice: seconds from arrival to its first step
    error: EngineError | None = None  # with ERROR
    extras: dict[str, Any] = field(default_factory=dict)  # name -> value added by a step part (engine/step/parts)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Log-probabilities of the prompt; on the first delta of choice 0, if the request wants them."""
        return self.extras.get("prompt_logprobs")

    @property
    def encode_s(self) -> float:
        """On the first delta: seconds that towers spent on media that no earlier request named."""
        found: float = self.extras.get("encode_s", 0.0)
        return found

    @property
    def routed_experts(self) -> np.ndarray | None:
        """On the last delta, if the request wants them: [tokens, layers with experts, top_k], where the tokens are the
        prompt's and at least the choice's."""
        return self.extras.get("routed_experts")

    @property
    def progress(self) -> Progress | None:
        """How far the prompt is; on deltas of choice 0 up to the first token, if the request wants it."""
        return self.extras.get("progress")

    @property
    def pooled(self) -> np.ndarray | None:
        """The result of a pooled input: float32 [width], or [tokens, width]."""
        return self.extras.get("pooled")
