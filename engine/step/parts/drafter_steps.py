"""DrafterSteps: the launches of a drafter inside the target's steps; engine/step/parts/drafter owns the object.

Owner: device thread at start; then the stream, in step order. In: the batch of each forward, its rows, the target's
streams, the chosen tokens. Out: drafts, in the step's token ids and in the slots.

    step n    | guesses: passes of the drafter  | forward: streams -> entries | choice, verified |

A class for each way to guess: drafter_chain (a pass for each draft), drafter_blocks (one pass for all drafts),
drafter_walk (one pass, then draft after draft). A step has as many passes of a chain as its rows have drafts at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from engine.attention.meta import AttentionMeta, WorkList
from engine.base.model_config import TextConfig
from engine.cache.spec import LayerCache
from engine.kernels.attention.tiles import stripe_of
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.kernels.drafts_rows import DraftedRows
from engine.layers.batch import Batch
from engine.layers.stream import Stream
from engine.models.base.decoder import Decoder
from engine.step.parts.drafter_load import Guess
from engine.step.rank import Rank
from engine.step.sizes import Sizes
from engine.step.step import Chosen


class Runs(NamedTuple):
    """Where a drafter runs."""

    rank: Rank
    sizes: Sizes
    group: int  # of the cache, the drafter's
    guess: Guess


class DrafterSteps(ABC):
    """The entries of a drafter in the cache, and what reads and writes them."""

    def __init__(self, text: TextConfig, runs: Runs) -> None:
        """`text`: the drafter's decoder."""
        self.rank, self.sizes, self.guess = runs.rank, runs.sizes, runs.guess
        self._group, self._text = runs.group, text
        self.caches: list[LayerCache]
        self.rows: DraftedRows  # of the newest step

    @abstractmethod
    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """Allocates what depends on the size of the cache; `caches`: the drafter's."""

    def begin(self, rows: DraftedRows) -> None:
        """Begins the forward of a step."""
        self.rows = rows

    @abstractmethod
    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """A pass: replaces drafts of the step by new guesses, in its token ids and in the slots; see LayerHook."""

    @abstractmethod
    def enter(self, batch: Batch, streams: list[Tensor]) -> None:
        """Writes the drafter's entries of the step's tokens; streams: of the target, each [T, hidden]."""

    @abstractmethod
    def settle(self, rows: DraftedRows, runs: Tensor) -> None:
        """After the choice; runs int32 [R, width]: the rows' tokens, then negative numbers."""

    def accept(self, chosen: Chosen) -> None:
        """After the choice."""
        runs, rows = chosen.runs, self.rows
        if len(runs) != len(rows.drafts):  # on a host: runs of the rows that sample
            runs = runs.new_full((len(rows.drafts), runs.shape[1]), -1)
            runs[rows.drafts >= 0] = chosen.runs
        self.settle(rows, runs)

    def meta_of(self, batch: Batch) -> AttentionMeta:
        """The rows of the step in the drafter's group of the cache."""
        found = batch.attention[self._group]
        assert isinstance(found, AttentionMeta)
        return found

    def work_list(self, num_blocks: int, most: int, tokens: int) -> WorkList | None:
        """An empty list for attention of the drafter's heads, on an accelerator; `most`: queries of rows that are cut
        into parts, `tokens`: of a step."""
        if self.rank.accelerator is None:
            return None
        text, sizes = self._text, self.sizes
        group = text.num_heads // text.num_kv_heads
        stripes = sizes.max_rows * -(-most // stripe_of(group, most))
        parts = max_parts(num_blocks, sizes.block_size, stripes)
        shape = tokens, parts, text.num_heads, text.head_dim
        return empty_list(stripes, *shape, self.rank.device, most_cut=most, group=group)

    def listed(self, meta: AttentionMeta) -> AttentionMeta:
        """The meta, after its work list was written."""
        if meta.work is not None:
            fill_list(meta.work, meta, self._text.num_heads // self._text.num_kv_heads)
        return meta


class DrafterHook:
    """Runs the drafter's passes, and collects the streams that it reads inside a forward of the target."""

    def __init__(self, steps: Callable[[], DrafterSteps], model: Decoder, streams: Sequence[int], passes: int) -> None:
        """`steps`: known once the drafter has started. `streams`: n is the input of layer n, the output of n - 1."""
        self._steps, self._model, self._streams, self.passes = steps, model, streams, passes
        self.whole = max(streams) == len(model.layers)
        self._batch: Batch
        self._found: dict[int, Tensor] = {}
        self._last = 0  # the last layer whose output is read

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """See LayerHook."""
        self._steps().draft(batch, rows, first)

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        """See LayerHook."""
        assert rows is not None, "the server has drafts"
        self._batch, self._found = batch, {}
        # A forward that leaves layers out computes no results, but runs every kernel.
        self._last = max(number for number in range(max(self._streams)) if self._model.is_run(number))
        self._steps().begin(rows)

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
