"""Log-probabilities in the forms that clients read: of chat, of completions and of prompts.

Owner: the loop. In: TokenLogprob of the engine (raw log-probabilities). Out: plain dicts ready for orjson. JSON has no
infinity, so -inf is written as -9999.0, and NaN never appears. Tokens are written as text, or as `token_id:N` on
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.base.request import TokenLogprob
from server.render.tokenizer import Tokenizer

LOWEST = -9999.0


def finite(value: float) -> float:
    """A number that JSON can hold; NaN fails the comparison too."""
    return value if value >= LOWEST else LOWEST


def num_chars(data: bytes) -> int:
    """Number of characters that begin in these bytes; over the tokens of a text they add up to its length."""
    return len(data) if data.isascii() else sum(byte & 0xC0 != 0x80 for byte in data)


class TokenNames:
    """How tokens are spelled in one request's log-probabilities."""

    __slots__ = ("as_ids", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token as text; bytes that are no character become U+FFFD."""
        return f"token_id:{token_id}" if self.as_ids else self.tokenizer.token_text(token_id)

    def key(self, token_id: int) -> str:
        """The token as a key of a dict, unique even if its bytes are no valid text."""
        if self.as_ids:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # -- chat

    def chat(self, entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
        """`logprobs` of a chat choice or chunk; the `top` likeliest tokens at each place (-1: all)."""
        return {"content": [self._chat_entry(entry, top) for entry in entries]}

    def _chat_entry(self, entry: TokenLogprob, top: int) -> dict[str, Any]:
        most = len(entry.top_ids) if top < 0 else top
        pairs = zip(entry.top_ids[:most], entry.top_logprobs[:most])
        return {
            **self.token(entry.token_id, entry.logprob),
            "top_logprobs": [self.token(token_id, logprob) for token_id, logprob in pairs],
        }

    def token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """One token: `token`, `logprob`, `bytes`."""
        data = self.tokenizer.token_bytes(token_id)
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": list(data)}

    # -- prompt

    def prompt(self, entries: Sequence[TokenLogprob | None], top: int = -1) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: at each place, the `top` likeliest tokens and the prompt's token, by id."""
        return [None if entry is None else self._prompt_entry(entry, top) for entry in entries]

    def _prompt_entry(self, entry: TokenLogprob, top: int) -> dict[str, Any]:
        most = len(entry.top_ids) if top < 0 else top
        found = {str(entry.token_id): self._ranked(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids[:most], entry.top_logprobs[:most]), 1):
            found.setdefault(str(token_id), self._ranked(token_id, logprob, rank))
        return found

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self.tokenizer.token_text(token_id)}


class CompletionLogprobs:
    """`logprobs` of one completion choice, whole or chunk by chunk with a running `text_offset`."""

    __slots__ = ("_names", "_offset", "_show_special", "_top")

    def __init__(self, names: TokenNames, top: int, *, show_special: bool = False, offset: int = 0) -> None:
        self._names = names
        self._top = top
        self._show_special = show_special  # whether special tokens are part of the text
        self._offset = offset

    def add_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Add the echoed prompt, whose first token has no log-probability."""
        out = _empty()
        for token_id, entry in zip(token_ids, entries):
            self._add(out, int(token_id), entry)
        return out

    def add(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Add generated tokens."""
        out = _empty()
        for entry in entries:
            self._add(out, entry.token_id, entry)
        return out

    def _add(self, out: dict[str, Any], token_id: int, entry: TokenLogprob | None) -> None:
        names = self._names
        out["tokens"].append(names.key(token_id))
        out["text_offset"].append(self._offset)
        if self._show_special or not names.tokenizer.is_special(token_id):
            self._offset += num_chars(names.tokenizer.token_bytes(token_id))
        if entry is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            return
        value = finite(entry.logprob)
        most = len(entry.top_ids) if self._top < 0 else self._top
        best = {names.key(i): finite(logprob) for i, logprob in zip(entry.top_ids[:most], entry.top_logprobs[:most])}
        best[names.key(token_id)] = value  # always included, with exactly the same number
        out["token_logprobs"].append(value)
        out["top_logprobs"].append(best)


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two consecutive parts of completion log-probabilities as one."""
    return {key: first[key] + second[key] for key in first}
