"""Startup: what a DeviceExecutor does before its first request: kernels compiled, memory measured, graphs recorded.

Owner: device thread. In: an executor with its buffers. Out: the same executor, ready for steps. The phases' order:

    compile (kernels of every kind of step) -> profile (how many KV blocks fit) -> allocate (the cache) -> capture
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from _fast.layout import GraphKind
from engine.cache.sizing import device_blocks
from engine.encoders.tower import PausingTower, SharedTower, each
from engine.kernels.compile_ahead import compile_ahead
from engine.kernels.gemm.algorithms import Products
from engine.kernels.gemm.dense import gated_way, is_vendors
from engine.sampling.device import prompt_logprobs
from engine.sampling.logprobs import CHUNK
from engine.step.device_executor import DeviceExecutor
from engine.step.graphs import (
    decode_sizes,
    long_sizes,
    mixed_sizes,
    one_size_per_doubling,
    sizes_for_other_kernels,
)
from engine.step.pieces import TowerRun

PINNED_BYTES = 4 << 20  # of one copy that a special step sends
# Rows of the media whose kernels are compiled ahead, beside those of the largest: together they meet every variant of
# a kernel (one, odd, multiples of 16; short and long segments; either order of scaling).
MEDIA_ROWS = (1, 6, 15, 30, 64, 375)
LARGE_MEDIA = 1024
GRAPH_BYTES = 192 << 20  # what the driver keeps for all graphs: 112 MiB were seen with 36 layers, 90 with 28 small ones


class Startup:
    """The start of one executor, whose parts it reads."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self._executor = executor
        self._config, self._sizes, self._accelerator = executor.config, executor.sizes, executor.accelerator
        self._model, self._buffers = executor.model, executor.buffers
        self._launcher, self._layout = executor.launcher, executor.layout

    def compile(self, threads: int) -> None:
        """Has the kernels of this model's steps compiled, several at a time, and products timed.

        gemm/algorithms, gemm/scaled and gemm/long_products time products. A kernel that is met later compiles then.
        """
        products: Products = {}
        with self._one_block(), self._model.abridged():
            walk = partial(self._walk, products)
            compile_ahead(walk, threads, partial(torch.cuda.set_device, self._accelerator.device))
        timed = long_sizes(self._sizes.max_tokens)
        if not self._config.enforce_eager:
            timed += mixed_sizes(self._sizes.most_graphed)
            timed += decode_sizes(self._sizes.max_rows, self._config.cudagraph_capture_sizes)
        self._accelerator.algorithms.autotune(
            products, lambda kind: sorted({rows for rows in timed if is_vendors(kind, rows)})
        )
        self._accelerator.scaled.autotune(timed, self._model.dtype)
        self._accelerator.long.autotune(timed, self._model.dtype)

    def _walk(self, products: Products) -> None:
        """Launches of every kind; first the choice of tokens, whose kernels take longest to compile.

        `products` takes the weights of a layer's.
        """
        sizes = self._sizes
        self._warm_up_rules()
        decode = one_size_per_doubling(decode_sizes(sizes.max_rows, self._config.cudagraph_capture_sizes))
        for size in decode:
            self._executor.decode(size)
        mixed = one_size_per_doubling([*mixed_sizes(sizes.most_graphed), sizes.max_tokens])
        text = self._model.config.text
        gated = partial(gated_way, width=text.intermediate_size, depth=text.hidden_size)
        with self._accelerator.algorithms.recording() as recorded:
            for size in mixed + sizes_for_other_kernels(decode + mixed, sizes.max_tokens, gated):
                self._executor.forward_into(GraphKind.MIXED, size)
        products.update(recorded)
        if self._executor.spread is not None:
            self._executor.spread.count()
        for tower in each(self._model.towers):
            for rows in MEDIA_ROWS:
                for modality in tower.modalities:
                    tower.encode(tower.example(modality, rows))
        self._encode_largest(min(LARGE_MEDIA, sizes.encoder_rows))
        self._encode_largest(sizes.encoder_rows)

    @contextlib.contextmanager
    def _one_block(self) -> Iterator[None]:
        """A cache of one block, for steps at start."""
        self._buffers.set_caches(self._layout.allocate(1, poison=False, device=self._accelerator.device), 1)
        yield
        self._buffers.set_caches([], 1)

    def _warm_up_rules(self) -> None:
        """Every kernel of special rows, and of prompts with log-probabilities: more rows than a step may have."""
        buffers, project = self._buffers, self._model.logits
        self._executor.sampler.warm_up(buffers.inputs, project(buffers.sampled_hidden[:1]), buffers.tokens)
        most = min(CHUNK, self._sizes.max_tokens)
        hidden = buffers.sampled_hidden.new_zeros(most, buffers.sampled_hidden.shape[1])
        for count in one_size_per_doubling(list(range(1, most + 1))):
            asked = np.zeros((3, count), np.int64)
            asked[2] = 2
            prompt_logprobs(project, hidden, asked, self._executor.prompts.vocab, self._executor.prompts.as_logits)

    def profile(self) -> int:
        """Runs the largest step without a cache and returns how many KV blocks fit beside it."""
        sizes = self._sizes
        with self._one_block():
            self._buffers.prep()
            step = self._accelerator.peak_of(self._largest)
            peak = max(step, self._accelerator.peak_of(partial(self._encode_largest, sizes.encoder_rows)))
            for tower in each(self._model.towers):
                if isinstance(tower, PausingTower):
                    peak = max(peak, self._accelerator.peak_of(partial(self._step_beside, tower)))
            graphed = step if self._config.enforce_eager else max(step, self._accelerator.peak_of(self._small_towers))
        return device_blocks(
            self._config, self._layout, sizes.max_model_len, sizes.max_chunk, sizes.max_rows,
            peak_bytes=peak + self._executor.sampler.special_bytes(sizes.max_rows),
            graph_bytes=graphed + GRAPH_BYTES,  # the graphs' pool holds the largest step once more
            memory=self._accelerator.memory(),
        )  # fmt: skip

    def _encode_largest(self, rows: int) -> None:
        """In every tower the item of `rows` rows that takes most memory, or as many that run together."""
        for tower in each(self._model.towers):
            item = tower.example(tower.modalities[0], rows)
            made = len(tower.encode(item))
            if isinstance(tower, SharedTower):
                times = min(rows // max(1, made), tower.together // tower.weight(item))
                if times > 1:  # an item has a longest length: that of a window
                    tower.encode_together([item] * times)

    def _step_beside(self, tower: PausingTower) -> None:
        """A step while the run of the tower's largest item pauses."""
        paused = TowerRun(tower, tower.example(tower.modalities[0], self._sizes.encoder_rows))
        paused.advance(1.0)
        self._largest()

    def _small_towers(self) -> None:
        """Those that get graphs, as they are."""

        def run(body: Callable[[], None]) -> Callable[[], None]:
            body()
            return body

        for tower in each(self._model.towers):
            tower.record(run)

    def _largest(self) -> None:
        """Every token's hidden state, as log-probabilities of prompts ask for them, and the most choices."""
        sizes = self._sizes
        rows = min(sizes.max_tokens, sizes.max_rows)
        self._model.forward(self._buffers.batch(sizes.max_tokens, rows, False, []))
        self._executor.choose_into(sizes.max_rows)

    def allocate(self, blocks: int) -> None:
        """The KV cache and what is sized by it; `blocks` includes the dummy block."""
        caches = self._layout.allocate(blocks, self._config.debug_poison, self._accelerator.device)
        self._buffers.set_caches(caches, blocks)

    def capture(self) -> None:
        """Records every graph, or with enforce_eager those of prep only."""
        capture, launcher, sizes = self._accelerator.capture, self._launcher, self._sizes
        buffers = self._buffers
        self._accelerator.keep_pinned(PINNED_BYTES)
        self._accelerator.keep(self._executor.sampler.special_bytes(sizes.max_rows))
        # First: the step that prep reads has no rows yet, as the rules' kernels want it.
        self._warm_up_rules()
        launcher.set_graph(GraphKind.PREP, 0, 1, capture(buffers.prep))
        if not self._config.enforce_eager:
            for size in reversed(mixed_sizes(sizes.most_graphed)):
                launcher.set_graph(GraphKind.MIXED, 0, size, self._capture_forward(GraphKind.MIXED, size))
            for size in reversed(decode_sizes(sizes.max_rows, self._config.cudagraph_capture_sizes)):
                launcher.set_graph(GraphKind.DECODE, 0, size, self._capture_forward(GraphKind.DECODE, size))
                launcher.set_graph(GraphKind.SAMPLE, 0, size, capture(partial(self._executor.choose_into, size)))
                self._capture_step(size)
            for tower in each(self._model.towers):
                tower.record(partial(self._accelerator.recorded, met=True))  # by the profile
        if self._config.enforce_eager or sizes.max_tokens > sizes.most_graphed:
            self._largest()  # leaves its room for steps without a graph; what the profile took was given back

    def _capture_forward(self, kind: int, tokens: int) -> int:
        """A forward, all that it launches met before by a shorter one: a tenth of the whole one's launches."""
        with self._model.abridged():
            self._executor.forward_into(kind, tokens)
        return self._accelerator.capture(partial(self._executor.forward_into, kind, tokens), met=True)

    def _capture_step(self, size: int) -> None:
        """A whole plain decode step: what has just been recorded in parts."""
        graph = self._accelerator.capture(partial(self._executor.decode, size), met=True)
        self._launcher.set_graph(GraphKind.STEP, 0, size, graph)
