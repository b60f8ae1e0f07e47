"""DeviceForward: forward and choice of tokens on an accelerator, recorded at start and replayed by step.

Owner: device thread. A step whose rows ask for nothing special is launched whole at once, its choice of tokens
included; the choice of one that waits is launched after the step before it has been settled. A step that a part wants
eager, or that has more tokens than any graph, runs its forward kernel by kernel.

    host    plan n+1 |                                      plan n+2 |
    device  ... step n, n home | step n+1: prep reads its plan, forward, choice, tokens home | ...

Decode sizes are recorded twice: whole for plain steps, and in parts for mixed and special ones, whose choice waits for
the host, and where a gap is measured. That costs the start some ten milliseconds a size, and no step anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from _fast.launcher import Launcher
from _fast.layout import GraphKind
from engine.base.config import EngineConfig
from engine.base.mask_lines import Lines
from engine.kernels.sampling.top_logprobs import LINE
from engine.layers.batch import Batch
from engine.sampling.device import DeviceSampler
from engine.sampling.masks import LineUpload
from engine.step.backend.device.buffers import StepBuffers
from engine.step.live import LiveRow
from engine.step.rank import Rank
from engine.step.sizes import Sizes, decode_sizes
from engine.step.step import Chosen, Ending, Step


class DeviceForward:
    """Tokens."""

    def __init__(
        self, config: EngineConfig, rank: Rank, sizes: Sizes, buffers: StepBuffers, endings: Sequence[Ending] = ()
    ) -> None:
        """`endings`: called behind each choice, in what is recorded."""
        assert rank.accelerator is not None
        self._config, self._model, self._sizes, self._buffers = config, rank.model, sizes, buffers
        self._vocab = rank.model.config.text.vocab_size
        self.logprob_words = buffers.home.lines(LINE)  # log-probabilities
        self.sampler = DeviceSampler(
            buffers.slots.tensors,
            sizes.max_slots,
            sizes.max_rows,
            self._vocab,
            rank.accelerator.device,
            config.logprobs_mode,
            config.max_logprobs,
            self.logprob_words,
        )
        self.ruled = self.sampler
        self._endings = endings
        self.launcher: Launcher  # set by the backend

    # -- what is launched, and recorded as graphs at start ------------------------------------------------------------

    def decode(self, rows: int, variant: int = 0) -> None:
        """Prep, and a token for each of up to `rows` rows, all of which sample: hidden states stay where they are."""
        self._buffers.prep()
        self._choose(self._model.forward(self._buffers.batch(rows, rows, True, [])), variant)

    def forward_into(self, kind: int, tokens: int) -> None:
        """A forward of `tokens` padded tokens, and the hidden states of its sampled rows into their fixed place."""
        rows = min(tokens, self._sizes.max_rows)
        self._keep_sampled(self._buffers.batch(tokens, rows, kind == GraphKind.DECODE, []), rows)

    def _keep_sampled(self, batch: Batch, count: int) -> None:
        """The forward of which the first `count` sampled rows are read, at most one for each token."""
        if count == len(batch.token_ids):  # nothing to leave out: one gather at the end is fewer than two before it
            self._gather_sampled(self._model.forward(batch), count)
            return
        buffers = self._buffers
        batch.sample_index = buffers.inputs.sample_index[:count]
        batch.num_sampled = buffers.inputs.num_sampled
        self._model.forward(batch, buffers.sampled_hidden[:count])

    def _gather_sampled(self, hidden: torch.Tensor, count: int) -> None:
        """Of all tokens' hidden states [tokens, hidden_size] those of the first `count` sampled rows."""
        buffers = self._buffers
        torch.index_select(hidden, 0, buffers.inputs.sample_index[:count], out=buffers.sampled_hidden[:count])

    def choose_into(self, rows: int, variant: int = 0) -> None:
        """A token for each of the first `rows` sampled rows that is one."""
        self._choose(self._buffers.sampled_hidden[:rows], variant)

    def _choose(self, hidden: torch.Tensor, variant: int) -> None:
        """From the hidden states of sampled rows [rows, hidden_size] to their tokens, and those on their way home."""
        buffers = self._buffers
        self.sampler.launch_plain(buffers.inputs, self._model.logits(hidden), buffers.home.tokens)
        self._end(hidden, variant)

    def _end(self, hidden: torch.Tensor, variant: int) -> None:
        for ending in self._endings:
            ending(Chosen(self._buffers.home.tokens, hidden, len(hidden)), variant)
        self._buffers.send_tokens()

    def record(self, capture: Callable[..., int], variants: Iterable[int]) -> None:
        """Records the graphs of steps that only decode, whole and in parts; `capture` is the accelerator's."""
        for size in reversed(decode_sizes(self._sizes.max_rows, self._config.cudagraph_capture_sizes)):
            self.record_forward(capture, GraphKind.DECODE, size)
            for variant in variants:
                choice = capture(partial(self.choose_into, size, variant))
                self.launcher.set_graph(GraphKind.SAMPLE, variant, size, choice)
                # A whole plain step: what has just been recorded in parts.
                whole = capture(partial(self.decode, size, variant), met=True)
                self.launcher.set_graph(GraphKind.STEP, variant, size, whole)

    def record_forward(self, capture: Callable[..., int], kind: int, tokens: int) -> None:
        """A forward, all that it launches met before by a shorter one: a tenth of the whole one's launches."""
        with self._model.abridged():
            self.forward_into(kind, tokens)
        self.launcher.set_graph(kind, 0, tokens, capture(partial(self.forward_into, kind, tokens), met=True))

    def warm_up(self) -> None:
        """Every kernel of rows with rules."""
        buffers = self._buffers
        logits = self._model.logits(buffers.sampled_hidden[:1])
        self.sampler.warm_up(buffers.inputs, logits, buffers.home.tokens)

    def largest(self) -> None:
        """Every token's hidden state, as eager steps want them, and the most choices."""
        sizes = self._sizes
        rows = min(sizes.max_tokens, sizes.max_rows)
        self._model.forward(self._buffers.batch(sizes.max_tokens, rows, False, []))
        self.choose_into(sizes.max_rows)

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Stages how the row's tokens are chosen, in the slot's words too."""
        request = row.request
        prompt = np.asarray(request.prompt_token_ids)
        self.sampler.admit(slot, request.sampling, prompt, row.seed, words, request.is_masked)

    def reset(self, slot: int, poison: bool) -> None:
        """Forgets a freed slot."""
        self.sampler.reset(slot, poison)

    # -- steps --------------------------------------------------------------------------------------------------------

    def kind_of(self, step: Step) -> int:
        """Graphs of steps that only decode read no media."""
        plan = step.plan
        decodes = plan.num_decode_rows == plan.num_rows and not plan.num_media
        return GraphKind.DECODE if decodes else GraphKind.MIXED

    def launch(self, step: Step, kind: int, size: int) -> None:
        """Forward, and the choice unless it waits; `size`: of the graph, 0 for none."""
        plan, launcher, variant = step.plan, self.launcher, step.variant
        sample_size = launcher.pick(GraphKind.SAMPLE, plan.num_sampled, variant) if plan.num_sampled else 0
        step.chosen = not step.waits
        if step.chosen and size and (sample_size or not plan.num_sampled):
            launcher.launch(plan, step.number, kind, size, sample_size, variant)
            return
        launcher.prep(plan, step.number)
        if size:
            launcher.replay(kind, size)
        else:
            self._run_eagerly(step, kind)
        if not step.chosen:
            self._prepare_choice(step, sample_size)
            return
        if sample_size:
            launcher.replay(GraphKind.SAMPLE, sample_size, variant)
        elif plan.num_sampled:
            self.choose_into(plan.num_sampled, variant)
        launcher.finish()

    def _run_eagerly(self, step: Step, kind: int) -> None:
        plan = step.plan
        batch = self._buffers.batch(plan.num_tokens, plan.num_rows, kind == GraphKind.DECODE, step.media)
        if not step.eager:
            self._keep_sampled(batch, plan.num_sampled)
            return
        step.hidden = self._model.forward(batch)  # [num_tokens, hidden_size]
        self._gather_sampled(step.hidden, plan.num_sampled)

    def _prepare_choice(self, step: Step, sample_size: int) -> None:
        """Behind the forward of a step that waits: logits, where a graph cannot choose for its rows."""
        count = step.plan.num_sampled
        if sample_size and self.sampler.is_by_lines(step.sampled_slots):
            step.notes["choice"] = sample_size
        else:
            step.notes["choice"] = self._model.logits(self._buffers.sampled_hidden[:count])

    def choose(self, step: Step) -> None:
        """The choice of a step that waited. Log-probabilities that take kernels of their own: notes["pending"]."""
        prepared, slots, buffers = step.notes.pop("choice"), step.sampled_slots, self._buffers
        if isinstance(prepared, int):
            self.sampler.send_moved(slots)
            self.launcher.replay(GraphKind.SAMPLE, prepared, step.variant)
        else:
            found = self.sampler.launch_special(buffers.inputs, prepared, buffers.home.tokens, slots)
            step.notes["pending"] = found
            self._end(buffers.sampled_hidden[: len(slots)], step.variant)
        self.launcher.finish()
        step.chosen = True

    def collect(self, step: Step) -> None:
        """Tokens and log-probabilities that came home with the step."""
        sampled = step.rows.sampled
        chosen = self._buffers.home.ring[step.number].numpy()[sampled]  # a copy: the ring is written again
        found = self.sampler.read(step.number, sampled, step.sampled_slots)
        step.home.logprobs = {int(sampled[place]): entry for place, entry in found.items()}
        step.home.take_tokens(sampled, chosen, self._vocab)


class DeviceMasks:
    """Lines of a step's masks on their way into the table that the choice reads."""

    def __init__(self, upload: LineUpload, sampler: DeviceSampler) -> None:
        self._upload, self._sampler = upload, sampler
        self.memory = upload.memory

    def send(self, step: Step, lines: Lines) -> None:
        """For the choice launched next; the time that masks take is a guess."""
        step.times.is_a_guess()
        slots = step.sampled_slots
        self._upload.send(lines, [self._sampler.line(int(slots[place])) for place in lines.places])
