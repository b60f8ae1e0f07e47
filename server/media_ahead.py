"""MediaAhead: what a conversation embeds is loaded while its text is still rendered and tokenized.

Owner: loop; `found` alone is called in the pool, when the messages have been read. Only what came with the request
begins so early: nothing is fetched for one that may yet be refused. Leaving (`async with`) ends what nobody awaits any
more; the error of a text that cannot be rendered comes first, as if the media had waited.

    pool   | read messages | template, tokenize |
    pool                   | base64, hash | decode ...
    loop                                        | load: awaits it
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mm.item import MediaOptions, MediaRef, Processed

if TYPE_CHECKING:
    from mm.load import MediaLoader


class MediaAhead:
    """Of one request."""

    def __init__(self, loader: MediaLoader | None, scope: bytes, options: MediaOptions | None) -> None:
        self._loader = loader
        self._scope = scope
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._left = False
        self._loading: asyncio.Task[list[Processed]] | None = None

    def found(self, refs: Sequence[MediaRef]) -> None:
        """The messages' items, in order (pool)."""
        if refs and all(ref.embedded for ref in refs):
            self._loop.call_soon_threadsafe(self._begin, tuple(refs))

    def _begin(self, refs: Sequence[MediaRef]) -> None:
        if not self._left and self._loader is not None:
            self._loading = self._loop.create_task(self._load(refs))

    async def _load(self, refs: Sequence[MediaRef]) -> list[Processed]:
        assert self._loader is not None, "the renderer refuses media that the model does not take"
        return await self._loader.load(refs, options=self._options, scope=self._scope)

    async def load(self, refs: Sequence[MediaRef]) -> list[Processed]:
        """The prompt's items, which are those found."""
        return await (self._loading or self._load(refs))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._left = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
