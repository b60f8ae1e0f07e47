"""HostForward: forward and sampling on the CPU.

Owner: device thread stages slots; the stream runs the rest. The sampling of a step waits until the previous step is
settled, because the allowed tokens of its rows are known only then.
"""

from __future__ import annotations

import numpy as np
import torch

from _fast.layout import RowFlag, RunEnd, SlotWord, TokenCode
from engine.base.config import EngineConfig
from engine.base.drafts import draft_config
from engine.base.mask_lines import Lines
from engine.kernels.sampling.surviving import survivals_on
from engine.layers.batch import Batch
from engine.sampling.sampler import Sampler
from engine.step.backend.host.slots import HostSlots
from engine.step.backend.host.verify import verify
from engine.step.live import LiveRow
from engine.step.rank import Rank
from engine.step.rows import RowArrays
from engine.step.sizes import Sizes
from engine.step.step import NO_ENDINGS, Chosen, Endings, Step


class HostForward:
    """The forward of models that generate tokens."""

    def __init__(
        self, config: EngineConfig, rank: Rank, sizes: Sizes, slots: HostSlots, endings: Endings = NO_ENDINGS
    ) -> None:
        """`endings`: functions that run after each sampling."""
        self._model, self._vocab = rank.model, rank.model.config.text.vocab_size
        self._slots, self._endings, drafts = slots, endings, draft_config(config.speculative)
        self.survivals = survivals_on(() if drafts is None else drafts.forced, "cpu")
        self.sampler = Sampler(sizes.max_slots, self._vocab, config.logprobs_mode)

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        request = row.request
        prompt = np.asarray(request.prompt_token_ids)
        self._slots.words.view(np.uint64)[slot, SlotWord.SEED_LOW // 2] = row.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.sampler.admit(slot, request.sampling, prompt, row.seed, words, request.is_masked)

    def reset(self, slot: int, poison: bool) -> None:
        self.sampler.reset(slot, poison)

    def launch(self, step: Step, rows: RowArrays, batch: Batch) -> None:
        index, adapters = batch.sample_index, batch.adapters
        assert index is not None
        if step.eager or len(index) == len(batch.token_ids):  # every token's hidden state is read
            batch.sample_index = None
        hidden = self._model.forward(batch)  # [num_tokens or num_sampled, hidden_size]
        if step.eager:
            step.hidden, step.notes["adapters"] = hidden, adapters
        if len(index):
            sampled = hidden[index] if step.eager else hidden
            own = None if adapters is None else adapters[index]
            step.notes["rows"] = rows
            step.notes["logits"] = self._model.logits(sampled, own)  # [num_lines, vocab] float32
            if self._endings.drafting:
                step.notes["sampled"] = sampled

    def choose(self, step: Step) -> None:
        logits: torch.Tensor | None = step.notes.pop("logits", None)
        lines: Lines | None = step.notes.pop("lines", None)
        rows, slots = step.rows, step.sampled_slots
        runs = np.empty((0, 1), np.int64)
        if logits is not None:
            sampled, resolved = rows.sampled, step.notes.pop("rows")
            if step.plan.drafting:
                rest = self._slots, lines, step.home.logprobs, self.survivals
                runs = verify(self.sampler, logits, resolved, *rest)
            else:
                index = rows.computed[sampled] + rows.lens[sampled] - self._slots.positions.prompt_len[slots]
                chosen, logprobs = self.sampler.sample(logits, slots, index, lines)
                width = step.plan.width
                step.home.logprobs = {int(sampled[place]) * width: entry for place, entry in logprobs.items()}
                self._slots.last_token[slots] = np.maximum(chosen, 0)
                runs = chosen[:, None]
            if self._endings.drafting:
                self._end(runs, step, resolved)
            runs[self._slots.outside[slots], 0] = int(TokenCode.OUTSIDE)
        step.home.take_tokens(rows.sampled, runs, self._vocab)

    def _end(self, runs: np.ndarray, step: Step, rows: RowArrays) -> None:
        """Runs the endings; `rows`: with their drafts."""
        slots, drafting = step.sampled_slots, step.plan.drafting
        fed = (rows.flags[rows.sampled] & RowFlag.FEED) > 0
        verified = np.where(fed, rows.lens[rows.sampled] - 1, 0)
        row = np.repeat(np.arange(len(slots)), 1 + verified)  # of each line
        place = np.arange(len(row)) - np.repeat((1 + verified).cumsum() - (1 + verified), 1 + verified)
        known = rows.computed[rows.sampled] + rows.lens[rows.sampled] - verified
        number = (known - self._slots.positions.prompt_len[slots])[row] + place
        lines = (row * runs.shape[1] + place, slots[row], number)
        words = tuple(torch.from_numpy(each.astype(np.int32)) for each in (*lines, slots))
        hidden, state = step.notes.pop("sampled"), self._slots.tensors
        chosen = Chosen(torch.from_numpy(runs), words[3], hidden, state, (words[0], words[1], words[2]))
        for ending in self._endings.drafting if drafting else self._endings.resting:
            ending(chosen, step.variant)
        if drafting:  # a run's end says how many drafts follow, and how many were verified
            code = self._slots.words[slots, SlotWord.NUM_DRAFTS] + RunEnd.VERIFIED * verified
            runs -= (runs <= TokenCode.END) * code[:, None]


class HostMasks:
    """Mask lines of a step in host memory; the host's sampler reads them without a copy."""

    def memory(self, count: int, words: int) -> np.ndarray:
        return np.zeros((count, words), np.int32)

    def send(self, step: Step, lines: Lines) -> None:
        step.notes["lines"] = lines
