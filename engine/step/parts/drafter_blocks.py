"""BlockSteps: a drafter that guesses all drafts of a row in one pass over its newest token and masks; MaskedSteps:
what it shares with one that walks over its guesses (drafter_walk).

    step n    | guesses: one pass over blocks | forward: streams -> entries of the same tokens | choice, verified |

The pass writes keys and values of masks at the places of the drafts; the entries of the step's tokens replace them
before any other row or step reads these places. Thread: the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.attention.meta import AttentionMeta, WorkList
from engine.cache.spec import LayerCache
from engine.kernels.drafts_blocks import BlockPlaces, block_places, empty_block
from engine.kernels.drafts_features import accept_drafts
from engine.kernels.drafts_places import Queries, put_drafts
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch
from engine.models.drafters.base import Block, BlockDrafter, MaskedDrafter
from engine.step.parts.drafter_steps import DrafterSteps, Runs


class MaskedSteps(DrafterSteps):
    """A drafter whose entry of a token follows from the target's streams of that token alone."""

    def __init__(self, drafter: MaskedDrafter, runs: Runs) -> None:
        super().__init__(drafter.text, runs)
        self._drafter = drafter
        self._works: dict[bool, WorkList | None] = {}  # of layers whose queries see their whole block, and of others

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """See DrafterSteps."""
        self.caches, most = list(caches), self.sizes.num_drafts + self._drafter.skipped
        queries = self.sizes.max_rows * most
        self._works = {whole: self.work_list(num_blocks, most, queries) for whole in dict.fromkeys(self._drafter.whole)}

    def queries(self, batch: Batch, rows: DraftedRows) -> tuple[BlockPlaces, Block]:
        """The queries of a step's drafts."""
        found, drafter = self.meta_of(batch), self._drafter
        most = rows.most * (self.sizes.num_drafts + drafter.skipped)
        places = empty_block(rows.most, min(len(batch.token_ids), most, self.sizes.max_lines), batch.token_ids.device)
        block_places(places, rows, batch.token_ids, found.slot_mapping, drafter.mask_id, drafter.skipped)
        numbers = places.query_start, places.context, found.block_tables, places.mapping
        metas = {
            whole: self.listed(AttentionMeta(*numbers, work, places.line, cut=True, whole=whole))
            for whole, work in self._works.items()
        }
        at = batch.positions.index_select(-1, places.token)
        of_layers = [metas[whole] for whole in drafter.whole]
        return places, Block(places.ids, at, places.before, of_layers, self.caches)

    def enter(self, batch: Batch, streams: list[Tensor]) -> None:
        """See DrafterSteps."""
        self._drafter.store(streams, batch.positions, self.meta_of(batch), self.caches)

    def settle(self, rows: DraftedRows, runs: Tensor) -> None:
        """Every row gets drafts in its next step."""
        accept_drafts(rows, runs)


class BlockSteps(MaskedSteps):
    """A drafter whose pass gives all drafts."""

    def __init__(self, drafter: BlockDrafter, runs: Runs) -> None:
        super().__init__(drafter, runs)
        self._block = drafter.block

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """See DrafterSteps."""
        places, block = self.queries(batch, rows)
        guesses = self.guess(self._block(block), places.slot, places.run, places.place)
        queries = Queries(places.token, places.run, places.slot, 1 - self._drafter.skipped)
        put_drafts(rows.state, batch.token_ids, guesses, queries)
