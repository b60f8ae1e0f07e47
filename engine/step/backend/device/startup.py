"""Startup: prepares the ranks on accelerators for the first request: compiles, measures memory, captures graphs.

Owner: device thread. In: an executor over a DeviceBackend with its buffers. Out: the same executor, ready for steps.
The order is:

    compile (kernels of every kind of step) -> profile (how many KV blocks fit) -> allocate (the cache) -> capture
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from _fast.layout import GraphKind
from engine.base.config import EngineConfig
from engine.cache.sizing import device_blocks
from engine.encoders.tower import PausingTower, SharedTower, Tower, each
from engine.kernels.gemm.dispatch import gated_choice, is_vendors
from engine.kernels.precompile import precompile
from engine.step.backend.device.backend import DeviceBackend
from engine.step.backend.device.buffers import StepBuffers
from engine.step.backend.device.forwards import Forwards
from engine.step.parts.part import Claim
from engine.step.parts.pieces import TowerRun
from engine.step.plain import Executor
from engine.step.sizes import (
    decode_sizes,
    fewer_mixed_sizes,
    long_sizes,
    one_size_per_doubling,
    pass_sizes,
    sizes_for_other_kernels,
)

PINNED_BYTES = 4 << 20  # bytes of one upload in a special step
LARGE_MEDIA = 1024  # rows of a media item
GRAPH_BYTES = 192 << 20  # driver memory of all graphs; measured: 112 MiB for 36 layers, 90 MiB for 28 small layers


class Recorded(Protocol):
    """A forward whose launches can be recorded as graphs."""

    all: Forwards
    buffers: StepBuffers

    def decode(self, rows: int, variant: int = 0) -> None:
        """Runs a whole decode-only step."""

    def forward_into(self, kind: int, tokens: int, variant: int = 0) -> None:
        """Runs a forward of so many padded tokens."""

    def warm_up(self) -> None:
        """Launches once each kernel that no graph contains."""

    def largest(self) -> None:
        """Runs the step that needs most memory."""

    def record(self, variants: Iterable[int]) -> None:
        """Records the graphs of decode-only steps on every rank."""

    def record_forward(self, kind: int, tokens: int, variant: int = 0) -> None:
        """Records the graph of a forward on every rank."""


class Startup:
    """Runs the start of all ranks."""

    def __init__(
        self, config: EngineConfig, backend: DeviceBackend, forward: Recorded, executor: Executor, claim: Claim
    ) -> None:
        """`claim`: the sum of all parts' claims."""
        self._config, self._forward, self._executor, self._claim = config, forward, executor, claim
        self._sizes, self._rank, self._buffers = backend.sizes, backend.rank, backend.buffers
        self._ranks = executor.ranks
        self._accelerator, self._launcher = backend.accelerator, backend.launcher
        chosen, decodes = config.cudagraph_capture_sizes, backend.rank.model.pooler is None
        self._decode_sizes = decode_sizes(backend.sizes.max_rows, chosen) if decodes else []

    def compile(self, threads: int) -> None:
        """Compiles the kernels of this model's steps, several at a time, and times products.

        gemm/algorithms, gemm/scaled and gemm/long_products time products. Any other kernel compiles at its first use.
        """
        sizes, dtype = self._sizes, self._rank.model.dtype
        with self._one_block():
            with self._rank.own.abridged():
                precompile(self._walk, threads, self._accelerator.bind)
            if len(self._ranks) > 1:
                self._meet()
        timed = long_sizes(sizes.max_tokens)
        if not self._config.enforce_eager:
            timed += sizes.mixed + self._decode_sizes
        # In turn, because a rank takes over what the ranks before it have timed.
        self._forward.all.in_turn(lambda own: own.buffers.accelerator.products.autotune(timed, dtype, is_vendors))

    def _meet(self) -> None:
        """Runs a step of the most tokens on every rank, which records the products of each rank's slices."""
        everywhere, variants = self._forward.all, self._buffers.variants
        everywhere.run(lambda own: own.buffers.prep())
        with contextlib.ExitStack() as recordings:
            for rank in self._ranks:
                assert rank.accelerator is not None
                recordings.enter_context(rank.accelerator.products.algorithms.recording())
            tokens, variant = self._sizes.max_tokens, variants.forward | variants.scan
            everywhere.run(lambda own: own.abridged_into(GraphKind.MIXED, tokens, variant))

    def _walk(self) -> None:
        """Launches steps of every kind on rank 0, sampling first, because its kernels take longest to compile. Records
        the products of its layers."""
        sizes, text = self._sizes, self._rank.own.config.text
        self._forward.warm_up()
        decode = one_size_per_doubling(self._decode_sizes)
        other = self._buffers.variants.forward
        drafting, scan = self._buffers.variants.drafting, self._buffers.variants.scan
        for size in decode:
            self._forward.decode(size)
            for variant in filter(None, (other, drafting)):
                self._forward.decode(size, variant)
        mixed = one_size_per_doubling([*sizes.mixed, sizes.max_tokens])
        gated = partial(gated_choice, width=text.intermediate_size, depth=text.hidden_size)
        with self._accelerator.products.algorithms.recording():
            others = sizes_for_other_kernels(decode + mixed, sizes.max_tokens, gated) if decode else []
            for size in mixed + others:
                self._forward.forward_into(GraphKind.MIXED, size, scan)
                if other:
                    self._forward.forward_into(GraphKind.MIXED, size, other | scan)
            for size in one_size_per_doubling(pass_sizes(sizes.max_rows)):
                for kind in self._buffers.pass_kinds:
                    self._buffers.draft(kind, size)
        for part in self._executor.parts:
            part.warm_up(walk=True)
        self._encode_largest(min(LARGE_MEDIA, sizes.encoder_rows))
        self._encode_largest(sizes.encoder_rows)

    @contextlib.contextmanager
    def _one_block(self) -> Iterator[None]:
        """Context with a KV cache of one block, for steps at start."""
        self._allocate(1, poison=False)
        yield
        for rank in self._ranks:
            rank.caches = []

    def profile(self) -> int:
        """Runs the largest step with a one-block cache and returns how many KV blocks fit into the remaining memory."""
        sizes, accelerator, buffers = self._sizes, self._accelerator, self._buffers
        with self._one_block():
            self._forward.all.run(lambda own: own.buffers.prep())
            step = accelerator.peak_of(self._largest)
            peak = max(step, accelerator.peak_of(partial(self._encode_largest, sizes.encoder_rows)))
            for tower in each(self._rank.model.towers):
                if isinstance(tower, PausingTower) and self._decode_sizes:
                    peak = max(peak, accelerator.peak_of(partial(self._step_with_tower, tower)))
            graphed = step if self._config.enforce_eager else max(step, accelerator.peak_of(self._small_towers))
        variants = buffers.variants
        graphs = 1 + bool(variants.forward) + bool(variants.drafting) + bool(variants.scan)
        sized = partial(
            device_blocks,
            self._config,
            max_model_len=sizes.max_model_len,
            max_chunk=sizes.max_chunk,
            rows=sizes.max_rows,
            peak_bytes=peak + self._claim.step_bytes,
            # The graphs' pool holds the largest step a second time.
            graph_bytes=graphed + GRAPH_BYTES * graphs,
        )
        # Every rank has the same blocks.
        devices = [(rank.layout, rank.accelerator) for rank in self._ranks]
        return min(sized(layout, memory=device.memory()) for layout, device in devices if device is not None)

    def _encode_largest(self, rows: int) -> None:
        """Runs in every tower the item of `rows` rows that needs most memory, and as many items as may run together."""
        for tower in each(self._rank.model.towers):
            item = tower.example(tower.modalities[0], rows)
            made = len(tower.encode(item))
            if isinstance(tower, SharedTower):
                times = min(rows // max(1, made), tower.together // tower.weight(item))
                if times > 1:  # an item's length is limited to a window
                    tower.encode_together([item] * times)

    def _step_with_tower(self, tower: PausingTower) -> None:
        """Runs the largest step while the tower's run of its largest item pauses."""
        paused = TowerRun(tower, tower.example(tower.modalities[0], self._sizes.encoder_rows))
        paused.advance(1.0)
        self._largest()

    def _largest(self) -> None:
        """Runs the step with the largest memory on every rank."""
        self._forward.all.run(lambda own: own.largest())

    def _small_towers(self) -> None:
        """Runs the towers that get graphs, without recording them."""

        def run(body: Callable[[], None]) -> Callable[[], None]:
            body()
            return body

        for tower in self._recorded_towers():
            tower.record(run)

    def _recorded_towers(self) -> list[Tower]:
        """The towers that get graphs; in pooling models no tower gets a graph."""
        return list(each(self._rank.model.towers)) if self._decode_sizes else []

    def allocate(self, blocks: int, poison: bool) -> None:
        """Allocates the KV cache and all buffers whose size depends on it; `blocks` includes the dummy block."""
        self._allocate(blocks, poison)

    def _allocate(self, blocks: int, poison: bool) -> None:
        for rank in self._ranks:
            rank.allocate(blocks, poison)
        for buffers in (self._buffers, *(forward.buffers for forward in self._forward.all.following)):
            buffers.set_blocks(blocks)
        self._executor.allocate(blocks)

    def capture(self) -> None:
        """Records every graph; with enforce_eager only the prep graph.

        Garbage collection is off meanwhile: freeing graphs of an earlier engine during a recording would break it.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            self._capture()
        finally:
            if collects:
                gc.enable()

    @property
    def _most_verified(self) -> int:
        """The size of the largest mixed graph for a step of rows with drafts alone."""
        most = self._sizes.max_rows + self._sizes.max_lines
        return next((size for size in self._sizes.mixed if size >= most), self._sizes.most_graphed)

    def _capture(self) -> None:
        sizes, everywhere = self._sizes, self._forward.all
        variants = range(1 << self._claim.variants)
        self._accelerator.keep_pinned(PINNED_BYTES)
        self._accelerator.keep(self._claim.step_bytes)
        # First, because the rules' kernels need a record without rows.
        everywhere.run(lambda own: own.warm_up())
        for part in self._executor.parts:
            part.warm_up(walk=False)
        prep = everywhere.capture(lambda own: own.buffers.prep())
        self._launcher.set_graph(GraphKind.PREP, 0, 1, *prep)
        if not self._config.enforce_eager:
            other, scan = self._buffers.variants.forward, self._buffers.variants.scan
            fewer = fewer_mixed_sizes(sizes.most_graphed) if other else []
            for graphed, variant in ((sizes.mixed, 0), (fewer, other)):
                for size in reversed(graphed):
                    self._forward.record_forward(GraphKind.MIXED, size, variant | scan)
                    if scan and size <= self._most_verified:
                        self._forward.record_forward(GraphKind.MIXED, size, variant)
            self._forward.record(variants)
            for tower in self._recorded_towers():
                tower.record(partial(self._accelerator.recorded, met=True))  # `met`: the profile has run them
        if self._config.enforce_eager or sizes.max_tokens > sizes.most_graphed:
            self._largest()  # its memory stays reserved for steps without a graph
        everywhere.ready()
