"""MediaPreload: loads the media embedded in a conversation while its text is still being rendered and tokenized.

Owner: loop. Only media inside the request are loaded so early: nothing is fetched for a request that may yet be
refused. Rendering waits until a first decoder runs, because decoders release the GIL while a template holds it: base64
and hashes that run next to a template wait half a millisecond each time they need the GIL. Leaving the `async with`
block cancels an unneeded load. If the text cannot be rendered, its error is raised first, as if loading had not begun.

    loop   | glance at the messages | begin             | render           | splice | load: awaits it
    pool                                    | base64, hash | decode ...
    pool                                                | template, tokenize |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mm.item import MediaOptions, MediaRef, Processed
from mm.report import MediaReport

if TYPE_CHECKING:
    from mm.load import MediaLoader


class MediaPreload:
    """The media of one request."""

    def __init__(self, loader: MediaLoader | None, scope: bytes, options: MediaOptions | None) -> None:
        self._loader = loader
        self._scope = scope
        self._options = options
        self._begun: Sequence[MediaRef] = ()
        self.report = MediaReport()
        self._loading: asyncio.Task[list[Processed]] | None = None

    async def begin(self, refs: Sequence[MediaRef]) -> None:
        """Start loading the media found in the messages, in order; returns when a first decoder runs.

        It also returns if the load has ended, waits for a permit to decode, or is not the only load.
        """
        if refs and self._loader is not None and all(ref.embedded for ref in refs):
            self._begun = tuple(refs)
            loop = asyncio.get_running_loop()
            decoding: asyncio.Future[None] = loop.create_future()
            self._loading = loop.create_task(self._load(refs, decoding))
            self._loading.add_done_callback(partial(_loaded, decoding))
            await decoding

    async def _load(self, refs: Sequence[MediaRef], decoding: asyncio.Future[None] | None = None) -> list[Processed]:
        assert self._loader is not None, "the renderer refuses media that the model does not take"
        return await self._loader.load(
            refs, options=self._options, scope=self._scope, decoding=decoding, report=self.report
        )

    async def load(self, refs: Sequence[MediaRef]) -> list[Processed]:
        """The prompt's items. An earlier `begin` with the same references has already started loading them."""
        if self._loading is not None and self._begun == tuple(refs):
            return await self._loading
        return await self._load(refs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._loading is not None:
            loading, self._loading = self._loading, None  # breaks the cycle of task, error and pixels
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


def _loaded(decoding: asyncio.Future[None], _: object) -> None:
    """The load has ended: rendering need not wait for a decoder any more."""
    if not decoding.done():
        decoding.set_result(None)
