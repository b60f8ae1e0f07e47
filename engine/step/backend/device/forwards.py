"""Forwards: the forwards of an engine's ranks. RankForward is what every rank launches; most engines have one rank.

Owner: device thread; its Group has a thread that launches each further rank. Rank 0 (forward.py: DeviceForward) chooses
the tokens, and has the drafter of a server with drafts. FollowingForward sends its logits to rank 0 and takes the
tokens from it, and before the forward of a step with drafts the guesses of each pass of the drafter:

    rank 0    prep | pass -> all ranks | forward | logits, others' logits, choice | tokens to all ranks | tokens home
    rank r    prep | guesses -> step   | forward | logits to rank 0 ..............| tokens -> slots

All ranks read the same record, so a step is planned once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from _fast.layout import GraphKind
from _fast.plan import StepPlan
from engine.layers.batch import Batch
from engine.models.base.decoder import Decoder
from engine.parallel.group import Group
from engine.parallel.model import SplitModel
from engine.step.backend.device.buffers import StepBuffers
from engine.step.rank import Rank
from engine.step.sizes import Sizes
from engine.step.step import Media

Made = TypeVar("Made")


class RankForward(ABC):
    """One rank's part of each step; its launches are recorded as graphs at start."""

    def __init__(self, rank: Rank, sizes: Sizes, buffers: StepBuffers) -> None:
        self.rank, self.buffers, self._sizes = rank, buffers, sizes
        self._model, whole = rank.own, rank.model
        self._link = whole.group.links[rank.number] if isinstance(whole, SplitModel) else None
        own = self._model
        self._column = own.head.span[0] if isinstance(own, Decoder) and own.head is not None else 0

    def decode(self, rows: int, variant: int = 0) -> None:
        """A whole step of up to `rows` rows that all sample: prep, forward, sampling. Hidden states are not copied."""
        self.buffers.prep(self._drafts(variant))
        batch = self.buffers.batch(rows, rows, True, [], variant)
        self._choose(self._model.forward(batch), batch.adapters, variant)  # each row is one token

    def forward_into(self, kind: int, tokens: int, variant: int = 0) -> None:
        """A forward of `tokens` padded tokens; copies the hidden states of its sampled rows to `sampled_hidden`."""
        rows = min(tokens, self._sizes.max_rows)
        batch = self.buffers.batch(tokens, rows, kind == GraphKind.DECODE, [], variant)
        self._keep_sampled(batch, rows if kind == GraphKind.DECODE else min(tokens, self._sizes.max_lines))

    def draft_into(self, kind: int, rows: int) -> None:
        """A pass of a drafter over at most so many rows with drafts."""
        self.buffers.draft(kind, rows)
        if self._link is not None:
            self._link.share_guesses(self.buffers.inputs)

    def abridged_into(self, kind: int, tokens: int, variant: int = 0) -> None:
        """`forward_into` with a tenth of the launches, which loads every kernel."""
        with self._model.abridged():
            self.forward_into(kind, tokens, variant)

    def eager(
        self, plan: StepPlan, decodes: bool, whole: bool, media: list[Media], variant: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """A forward without a graph; `whole`: returns the hidden states of all tokens, and their adapters."""
        batch = self.buffers.batch(plan.num_tokens, plan.num_rows, decodes, media, variant)
        if not whole:
            self._keep_sampled(batch, plan.num_lines)
            return None, None
        hidden = self._model.forward(batch)  # [num_tokens, hidden_size]
        self._gather_sampled(hidden, plan.num_lines)
        return hidden, batch.adapters

    def choose_into(self, lines: int, variant: int = 0) -> None:
        """Samples a token for each of the first `lines` lines; lines beyond the step's own are padding."""
        buffers = self.buffers
        self._choose(buffers.sampled_hidden[:lines], buffers.sampled_adapters(lines, variant), variant)

    def largest(self) -> None:
        """Runs the step with the largest memory: all tokens' hidden states, as in eager steps, and all rows sample."""
        sizes = self._sizes
        rows = min(sizes.max_tokens, sizes.max_rows)
        variants = self.buffers.variants
        self._model.forward(self.buffers.batch(sizes.max_tokens, rows, False, [], variants.forward | variants.scan))
        for kind in self.buffers.pass_kinds:
            self.draft_into(kind, rows)
        self.choose_into(sizes.max_lines, self.buffers.variants.drafting)

    @abstractmethod
    def warm_up(self) -> None:
        """Launches every kernel for rows with rules."""

    @abstractmethod
    def end_choice(self, lines: int, variant: int) -> None:
        """After the choice of tokens for `lines` lines of `sampled_hidden`: every rank gets the tokens."""

    @abstractmethod
    def _choose(self, hidden: Tensor, adapters: Tensor | None, variant: int) -> None:
        """Samples tokens from hidden states [lines, hidden_size]."""

    def _logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """On rank 0 the logits of the whole vocabulary."""
        logits = self._model.logits(hidden, adapters)
        return logits if self._link is None else self._link.gather(logits, self._column)

    def _drafts(self, variant: int) -> bool:
        """Whether the rows of steps of this variant may have drafts."""
        return self._sizes.width > 1 and self.buffers.drafts_in(variant)

    def _share_tokens(self) -> None:
        if self._link is not None:
            self._link.share(self.buffers.inputs, self.buffers.slots.tensors)

    def _keep_sampled(self, batch: Batch, count: int) -> None:
        """Runs the forward and stores the hidden states of the first `count` lines (`count` <= tokens)."""
        if count == len(batch.token_ids):  # no token can be left out: one gather at the end costs less than two before
            self._gather_sampled(self._model.forward(batch), count)
            return
        buffers = self.buffers
        batch.sample_index = buffers.inputs.sample_index[:count]
        batch.num_sampled = buffers.inputs.num_sampled
        self._model.forward(batch, buffers.sampled_hidden[:count])

    def _gather_sampled(self, hidden: Tensor, count: int) -> None:
        """Copies hidden states of the first `count` lines out of `hidden` [tokens, hidden_size]."""
        buffers = self.buffers
        torch.index_select(hidden, 0, buffers.inputs.sample_index[:count], out=buffers.sampled_hidden[:count])


class FollowingForward(RankForward):
    """The forward of a rank that chooses no tokens."""

    def warm_up(self) -> None:
        self._logits(self.buffers.sampled_hidden[:1])

    def end_choice(self, lines: int, variant: int) -> None:
        self._share_tokens()

    def _choose(self, hidden: Tensor, adapters: Tensor | None, variant: int) -> None:
        self._logits(hidden, adapters)
        self._share_tokens()


class Following(Protocol):
    """The part of a rank behind the first that every kind of step has."""

    buffers: StepBuffers


class Forwards:
    """The forwards of all ranks, and the ways to launch on every rank."""

    def __init__(self, first: Any, following: Sequence[Following] = (), group: Group | None = None) -> None:
        """`first`: the forward of rank 0, a RankForward if there are several ranks."""
        self.first, self.following, self._group = first, following, group
        self._all = [first, *following]

    def run(self, body: Callable[[Any], Made]) -> list[Made]:
        """The results of body(forward), launched on every rank."""
        if self._group is None:
            return [body(self.first)]
        return self._group.run(lambda rank: body(self._all[rank]))

    def in_turn(self, body: Callable[[Any], Made]) -> list[Made]:
        """The results of body(forward), which waits for no other rank: one rank after the other, each on its thread."""
        if self._group is None:
            return [body(self.first)]
        return [self._group.on(rank, partial(body, forward)) for rank, forward in enumerate(self._all)]

    def capture(self, body: Callable[[Any], None], met: bool = False) -> list[int]:
        """The handles of body(forward), recorded on every rank; `met`: the body has run before on all ranks."""
        if self._group is None:
            return [self.first.buffers.accelerator.capture(partial(body, self.first), met)]
        if not met:
            self.run(body)
        return self.in_turn(lambda own: own.buffers.accelerator.capture(partial(body, own), met=True))

    def ready(self) -> None:
        """The start has ended: from now on the ranks' kernels wait for each other."""
        if self._group is not None:
            self._group.ready()

    def copies_of(self, media: list[Media]) -> list[list[Media]]:
        """Rows of media on every rank."""
        if self._group is None or not media:
            return [media for _ in self._all]
        copies = [self._group.copies_of(rows) for *_, rows in media]
        return [
            [(start, length, rows[rank]) for (start, length, _), rows in zip(media, copies)]
            for rank in range(len(self._all))
        ]

    @contextmanager
    def overlaid(self, media: list[Media]) -> Iterator[None]:
        """StepBuffers.overlaid of every rank."""
        with ExitStack() as stack:
            for forward, rows in zip(self._all, self.copies_of(media)):
                stack.enter_context(forward.buffers.overlaid(rows))
            yield
