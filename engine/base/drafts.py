"""DraftConfig: how the next tokens of a row are guessed, so that one step can verify several of them.

In: the object of --speculative-config, in the words of vLLM. Out: a DraftConfig, or a ConfigError that names the key.
Thread: any.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.base import survivals
from engine.base.draft_keys import without_passed
from engine.base.errors import ConfigError

FLAG = "--speculative-config"
MOST_DRAFTS = 64
MOST_LOOKUP = 32  # tokens of a match
MOST_DEPTH = 64  # tokens of a match, for SUFFIX
NGRAM, SUFFIX, EAGLE3, MTP, DRAFT_MODEL = "ngram", "suffix", "eagle3", "mtp", "draft_model"
REPLAY = "replay"  # for measurements: recorded answers, of which a given part is right
HEADS = (EAGLE3, "peagle", "dflash", "dspark")  # drafters over hidden states; their files have the last word on which
BY_FILES = ""  # the files of `model` decide: one of HEADS, or DRAFT_MODEL
METHODS = (NGRAM, SUFFIX, BY_FILES, *HEADS, MTP, DRAFT_MODEL, REPLAY)
WITH_FILES = (BY_FILES, *HEADS, DRAFT_MODEL)
LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
DEPTH, STORED, FACTOR, LEAST = (
    f"suffix_decoding_{name}" for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
)
SAMPLED, LONGEST, RECORDING, OF_HEAD = "draft_sample_method", "max_model_len", "replay_file", "quantization"
OWNERS = {  # the methods of a key that others lack
    **dict.fromkeys(LOOKUP, (NGRAM,)),
    **dict.fromkeys((DEPTH, STORED, FACTOR, LEAST), (SUFFIX,)),
    **dict.fromkeys((SAMPLED, OF_HEAD), (*WITH_FILES, MTP)),
    LONGEST: (BY_FILES, DRAFT_MODEL),
    RECORDING: (REPLAY,),
}
ADAPTIVE, BY_ROWS = "enable_adaptive_verification", "num_speculative_tokens_per_batch_size"
KEYS = ("method", "model", "revision", "num_speculative_tokens", *OWNERS, ADAPTIVE, BY_ROWS, *survivals.KEYS)
GREEDY, PROBABILISTIC = "greedy", "probabilistic"
# Methods of other servers that have no drafter here.
OTHERS = ("eagle", "medusa", "mlp_speculator")
EXAMPLES = '{"method": "ngram", "num_speculative_tokens": 4} or {"model": DRAFTER, "num_speculative_tokens": 3}'


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """How far the continuations of the text's last tokens are followed."""

    depth: int = 24  # most tokens of a match
    factor: float = 1.0  # most drafts for each token of the match
    least_probability: float = 0.1  # of a draft, the share of the places that continue so


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Drafts that copy from the row's own text what followed an earlier place like the newest one, or a drafter's."""

    num_tokens: int  # most drafts of a row in a step; 0: the drafter's files decide
    lookup_min: int = 1  # tokens that must match, at least
    lookup_max: int = 5  # and at most
    method: str = NGRAM  # one of WITH_FILES: a drafter's files; MTP: a layer of the model's own files
    model: str = ""  # the drafter's folder; "": no drafter
    greedy: bool = False  # a drafter's most probable token is the draft; False: drawn with the row's own noise
    suffix: SuffixRules | None = None  # for SUFFIX
    longest: int = 0  # tokens of a row that a draft model computes; 0: as many as its files and the target allow
    adaptive: bool = True  # a step verifies as many drafts as make tokens come fastest; False: all
    small_head: bool = False  # drafts come from an FP8 copy of the head
    by_rows: tuple[tuple[int, int, int], ...] = ()  # (least rows, most rows, most drafts of a row while so many run)
    survivals: tuple[float, ...] = ()  # for measurements: how often drafts are right, by place; see base/survivals
    recording: str = ""  # for REPLAY: the path of the recorded answers

    @property
    def forced(self) -> tuple[float, ...]:
        """The survivals by which drafts count whatever the target chooses; empty: they count if it chooses them."""
        return () if self.method == REPLAY else self.survivals


def draft_config(given: Mapping[str, Any]) -> DraftConfig | None:
    """Reads the object of the flag; an empty object: no drafts. Raises ConfigError."""
    if not given:
        return None
    given = without_passed(FLAG, {key: value for key, value in given.items() if (key, value) != (OF_HEAD, None)})
    found = _drafts(given)
    adaptive = given.get(ADAPTIVE, True)
    if not isinstance(adaptive, bool):
        raise ConfigError(f"{FLAG}: {ADAPTIVE} is {adaptive!r}; give true or false")
    set_rates = survivals.survivals_of(FLAG, given, found.num_tokens, found.method == REPLAY)
    by_rows = _ranges(given.get(BY_ROWS, []), found.num_tokens or MOST_DRAFTS)
    return replace(found, adaptive=adaptive, by_rows=by_rows, survivals=set_rates)


def _ranges(given: Any, most: int) -> tuple[tuple[int, int, int], ...]:
    """Reads [[least rows, most rows, drafts]]; more rows than all ranges, or fewer, have all drafts."""
    found, last = [], 0
    for one in given if isinstance(given, list) else [given]:
        numbers = one if isinstance(one, list) else []
        if len(numbers) != 3 or any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise ConfigError(f"{FLAG}: {BY_ROWS}: {one!r}; give a list of [least rows, most rows, drafts]")
        low, high, drafts = numbers
        if not last < low <= high or not 0 <= drafts <= most:
            raise ConfigError(
                f"{FLAG}: {BY_ROWS}: {one!r}; ranges of rows are from 1 on, ascending, and without overlap, and drafts "
                f"are 0 to {most}"
            )
        found.append((low, high, drafts))
        last = high
    return tuple(found)


def _drafts(given: Mapping[str, Any]) -> DraftConfig:
    """Reads how drafts are made."""
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), KEYS, n=1, cutoff=0.65)
        known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KEYS)}"
        raise ConfigError(f"{FLAG}: unknown key {unknown[0]!r}; {known}")
    model = given.get("model") or ""
    method = given.get("method") or (BY_FILES if model else None)
    if method not in METHODS:
        what = "is not supported" if method in OTHERS else "is unknown"
        got = "method is missing" if method is None else f"method {method!r} {what}"
        raise ConfigError(f"{FLAG}: {got}; there are {', '.join(filter(None, METHODS))}: use {EXAMPLES}")
    if not isinstance(model, str) or (method in WITH_FILES) != bool(model):
        kind = "a small model with the same tokenizer" if method == DRAFT_MODEL else "a drafter for this model"
        wanted = f"names no drafter; give the folder or the repository of {kind}" if method in WITH_FILES else ""
        raise ConfigError(
            f"{FLAG}: model={given.get('model')!r} {wanted or f'is for a drafter; method {method} has none'}"
        )
    check_keys(given, method)
    if method == SUFFIX:
        return _suffix(given)
    if method not in (NGRAM, REPLAY):
        return _drafter(given, method, model)
    number = _number(given, "num_speculative_tokens", None, 1, MOST_DRAFTS)
    if method == REPLAY:
        return DraftConfig(number, method=REPLAY, recording=_recording(given))
    low = _number(given, "prompt_lookup_min", 1, 1, MOST_LOOKUP)
    high = _number(given, "prompt_lookup_max", max(5, low), 1, MOST_LOOKUP)
    if low > high:
        raise ConfigError(f"{FLAG}: prompt_lookup_min {low} is above prompt_lookup_max {high}; lower the first")
    return DraftConfig(number, low, high)


def _recording(given: Mapping[str, Any]) -> str:
    """The path of the recorded answers."""
    path = given.get(RECORDING)
    if not isinstance(path, str) or not path:
        got = "is missing" if path is None else f"is {path!r}"
        raise ConfigError(f"{FLAG}: {RECORDING} {got}; give the path of the recorded answers")
    return path


def check_keys(given: Mapping[str, Any], method: str) -> None:
    """Raises ConfigError for a key of another method; `method`: the one that reads the object."""
    for key in given:
        owners = OWNERS.get(key, (method,))
        if method not in owners:
            raise ConfigError(f"{FLAG}: {key} is for method {' or '.join(filter(None, owners))}; leave it out")


def _drafter(given: Mapping[str, Any], method: str, model: str) -> DraftConfig:
    """Drafts of a drafter's files, or of the model's own."""
    open_number = method in (BY_FILES, *HEADS) and "num_speculative_tokens" not in given
    default, least = (0, 0) if open_number else (None, 1)
    number = _number(given, "num_speculative_tokens", default, least, MOST_DRAFTS)
    how = given.get(SAMPLED, PROBABILISTIC)
    if how not in (GREEDY, PROBABILISTIC):
        raise ConfigError(f"{FLAG}: {SAMPLED} is {how!r}; give {GREEDY!r} or {PROBABILISTIC!r}")
    if (head := given.get(OF_HEAD)) not in (None, "fp8"):
        raise ConfigError(
            f"{FLAG}: {OF_HEAD} is {head!r}: a drafter's weights are as in its files, but for its head; give 'fp8' for "
            "an FP8 copy of the head, or leave it out"
        )
    longest = _number(given, LONGEST, 0, 2 if LONGEST in given else 0, 1 << 30)
    return DraftConfig(
        number, method=method, model=model, greedy=how == GREEDY, small_head=head == "fp8", longest=longest
    )


def _suffix(given: Mapping[str, Any]) -> DraftConfig:
    """Drafts from the row's own text by suffix decoding; the number of drafts follows from the match."""
    if given.get(STORED, 0) != 0:
        raise ConfigError(
            f"{FLAG}: {STORED} is {given[STORED]!r}: drafts come from the request's own text only, because a store of "
            "other requests would show in its timing what others wrote; give 0, or leave it out"
        )
    usual = SuffixRules()
    rules = SuffixRules(
        _number(given, DEPTH, usual.depth, 1, MOST_DEPTH),
        _real(given, FACTOR, usual.factor, 0, MOST_DRAFTS),
        _real(given, LEAST, usual.least_probability, 0, 1),
    )
    number = _number(given, "num_speculative_tokens", 16, 1, MOST_DRAFTS)
    return DraftConfig(number, method=SUFFIX, suffix=rules)


def _real(given: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    """A number of the object."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{FLAG}: {key} is {value!r}; give a number from {low} to {high}")
    return float(value)


def _number(given: Mapping[str, Any], key: str, default: int | None, low: int, high: int) -> int:
    """A whole number of the object; without a default it must be there."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        got = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{FLAG}: {key} {got}; give a whole number from {low} to {high}")
    return value
