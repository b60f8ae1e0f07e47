"""Startup: what a rank on an accelerator does before its first request: kernels compiled, memory measured, graphs made.

Owner: device thread. In: an executor over a DeviceBackend with its buffers. Out: the same, ready for steps. In order:

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
    long_sizes,
    mixed_sizes,
    one_size_per_doubling,
    sizes_for_other_kernels,
)
from engine.step.step import Ending

PINNED_BYTES = 4 << 20  # of one copy that a special step sends
LARGE_MEDIA = 1024
GRAPH_BYTES = 192 << 20  # what the driver keeps for all graphs: 112 MiB were seen with 36 layers, 90 with 28 small ones


class Recorded(Protocol):
    """A forward whose launches are recorded."""

    def decode(self, rows: int, variant: int = 0) -> None:
        """A whole step of rows that only decode."""

    def forward_into(self, kind: int, tokens: int) -> None:
        """A forward of so many padded tokens."""

    def warm_up(self) -> None:
        """Launches that are not recorded, each once."""

    def largest(self) -> None:
        """The step that takes most memory."""

    def record(self, capture: Callable[..., int], variants: Iterable[int]) -> None:
        """The graphs of steps that only decode."""

    def record_forward(self, capture: Callable[..., int], kind: int, tokens: int) -> None:
        """The graph of a forward."""


def token_backend(
    config: EngineConfig, rank: Rank, sizes: Sizes, hooks: Sequence[LayerHook], endings: Sequence[Ending]
) -> tuple[DeviceBackend, DeviceForward]:
    """Of a model that makes tokens."""
    assert rank.accelerator is not None
    has_media = len(rank.model.config.modalities) > 1 or config.enable_prompt_embeds
    buffers = StepBuffers(rank, sizes, config.deterministic, has_media, hooks)
    forward = DeviceForward(config, rank, sizes, buffers, endings)
    upload = LineUpload(rank.accelerator, forward.sampler.allowed_table, sizes.max_rows)
    backend = DeviceBackend(config, rank, sizes, buffers, forward, DeviceMasks(upload, forward.sampler))
    if rank.accelerator.has_steady_loop:
        backend.steady = DeviceSteady(backend, forward.sampler.asked, forward.logprob_words.unsqueeze(2))
    return backend, forward


def pooling_backend(
    config: EngineConfig, rank: Rank, sizes: Sizes, hooks: Sequence[LayerHook], endings: Sequence[Ending]
) -> tuple[DeviceBackend, DevicePooling]:
    """Of a model that pools: every row ends with its step, which is Python's; no row chooses a token."""
    buffers = StepBuffers(rank, sizes, config.deterministic, bool(rank.model.towers), hooks)
    forward = DevicePooling(rank.model, sizes, buffers)
    return DeviceBackend(config, rank, sizes, buffers, forward, HostMasks()), forward


class Startup:
    """The start of one rank."""

    def __init__(
        self, config: EngineConfig, backend: DeviceBackend, forward: Recorded, executor: Executor, claim: Claim
    ) -> None:
        """`claim`: of all parts."""
        self._config, self._forward, self._executor, self._claim = config, forward, executor, claim
        self._sizes, self._rank, self._buffers = backend.sizes, backend.rank, backend.buffers
        self._accelerator, self._launcher = backend.accelerator, backend.launcher
        chosen, decodes = config.cudagraph_capture_sizes, backend.rank.model.pooler is None
        self._decode_sizes = decode_sizes(backend.sizes.max_rows, chosen) if decodes else []

    def compile(self, threads: int) -> None:
        """Has the kernels of this model's steps compiled, several at a time, and products timed.

        gemm/algorithms, gemm/scaled and gemm/long_products time products. A kernel that is met later compiles then.
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
        """Launches of every kind; first the choice of tokens, whose kernels take longest to compile.

        `products` takes the weights of a layer's.
        """
        sizes, text = self._sizes, self._rank.model.config.text
        self._forward.warm_up()
        decode = one_size_per_doubling(self._decode_sizes)
        for size in decode:
            self._forward.decode(size)
        mixed = one_size_per_doubling([*mixed_sizes(sizes.most_graphed), sizes.max_tokens])
        gated = partial(gated_choice, width=text.intermediate_size, depth=text.hidden_size)
        with self._accelerator.algorithms.recording() as recorded:
            others = sizes_for_other_kernels(decode + mixed, sizes.max_tokens, gated) if decode else []
            for size in mixed + others:
                self._forward.forward_into(GraphKind.MIXED, size)
        products.update(recorded)
        for part in self._executor.parts:
            part.warm_up(walk=True)
        self._encode_largest(min(LARGE_MEDIA, sizes.encoder_rows))
        self._encode_largest(sizes.encoder_rows)

    @contextlib.contextmanager
    def _one_block(self) -> Iterator[None]:
        """A cache of one block, for steps at start."""
        self._allocate(1, poison=False)
        yield
        self._rank.caches = []

    def profile(self) -> int:
        """Runs the largest step without a cache and returns how many KV blocks fit into the memory that is left."""
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
            graph_bytes=graphed + GRAPH_BYTES,  # the graphs' pool holds the largest step once more
            memory=accelerator.memory(),
        )

    def _encode_largest(self, rows: int) -> None:
        """In every tower the item of `rows` rows that takes most memory, or as many that run together."""
        for tower in each(self._rank.model.towers):
            item = tower.example(tower.modalities[0], rows)
            made = len(tower.encode(item))
            if isinstance(tower, SharedTower):
                times = min(rows // max(1, made), tower.together // tower.weight(item))
                if times > 1:  # an item has a longest length: that of a window
                    tower.encode_together([item] * times)

    def _step_with_tower(self, tower: PausingTower) -> None:
        """A step while the run of the tower's largest item pauses."""
        paused = TowerRun(tower, tower.example(tower.modalities[0], self._sizes.encoder_rows))
        paused.advance(1.0)
        self._forward.largest()

    def _small_towers(self) -> None:
        """Those that get graphs, as they are."""

        def run(body: Callable[[], None]) -> Callable[[], None]:
            body()
            return body

        for tower in self._recorded_towers():
            tower.record(run)

    def _recorded_towers(self) -> list[Tower]:
        """Of a model that pools, a step runs towers as they are."""
        return list(each(self._rank.model.towers)) if self._decode_sizes else []

    def allocate(self, blocks: int, poison: bool) -> None:
        """The KV cache and what is sized by it; `blocks` includes the dummy block."""
        self._allocate(blocks, poison)

    def _allocate(self, blocks: int, poison: bool) -> None:
        self._rank.allocate(blocks, poison)
        self._buffers.set_blocks(blocks)
        self._executor.allocate(blocks)

    def capture(self) -> None:
        """Records every graph, or with enforce_eager those of prep only.

        No garbage is collected meanwhile: the graphs of an engine that has ended spoil a recording if they go then.
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
        # First: the step that prep reads has no rows yet, as the rules' kernels want it.
        self._forward.warm_up()
        for part in self._executor.parts:
            part.warm_up(walk=False)
        self._launcher.set_graph(GraphKind.PREP, 0, 1, capture(self._buffers.prep))
        if not self._config.enforce_eager:
            for size in reversed(mixed_sizes(sizes.most_graphed)):
                self._forward.record_forward(capture, GraphKind.MIXED, size)
            self._forward.record(capture, variants)
            for tower in self._recorded_towers():
                tower.record(partial(self._accelerator.recorded, met=True))  # by the profile
        if self._config.enforce_eager or sizes.max_tokens > sizes.most_graphed:
            self._forward.largest()  # leaves its room for steps without a graph; what the profile took was given back
