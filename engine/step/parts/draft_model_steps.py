"""DraftModelSteps: the launches of a draft model inside the target's steps; engine/step/parts/draft_model owns it.

Owner: device thread at start; then the stream, in step order. In: the batch of each forward and its rows. Out: drafts,
in the step's token ids and in the slots, and the small model's keys and values of all tokens of the step.

    step n    | drafts: k passes over rows that decode | all tokens: keys and values | the target's forward | choice |
                pass j computes draft j, guesses j + 1   prompts, drafts, new tokens

The last part makes every token's keys and values true before a later step reads them: those of prompts, of rows
without drafts, and of the last draft, which no pass has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from _fast.layout import SlotWord
from engine.attention.meta import AttentionMeta, WorkList
from engine.cache.spec import LayerCache
from engine.kernels.attention.tiles import stripe_of
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.kernels.drafts_places import DraftPlaces, Queries, draft_places, empty_places, put_drafts
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch
from engine.layers.stream import Stream
from engine.models.drafters.draft_model import Geometry, SmallDecoder
from engine.step.parts.drafter_load import Guess
from engine.step.rank import Rank
from engine.step.sizes import MOST_CUT, Sizes
from engine.step.step import Chosen


class DraftModelSteps:
    """The small model's caches and work lists, and what reads and writes them."""

    def __init__(self, drafter: SmallDecoder, rank: Rank, sizes: Sizes, groups: Sequence[int], guess: Guess) -> None:
        """`groups`: of the cache, by the small model's layers."""
        self._drafter, self._rank, self._sizes, self._guess = drafter, rank, sizes, guess
        kinds = list(zip(groups, drafter.geometries))
        self._kinds = list(dict.fromkeys(kinds))  # layers of a kind read the same rows by the same lists
        self._kind_of = [self._kinds.index(kind) for kind in kinds]
        self._starts = torch.arange(sizes.max_rows + 1, dtype=torch.int32, device=rank.device)
        self._caches: list[LayerCache] = []
        self._work: dict[Geometry, WorkList] = {}  # on an accelerator

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """Allocates what depends on the size of the cache; `caches`: the small model's."""
        self._caches = list(caches)
        if self._rank.accelerator is not None:
            self._work = {kind: self._list(kind, num_blocks) for kind in dict.fromkeys(self._drafter.geometries)}

    def _list(self, kind: Geometry, num_blocks: int) -> WorkList:
        """An empty work list for any step."""
        sizes, most, group = self._sizes, min(MOST_CUT, 1 + self._sizes.num_drafts), kind.num_heads // kind.num_kv_heads
        stripes = sizes.max_rows * -(-most // stripe_of(group, most))
        parts = max_parts(num_blocks, sizes.block_size, stripes)
        shape = kind.num_heads, kind.head_dim
        return empty_list(stripes, sizes.max_tokens, parts, *shape, self._rank.device, most_cut=most, group=group)

    def begin(self, batch: Batch, rows: DraftedRows) -> None:
        """Replaces the step's drafts by new guesses, in its token ids and in the slots, and computes all tokens."""
        positions = self._drafter.places(batch.positions)
        with self._abridged():
            if rows.most:
                self._draft(batch, rows, positions)
            metas = [replace(batch.attention[group], last_keys=None) for group, _ in self._kinds]
            step = self._batch(batch.token_ids, positions, metas)
            step.num_tokens = batch.num_tokens
            self._drafter.store(step)

    def _draft(self, batch: Batch, rows: DraftedRows, positions: torch.Tensor) -> None:
        """One pass for each draft of a row."""
        places = {group: self._places(batch, rows, group) for group, _ in self._kinds}
        first = places[self._kinds[0][0]]
        starts = self._starts[: rows.most + 1]
        for j in range(self._sizes.num_drafts):
            metas = [
                AttentionMeta(
                    starts,
                    first.context[j],
                    batch.attention[group].block_tables,
                    places[group].mapping[j],
                    table_row=first.line,
                    decode_only=True,
                )
                for group, _ in self._kinds
            ]
            token = first.token[j]
            computed = self._batch(batch.token_ids.index_select(0, token), positions.index_select(-1, token), metas)
            guesses = self._guess(self._drafter.logits(computed), first.slot, first.run[j], first.place[j])
            put_drafts(rows.state, batch.token_ids, guesses, Queries(token, first.run[j], first.slot, 1))

    def _places(self, batch: Batch, rows: DraftedRows, group: int) -> DraftPlaces:
        """The places of the passes in a group of the cache."""
        places = empty_places(self._sizes.num_drafts, rows.most, batch.token_ids.device)
        draft_places(places, rows, batch.attention[group].slot_mapping)
        return places

    def _batch(self, token_ids: torch.Tensor, positions: torch.Tensor, metas: list[AttentionMeta]) -> Batch:
        """Tokens of the small model; `metas`: by kind of layers."""
        listed = []
        filled: dict[Geometry, WorkList] = {}  # rows are the same in all groups
        for meta, (_, kind) in zip(metas, self._kinds):
            if kind in self._work and kind not in filled:
                filled[kind] = self._work[kind]
                fill_list(filled[kind], meta, kind.num_heads // kind.num_kv_heads)
            listed.append(replace(meta, work=filled.get(kind)))
        return Batch(self._drafter.token_ids(token_ids), positions, [], listed, self._caches, self._kind_of)

    @contextmanager
    def _abridged(self) -> Iterator[None]:
        """Leaves layers out where the target does, in steps at start whose results are not used."""
        target = self._rank.model
        if self._rank.on_host or all(map(target.is_run, range(len(target.config.text.layers)))):
            yield
            return
        with self._drafter.model.abridged():
            yield

    def offer(self, chosen: Chosen) -> None:
        """After the choice: the number of drafts of each slot's next step, none beyond what the model computes."""
        state = chosen.state
        left = self._drafter.longest - state.word(SlotWord.LENGTH)
        state.word(SlotWord.NUM_DRAFTS).copy_(left.clamp_(0, self._sizes.num_drafts))


class DraftModelHook:
    """Runs the small model before the target's first layer."""

    def __init__(self, steps: Callable[[], DraftModelSteps]) -> None:
        """`steps`: known once the small model has started."""
        self._steps = steps

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        """See LayerHook."""
        assert rows is not None, "the server has drafts"
        self._steps().begin(batch, rows)

    def after_layer(self, number: int, x: Stream) -> None:
        """See LayerHook."""
