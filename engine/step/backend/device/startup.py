"""Startup: prepares a rank on an accelerator for its first request: compiles, measures memory, captures graphs.

Owner: device thread. In: an executor over a DeviceBackend with its buffers. Out: the same executor, ready for steps.
The order is:

    compile (kernels of every kind of step) -> profile (how many KV blocks fit) -> allocate (the cache) -> capture
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from _fast.layout import GraphKind
from engine.base.config import EngineConfig
from engine.cache.sizing import device_blocks
from engine.encoders.tower import PausingTower, SharedTower, Tower, each
from engine.kernels.gemm.algorithms import Products
from engine.kernels.gemm.dispatch import gated_choice, is_vendors
from engine.kernels.precompile import precompile
from engine.layers.batch import LayerHook
from engine.sampling.masks import LineUpload
from engine.step.backend.device.backend import DeviceBackend, DeviceSteady
from engine.step.backend.device.buffers import StepBuffers
from engine.step.backend.device.forward import DeviceForward, DeviceMasks
from engine.step.backend.host.forward import HostMasks
from engine.step.parts.part import Claim
from engine.step.parts.pieces import TowerRun
from engine.step.parts.pooling import DevicePooling
from engine.step.plain import Executor
from engine.step.rank import Rank
from engine.step.sizes import (
    Sizes,
    decode_sizes,
    fewer_mixed_sizes,
    long_sizes,
    mixed_sizes,
    one_size_per_doubling,
    sizes_for_other_kernels,
)
from engine.step.step import Ending

PINNED_BYTES = 4 << 20  # bytes of one upload in a special step
LARGE_MEDIA = 1024  # rows of a media item
GRAPH_BYTES = 192 << 20  # driver memory of all graphs; measured: 112 MiB for 36 layers, 90 MiB for 28 small layers


class Recorded(Protocol):
    """A forward whose launches can be recorded as graphs."""

    def decode(self, rows: int, variant: int = 0) -> None:
        """Runs a whole decode-only step."""

    def forward_into(self, kind: int, tokens: int, variant: int = 0) -> None:
        """Runs a forward of so many padded tokens."""

    def warm_up(self) -> None:
        """Launches once each kernel that no graph contains."""

    def largest(self) -> None:
        """Runs the step that needs most memory."""

    def record(self, capture: Callable[..., int], variants: Iterable[int]) -> None:
        """Records the graphs of decode-only steps."""

    def record_forward(self, capture: Callable[..., int], kind: int, tokens: int, variant: int = 0) -> None:
        """Records the graph of a forward."""


def token_backend(
    config: EngineConfig, rank: Rank, sizes: Sizes, hooks: Sequence[LayerHook], endings: Sequence[Ending]
) -> tuple[DeviceBackend, DeviceForward]:
    """Makes the backend of a model that generates tokens."""
    assert rank.accelerator is not None
    has_media = len(rank.model.config.modalities) > 1 or config.enable_prompt_embeds
    buffers = StepBuffers(rank, sizes, config.deterministic, has_media, hooks, config.lora is not None)
    forward = DeviceForward(config, rank, sizes, buffers, endings)
    upload = LineUpload(rank.accelerator, forward.sampler.allowed_table, sizes.max_rows)
    backend = DeviceBackend(config, rank, sizes, buffers, forward, DeviceMasks(upload, forward.sampler))
    if rank.accelerator.has_steady_loop:
        backend.steady = DeviceSteady(backend, forward.sampler.asked, forward.logprob_words)
    return backend, forward


def pooling_backend(
    config: EngineConfig, rank: Rank, sizes: Sizes, hooks: Sequence[LayerHook], endings: Sequence[Ending]
) -> tuple[DeviceBackend, DevicePooling]:
    """Makes the backend of a pooling model. No row samples a token, and Python launches every step."""
    media, places = bool(rank.model.towers), config.lora is not None
    buffers = StepBuffers(rank, sizes, config.deterministic, media, hooks, places)
    forward = DevicePooling(rank.model, sizes, buffers)
    return DeviceBackend(config, rank, sizes, buffers, forward, HostMasks()), forward


class Startup:
    """Runs the start of one rank."""

    def __init__(
        self, config: EngineConfig, backend: DeviceBackend, forward: Recorded, executor: Executor, claim: Claim
    ) -> None:
        """`claim`: the sum of all parts' claims."""
        self._config, self._forward, self._executor, self._claim = config, forward, executor, claim
        self._sizes, self._rank, self._buffers = backend.sizes, backend.rank, backend.buffers
        self._accelerator, self._launcher = backend.accelerator, backend.launcher
        chosen, decodes = config.cudagraph_capture_sizes, backend.rank.model.pooler is None
        self._decode_sizes = decode_sizes(backend.sizes.max_rows, chosen) if decodes else []

    def compile(self, threads: int) -> None:
        """Compiles the kernels of this model's steps, several at a time, and times products.

        gemm/algorithms, gemm/scaled and gemm/long_products time products. Any other kernel compiles at its first use.
        """
        products: Products = {}
        sizes, accelerator = self._sizes, self._accelerator
        with self._one_block(), self._rank.model.abridged():
            walk = partial(self._walk, products)
            precompile(walk, threads, accelerator.bind)
        timed = long_sizes(sizes.max_tokens)
        if not self._config.enforce_eager:
            timed += mixed_sizes(sizes.most_graphed) + self._decode_sizes
        accelerator.algorithms.autotune(
            products, lambda kind: sorted({rows for rows in timed if is_vendors(kind, rows)})
        )
        accelerator.scaled.autotune(timed, self._rank.model.dtype)
        accelerator.long.autotune(timed, self._rank.model.dtype)

    def _walk(self, products: Products) -> None:
        """Launches steps of every kind, sampling first, because its kernels take longest to compile.

        `products` collects the products of a layer with their weights.
        """
        sizes, text = self._sizes, self._rank.model.config.text
        self._forward.warm_up()
        decode = one_size_per_doubling(self._decode_sizes)
        other = self._buffers.forward_variant
        for size in decode:
            self._forward.decode(size)
            if other:
                self._forward.decode(size, other)
        mixed = one_size_per_doubling([*mixed_sizes(sizes.most_graphed), sizes.max_tokens])
        gated = partial(gated_choice, width=text.intermediate_size, depth=text.hidden_size)
        with self._accelerator.algorithms.recording() as recorded:
            others = sizes_for_other_kernels(decode + mixed, sizes.max_tokens, gated) if decode else []
            for size in mixed + others:
                self._forward.forward_into(GraphKind.MIXED, size)
                if other:
                    self._forward.forward_into(GraphKind.MIXED, size, other)
        products.update(recorded)
        for part in self._executor.parts:
            part.warm_up(walk=True)
        self._encode_largest(min(LARGE_MEDIA, sizes.encoder_rows))
        self._encode_largest(sizes.encoder_rows)

    @contextlib.contextmanager
    def _one_block(self) -> Iterator[None]:
        """Context with a KV cache of one block, for steps at start."""
        self._allocate(1, poison=False)
        yield
        self._rank.caches = []

    def profile(self) -> int:
        """Runs the largest step with a one-block cache and returns how many KV blocks fit into the remaining memory."""
        sizes, accelerator = self._sizes, self._accelerator
        with self._one_block():
            self._buffers.prep()
            step = accelerator.peak_of(self._forward.largest)
            peak = max(step, accelerator.peak_of(partial(self._encode_largest, sizes.encoder_rows)))
            for tower in each(self._rank.model.towers):
                if isinstance(tower, PausingTower) and self._decode_sizes:
                    peak = max(peak, accelerator.peak_of(partial(self._step_with_tower, tower)))
            graphed = step if self._config.enforce_eager else max(step, accelerator.peak_of(self._small_towers))
        return device_blocks(
            self._config,
            self._rank.layout,
            sizes.max_model_len,
            sizes.max_chunk,
            sizes.max_rows,
            peak_bytes=peak + self._claim.step_bytes,
            # The graphs' pool holds the largest step a second time.
            graph_bytes=graphed + GRAPH_BYTES * (2 if self._buffers.forward_variant else 1),
            memory=accelerator.memory(),
        )

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
        self._forward.largest()

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
        self._rank.allocate(blocks, poison)
        self._buffers.set_blocks(blocks)
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

    def _capture(self) -> None:
        capture, sizes = self._accelerator.capture, self._sizes
        variants = range(1 << self._claim.variants)
        self._accelerator.keep_pinned(PINNED_BYTES)
        self._accelerator.keep(self._claim.step_bytes)
        # First, because the rules' kernels need a record without rows.
        self._forward.warm_up()
        for part in self._executor.parts:
            part.warm_up(walk=False)
        self._launcher.set_graph(GraphKind.PREP, 0, 1, capture(self._buffers.prep))
        if not self._config.enforce_eager:
            for size in reversed(mixed_sizes(sizes.most_graphed)):
                self._forward.record_forward(capture, GraphKind.MIXED, size)
            other = self._buffers.forward_variant
            for size in reversed(fewer_mixed_sizes(sizes.most_graphed)) if other else ():
                self._forward.record_forward(capture, GraphKind.MIXED, size, other)
            self._forward.record(capture, variants)
            for tower in self._recorded_towers():
                tower.record(partial(self._accelerator.recorded, met=True))  # `met`: the profile has run them
        if self._config.enforce_eager or sizes.max_tokens > sizes.most_graphed:
            self._forward.largest()  # its memory stays reserved for steps without a graph
