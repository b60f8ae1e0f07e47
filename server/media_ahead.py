"""MediaAhead: what a conversation embeds is loaded while its text is still rendered and tokenized.

Owner: loop. Only what came with the request begins so early: nothing is fetched for one that may yet be refused. It is
in the pool before the text is: a template holds the interpreter, and whoever wakes up beside one waits for half a
millisecond. Leaving (`async with`) ends what nobody awaits any more; the error of a text that cannot be rendered comes
first, as if the media had waited.

    loop   | glance at the messages | begin | render           | load: awaits it
    pool                                    | base64, hash, decode ...
    pool                                    | template, tokenize |
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
        self._begun: Sequence[MediaRef] = ()
        self._loading: asyncio.Task[list[Processed]] | None = None

    async def begin(self, refs: Sequence[MediaRef]) -> None:
        """Loads what the messages were seen to hold, in order; the first of it is in the pool when this returns."""
        if refs and self._loader is not None and all(ref.embedded for ref in refs):
            self._begun = tuple(refs)
            self._loading = asyncio.get_running_loop().create_task(self._load(refs))
            await asyncio.sleep(0)  # the task's turn

    async def _load(self, refs: Sequence[MediaRef]) -> list[Processed]:
        assert self._loader is not None, "the renderer refuses media that the model does not take"
        return await self._loader.load(refs, options=self._options, scope=self._scope)

    async def load(self, refs: Sequence[MediaRef]) -> list[Processed]:
        """The prompt's items; begun already if they are those seen."""
        if self._loading is not None and self._begun == tuple(refs):
            return await self._loading
        return await self._load(refs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
