"""DrafterSteps: the launches of a drafter inside the target's steps; engine/step/parts/drafter owns the object.

Owner: device thread at start; then the stream, in step order. In: the batch of each forward, its rows, the target's
streams, the chosen tokens. Out: drafts, in the step's token ids and in the slots.

    step n    | guesses: k passes of the drafter | forward: streams -> features -> entries | choice, verified |
                ^ feature of the token before        ^ read by later steps                   | feature of the slot
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta, WorkList
from engine.cache.spec import LayerCache
from engine.kernels.attention.tiles import stripe_of
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.kernels.drafts_features import Features, accept_features, features_before, keep_features
from engine.kernels.drafts_places import draft_places, empty_places, put_drafts
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch
from engine.layers.stream import Stream
from engine.models.base.decoder import Decoder
from engine.models.drafters.base import FIRST_ENTRY, DraftModel
from engine.step.parts.drafter_load import Guess
from engine.step.rank import Rank
from engine.step.sizes import MOST_CUT, Sizes
from engine.step.step import Chosen


class DrafterSteps:
    """The features of live slots and of blocks, and what reads and writes them."""

    def __init__(self, drafter: DraftModel, rank: Rank, sizes: Sizes, group: int, guess: Guess) -> None:
        """`group`: of the cache, the drafter's."""
        self._drafter, self._rank, self._sizes, self._group, self._guess = drafter, rank, sizes, group, guess
        width, dtype, place = drafter.text.hidden_size, drafter.dtype, rank.device
        self._newest = torch.zeros(sizes.max_tokens, width, dtype=dtype, device=place)  # features of the newest step
        self._of_slots = torch.zeros(sizes.max_slots + 1, width, dtype=dtype, device=place)
        self._starts = torch.arange(sizes.max_rows + 1, dtype=torch.int32, device=place)
        self._caches: list[LayerCache]
        self._held: Features
        self._work: WorkList | None = None  # of the passes over the newest tokens
        self._entry_work: WorkList | None = None  # of the entries of all tokens, if these attend to each other
        self._rows: DraftedRows  # of the newest step

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """Allocates what depends on the size of the cache; `caches`: the drafter's."""
        text, sizes, place = self._drafter.text, self._sizes, self._rank.device
        self._caches = list(caches)
        of_blocks = torch.zeros(num_blocks, text.hidden_size, dtype=self._drafter.dtype, device=place)
        self._held = Features(self._of_slots, of_blocks, sizes.block_size)
        if self._rank.accelerator is not None:
            self._work = self._list(num_blocks, 1)
            if len(caches) > 1:
                self._entry_work = self._list(num_blocks, min(MOST_CUT, 1 + sizes.num_drafts))

    def _list(self, num_blocks: int, most: int) -> WorkList:
        """An empty work list for attention of the drafter's heads; `most`: queries of rows that are cut into parts."""
        text, sizes = self._drafter.text, self._sizes
        group = text.num_heads // text.num_kv_heads
        stripes = sizes.max_rows * -(-most // stripe_of(group, most))
        parts = max_parts(num_blocks, sizes.block_size, stripes)
        shape = sizes.max_tokens if most > 1 else sizes.max_rows, parts, text.num_heads, text.head_dim
        return empty_list(stripes, *shape, self._rank.device, most_cut=most, group=group)

    def begin(self, batch: Batch, rows: DraftedRows) -> None:
        """Replaces the step's drafts by new guesses, in its token ids and in the slots."""
        self._rows = rows
        if not rows.most:
            return
        found, text = batch.attention[self._group], self._drafter.text
        places = empty_places(self._sizes.num_drafts, rows.most, batch.token_ids.device)
        draft_places(places, rows, found.slot_mapping)
        starts = self._starts[: rows.most + 1]
        own = rows._replace(slots=places.slot, query_start=starts, context_len=places.context[0], lines=places.line)
        feature = features_before(self._newest[: rows.most], self._held, own, found.block_tables)
        for j in range(self._sizes.num_drafts):
            context, mapping = places.context[j], places.mapping[j]
            meta = AttentionMeta(
                starts, context, found.block_tables, mapping, self._work, places.line, None, FIRST_ENTRY, True
            )
            if self._work is not None:
                fill_list(self._work, meta, text.num_heads // text.num_kv_heads)
            token = places.token[j]
            ids, at = batch.token_ids.index_select(0, token), batch.positions.index_select(-1, token)
            logits, feature = self._drafter.step(ids, feature, at, meta, self._caches)
            guesses = self._guess(logits, places.slot, places.run[j], places.place[j])
            put_drafts(rows.state, batch.token_ids, guesses, places, j)

    def enter(self, batch: Batch, streams: list[Tensor]) -> None:
        """Writes the drafter's entries of the step's tokens; streams: of the target, each [T, hidden]."""
        found, rows = batch.attention[self._group], self._rows
        features = self._newest[: len(batch.token_ids)]
        features.copy_(self._drafter.feature(streams))
        before = features_before(features, self._held, rows, found.block_tables)
        keep_features(features, self._held, rows, found.slot_mapping)
        if len(self._caches) > 1:
            found = replace(found, work=self._entry_work, last_keys=None, first_key=FIRST_ENTRY)
            if self._entry_work is not None:
                text = self._drafter.text
                fill_list(self._entry_work, found, text.num_heads // text.num_kv_heads)
        self._drafter.store(batch.token_ids, before, batch.positions, found, self._caches)

    def accept(self, chosen: Chosen) -> None:
        """After the choice: stores the feature of the token before each row's newest token."""
        runs, rows = chosen.runs, self._rows
        if len(runs) != len(rows.drafts):  # on a host: runs of the rows that sample
            runs = runs.new_full((len(rows.drafts), runs.shape[1]), -1)
            runs[rows.drafts >= 0] = chosen.runs
        accept_features(self._held, rows, self._newest, runs)


class DrafterHook:
    """Collects the streams that the drafter reads, inside a forward of the target."""

    def __init__(self, steps: Callable[[], DrafterSteps], model: Decoder, streams: Sequence[int]) -> None:
        """`steps`: known once the drafter has started. `streams`: n is the input of layer n, the output of n - 1."""
        self._steps, self._model, self._streams = steps, model, streams
        self._batch: Batch
        self._found: dict[int, Tensor] = {}
        self._last = 0  # the last layer whose output is read

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        """See LayerHook."""
        assert rows is not None, "the server has drafts"
        self._batch, self._found = batch, {}
        # A forward that leaves layers out computes no results, but runs every kernel.
        self._last = max(number for number in range(max(self._streams)) if self._model.is_run(number))
        batch.whole |= self._last == len(self._model.layers) - 1
        self._steps().begin(batch, rows)

    def after_layer(self, number: int, x: Stream) -> None:
        """See LayerHook."""
        if number > self._last:
            return
        if number + 1 in self._streams:
            self._found[number + 1] = x.rows().clone()
        if number == self._last:
            rows = x.rows()
            self._steps().enter(self._batch, [self._found.get(stream, rows) for stream in self._streams])
            self._found = {}
