"""DraftModelSteps: the launches of a draft model inside the target's steps; engine/step/parts/draft_model owns it.

Owner: device thread at start; then the stream, in step order. In: the batch of each forward and its rows. Out: drafts,
in the step's token ids and in the slots, and the small model's keys and values of all tokens of the step.

    step n    | pass 0 | pass 1 ... rows with drafts | all tokens: keys and values | the target's forward | choice |
                pass j computes draft j, guesses j + 1 prompts, drafts, new tokens

What follows the passes makes every token's keys and values true before a later step reads them: those of prompts, of
rows without drafts, and of the last draft, which no pass has computed.
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
from engine.kernels.drafts_places import Queries, draft_places, empty_places, next_places, put_drafts
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
        self._places = {group: empty_places(sizes.max_rows, rank.device) for group, _ in self._kinds}
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

    def begin(self, batch: Batch) -> None:
        """Computes all tokens of a step, in which the drafts are."""
        positions = self._drafter.places(batch.positions)
        with self._abridged():
            metas = [replace(batch.attention[group], last_keys=None) for group, _ in self._kinds]
            step = self._batch(batch.token_ids, positions, metas)
            step.num_tokens = batch.num_tokens
            self._drafter.store(step)

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """A pass: replaces drafts of the step by new guesses, in its token ids and in the slots; see LayerHook."""
        places = {group: all_rows.first(rows.most) for group, all_rows in self._places.items()}
        for group, own in places.items():
            mapping = batch.attention[group].slot_mapping
            draft_places(own, rows, mapping) if first else next_places(own, mapping)
        same, starts = places[self._kinds[0][0]], self._starts[: rows.most + 1]  # but for the mapping
        metas = [
            AttentionMeta(
                starts,
                same.context,
                batch.attention[group].block_tables,
                places[group].mapping,
                table_row=same.line,
                decode_only=True,
            )
            for group, _ in self._kinds
        ]
        ids, at = batch.token_ids.index_select(0, same.token), batch.positions.index_select(-1, same.token)
        with self._abridged():
            logits = self._drafter.logits(self._batch(ids, self._drafter.places(at), metas))
        guesses = self._guess(logits, same.slot, same.run, same.place)
        put_drafts(rows.state, batch.token_ids, guesses, Queries(same.token, same.run, same.slot, 1))

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
        target = self._rank.own
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

    whole = False

    def __init__(self, steps: Callable[[], DraftModelSteps], passes: int) -> None:
        """`steps`: known once the small model has started."""
        self._steps, self.passes = steps, passes

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """See LayerHook."""
        self._steps().draft(batch, rows, first)

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        """See LayerHook."""
        self._steps().begin(batch)

    def after_layer(self, number: int, x: Stream) -> None:
        """See LayerHook."""
