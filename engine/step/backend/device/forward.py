"""DeviceForward: forward and sampling on an accelerator, recorded at start and replayed in each step.

Owner: device thread. A plain step is launched at once with its sampling. If sampling has to wait, sampling is launched
after the previous step was settled. A forward runs kernel by kernel if a part wants it eager or it exceeds all graphs.

    host    plan n+1 |                                      plan n+2 |
    device  ... step n, n home | step n+1: prep reads its plan, forward, choice, tokens home | ...

Each decode size is recorded twice: as one graph for plain steps; and in parts for mixed steps, special steps, and steps
after which a gap is measured. The second recording costs about 10 ms per size at start and nothing per step. Steps with
adapters have twice the launches, and those of more than WHOLE_ROWS rows run in parts alone: the boundaries between the
parts take less than a hundredth of such a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from _fast.launcher import Launcher
from _fast.layout import GraphKind
from engine.base.config import EngineConfig
from engine.base.drafts import draft_config
from engine.base.mask_lines import Lines
from engine.kernels.sampling.surviving import survivals_on
from engine.kernels.sampling.top_logprobs import LINE
from engine.kernels.sampling.verify import verify
from engine.sampling.device import DeviceSampler
from engine.sampling.dry import history_for
from engine.sampling.masks import LineUpload
from engine.step.backend.device.buffers import StepBuffers
from engine.step.backend.device.forwards import Forwards, RankForward
from engine.step.live import LiveRow
from engine.step.rank import Rank
from engine.step.sizes import Sizes, decode_sizes, fewer_decode_sizes, line_sizes, pass_sizes
from engine.step.step import NO_ENDINGS, Chosen, Endings, Step

WHOLE_ROWS = 8  # of a step of another forward that is one graph


class DeviceForward(RankForward):
    """The forward of models that generate tokens; of several ranks, the first rank's, which chooses the tokens."""

    def __init__(
        self, config: EngineConfig, rank: Rank, sizes: Sizes, buffers: StepBuffers, endings: Endings = NO_ENDINGS
    ) -> None:
        """`endings`: functions that run after each sampling and are recorded with it."""
        assert rank.accelerator is not None
        super().__init__(rank, sizes, buffers)
        self._config, self._whole, self._buffers = config, rank.model, buffers
        self.all = Forwards(self)  # replaced if there are further ranks
        self._vocab = rank.model.config.text.vocab_size
        # The pinned ring of log-probabilities, int32 [records, max_rows, width, LINE].
        self.logprob_words = buffers.home.lines(sizes.width * LINE).unflatten(2, (sizes.width, LINE))
        self.sampler = DeviceSampler(
            buffers.slots.tensors,
            sizes.max_slots,
            sizes.max_rows,
            self._vocab,
            rank.accelerator.device,
            config.logprobs_mode,
            config.max_logprobs,
            self.logprob_words,
            history_for(sizes.max_model_len),
            sizes.max_lines,
        )
        self.ruled = self.sampler
        drafts = draft_config(config.speculative)
        self.survivals = survivals_on(() if drafts is None else drafts.forced, rank.accelerator.device)
        self._endings = endings
        self.launcher: Launcher  # set by the backend

    # -- what is launched, and recorded as graphs at start ------------------------------------------------------------

    def _choose(self, hidden: torch.Tensor, adapters: torch.Tensor | None, variant: int) -> None:
        """Samples tokens from hidden states [lines, hidden_size] and launches the copy of the tokens to the host."""
        buffers = self._buffers
        logits, runs = self._logits(hidden, adapters), self._drafts(variant)
        self.sampler.launch_plain(buffers.inputs, logits, buffers.home.tokens, runs=runs)
        self._end(hidden, variant)

    def _end(self, hidden: torch.Tensor, variant: int) -> None:
        buffers = self._buffers
        slots, runs, inputs, drafting = buffers.slots.tensors, buffers.home.runs, buffers.inputs, self._drafts(variant)
        if drafting:
            verify(runs, slots, self.sampler.lines.tables, inputs, self.survivals)
        count = len(hidden)
        lines = inputs.sample_row[:count], inputs.sample_slot[:count], inputs.sample_place[:count]
        chosen = Chosen(runs, inputs.row_slot, hidden, slots, lines)
        for ending in self._endings.drafting if drafting else self._endings.resting:
            ending(chosen, variant)
        self._share_tokens()
        buffers.send_tokens(drafting)

    def end_choice(self, lines: int, variant: int) -> None:
        self._end(self._buffers.sampled_hidden[:lines], variant)

    def record(self, variants: Iterable[int]) -> None:
        """Records the graphs of decode-only steps, whole and in parts, and of a drafter's passes, on every rank."""
        chosen, other = self._config.cudagraph_capture_sizes, self._buffers.variants.forward
        sizes, fewer = (each(self._sizes.max_rows, chosen) for each in (decode_sizes, fewer_decode_sizes))
        for size in reversed(sizes):
            for forward in (0, other) if other and size in fewer else (0,):
                self.record_forward(GraphKind.DECODE, size, forward)
                for variant in variants:
                    if variant & other == forward:
                        self._record_choice(size, variant)
                        if not forward or size <= WHOLE_ROWS:
                            self._record_step(size, variant)
        for rows in reversed(pass_sizes(self._sizes.max_rows)):
            for kind in self._buffers.pass_kinds:
                self._record_pass(kind, rows)
        for lines in reversed(line_sizes(self._sizes.max_rows, self._sizes.max_lines)):
            for variant in variants:
                if self._drafts(variant):
                    self._record_choice(lines, variant)

    def _record_pass(self, kind: int, rows: int) -> None:
        """Records a pass of a drafter."""
        self.launcher.set_graph(kind, 0, rows, *self.all.capture(lambda own: own.draft_into(kind, rows)))

    def _record_step(self, size: int, variant: int) -> None:
        """Records the whole step, whose parts have been recorded."""
        whole = self.all.capture(lambda own: own.decode(size, variant), met=True)
        self.launcher.set_graph(GraphKind.STEP, variant, size, *whole)

    def _record_choice(self, lines: int, variant: int) -> None:
        """Records sampling for `lines` lines, which variants of the forward share unless the head has adapters."""
        buffers = self._buffers
        if buffers.adapts_head or not variant & buffers.variants.forward:
            choice = self.all.capture(lambda own: own.choose_into(lines, variant))
            self.launcher.set_graph(GraphKind.SAMPLE, variant, lines, *choice)

    def record_forward(self, kind: int, tokens: int, variant: int = 0) -> None:
        """Records a forward on every rank, after an abridged forward, which loads every kernel."""
        self.all.run(lambda own: own.abridged_into(kind, tokens, variant))
        whole = self.all.capture(lambda own: own.forward_into(kind, tokens, variant), met=True)
        self.launcher.set_graph(kind, variant, tokens, *whole)

    def warm_up(self) -> None:
        buffers = self._buffers
        logits = self._logits(buffers.sampled_hidden[:1])
        self.sampler.warm_up(buffers.inputs, logits, buffers.home.tokens)

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Stages the row's sampling parameters, and completes the slot's words."""
        request = row.request
        prompt = np.asarray(request.prompt_token_ids)
        self.sampler.admit(slot, request.sampling, prompt, row.seed, words, request.is_masked)

    def reset(self, slot: int, poison: bool) -> None:
        """Clears a freed slot."""
        self.sampler.reset(slot, poison)

    # -- steps --------------------------------------------------------------------------------------------------------

    def kind_of(self, step: Step) -> int:
        """DECODE if the step only decodes and has no media, which decode graphs do not read; else MIXED."""
        plan = step.plan
        decodes = plan.num_decode_rows == plan.num_rows and not plan.num_media
        return GraphKind.DECODE if decodes else GraphKind.MIXED

    def launch(self, step: Step, kind: int, size: int) -> None:
        """Launches the forward, and sampling unless it has to wait; `size`: tokens of the graph, 0: no graph."""
        plan, launcher, variant = step.plan, self.launcher, step.variant
        sample_size = launcher.pick(GraphKind.SAMPLE, plan.num_lines, variant) if plan.num_sampled else 0
        step.chosen = not step.waits
        if not step.chosen and plan.drafting:
            self._buffers.home.await_drafts(step.number)
        if step.chosen and size and (sample_size or not plan.num_sampled):
            launcher.launch(plan, step.number, kind, size, sample_size, variant)
            return
        launcher.prep(plan, step.number)
        if plan.num_drafted and not launcher.pick(GraphKind.DRAFT, plan.num_drafted):
            self._draft_eagerly(step)
        if size:
            launcher.replay(kind, size, variant)
        else:
            self._run_eagerly(step, kind)
        if not step.chosen:
            self._prepare_choice(step, sample_size)
            return
        if sample_size:
            launcher.replay(GraphKind.SAMPLE, sample_size, variant)
        elif plan.num_sampled:
            self.all.run(lambda own: own.choose_into(plan.num_lines, variant))
        launcher.finish()

    def _draft_eagerly(self, step: Step) -> None:
        rows = next(size for size in pass_sizes(self._sizes.max_rows) if size >= step.plan.num_drafted)
        kinds = self._buffers.pass_kinds
        kinds = kinds[:1] + kinds[1:] * (step.plan.depth - 1)  # as Launcher.launch_passes
        self.all.run(lambda own: [own.draft_into(kind, rows) for kind in kinds])

    def _run_eagerly(self, step: Step, kind: int) -> None:
        decodes, media = kind == GraphKind.DECODE, self.all.copies_of(step.media)

        def run(own: RankForward) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            return own.eager(step.plan, decodes, step.eager, media[own.rank.number], step.variant)

        hidden, adapters = self.all.run(run)[0]
        if step.eager:
            step.hidden, step.notes["adapters"] = hidden, adapters

    def _prepare_choice(self, step: Step, sample_size: int) -> None:
        """After the forward of a step that waits: notes the size of the sampling graph, or computes the logits if no
        graph can sample for the rows."""
        count = step.plan.num_lines
        if sample_size and self.sampler.is_by_lines(step.sampled_slots):
            step.notes["choice"] = sample_size
        else:
            buffers = self._buffers
            adapters = buffers.sampled_adapters(count, step.variant)
            step.notes["choice"] = self._whole.logits(buffers.sampled_hidden[:count], adapters)

    def choose(self, step: Step) -> None:
        """Samples for a step that waited. Log-probabilities from separate kernels go to notes["pending"]."""
        prepared, slots, buffers = step.notes.pop("choice"), step.sampled_slots, self._buffers
        if isinstance(prepared, int):
            self.sampler.send_moved(slots)
            self.launcher.replay(GraphKind.SAMPLE, prepared, step.variant)
        else:
            runs = self._drafts(step.variant)
            found = self.sampler.launch_special(buffers.inputs, prepared, buffers.home.tokens, slots, runs)
            step.notes["pending"] = found
            self.all.run(lambda own: own.end_choice(step.plan.num_lines, step.variant))
        self.launcher.finish()
        step.chosen = True

    def collect(self, step: Step) -> None:
        """Reads the step's tokens and log-probabilities from pinned memory."""
        sampled = step.rows.sampled
        chosen = self._buffers.home.ring[step.number].numpy()[sampled]  # a copy, because a later step writes the ring
        step.home.logprobs = self.sampler.read(step.number, sampled, step.sampled_slots, (chosen >= 0).sum(1))
        step.home.take_tokens(sampled, chosen, self._vocab)


class DeviceMasks:
    """Uploads a step's mask lines into the table that sampling reads."""

    def __init__(self, upload: LineUpload, sampler: DeviceSampler) -> None:
        self._upload, self._sampler = upload, sampler
        self.memory = upload.memory

    def send(self, step: Step, lines: Lines) -> None:
        """Uploads the lines for the sampling that is launched next. The step's duration is unknown after that."""
        step.times.is_a_guess()
        slots, sampler = step.sampled_slots, self._sampler
        targets = [
            sampler.line_behind(int(lines.firsts[place]) + after) if after else sampler.line(int(slots[place]))
            for place, after in zip(lines.places, lines.after)
        ]
        self._upload.send(lines, targets)
