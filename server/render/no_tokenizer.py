"""NoTokenizer: replaces the tokenizer with --skip-tokenizer-init: ids in, ids out, no texts.

Owner: any thread. In: the number of the model's tokens. Out: every id's text is empty; a text is refused with 400.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from _fast.detok import TokenTable
from server.render.errors import RenderError
from server.render.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Ids without texts."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__({}, {}, {}, TokenTable(b"", np.zeros(num_tokens + 1, np.int32), bytes(num_tokens)))

    def require_texts(self, param: str) -> NoReturn:
        raise RenderError(
            400,
            "no_tokenizer",
            f"{param} needs a tokenizer, and this server was started with --skip-tokenizer-init: it takes token ids "
            "and answers with token ids; send /v1/completions a list of ids and return_token_ids, or use "
            "/inference/v1/generate.",
            param,
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.require_texts("this text")

    def encode_segments(self, segments: Iterable[tuple[str, bool]], add_special_tokens: bool = False) -> list[int]:
        self.require_texts("this text")

    def token_of(self, token_id: int) -> None:
        return None

    def id_of(self, token: str) -> None:
        return None

    @property
    def special_spellings(self) -> list[str]:
        return []
