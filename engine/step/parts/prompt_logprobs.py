"""The prompt_logprobs part: log-probabilities of a prompt's own tokens.

Owner: device thread. A step with tokens of such a prompt runs eagerly, because every token's hidden state is needed.
The hidden states are projected to logits between the forward and sampling. A preempted prompt starts its list again.
The first output of the row with a sampled token contains the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch

from _fast.scheduler import Scheduler
from engine.base.config import EngineConfig
from engine.base.output import StepOutput
from engine.base.request import Request, TokenLogprob
from engine.models.base.model import Model
from engine.sampling.logprobs import CHUNK
from engine.sampling.pending import Pending, prompt_logprobs
from engine.step.backend.base import Backend
from engine.step.live import LiveRow, Place
from engine.step.parts.part import ABSENT, JOINS, WAITS, StepPart, Steps
from engine.step.sizes import Sizes, one_size_per_doubling
from engine.step.step import Step


@dataclass(slots=True)
class Due:
    """The n log-probabilities of prompt tokens that a step computes, for all its rows."""

    wanted: np.ndarray  # int64 [3, n]: index of a token in the step, id of the next token, number of top entries
    targets: list[tuple[list[TokenLogprob | None], int]]  # by row: its list, and the number of new entries (sum: n)
    named: list[tuple[int, ...]]  # [n]: requested ids; []: no row has any
    pending: Pending | None = None  # the n log-probabilities, being copied to the host; set on the stream

    def hand_out(self, entries: Iterable[TokenLogprob]) -> None:
        """Appends the n log-probabilities to the rows' lists."""
        left = iter(entries)
        for target, count in self.targets:
            target += islice(left, count)


class PromptLogprobs(StepPart):
    """Stores by slot the request and its list, which grows while the prompt is computed."""

    name = "prompt_logprobs"

    def __init__(self, config: EngineConfig, model: Model, sizes: Sizes) -> None:
        self._as_logits, self._vocab = config.logprobs_mode.endswith("_logits"), model.config.text.vocab_size
        self._model, self._sizes = model, sizes
        self._rows: dict[int, tuple[Request, list[TokenLogprob | None]]] = {}
        self._sent: set[int] = set()  # slots whose list was sent to the loop
        self._backend: Backend

    def start(self, steps: Steps) -> None:
        self._backend = steps.backend

    def warm_up(self, walk: bool) -> None:
        """Launches the kernels for up to CHUNK prompt tokens; longer steps launch the same kernels repeatedly."""
        model, most = self._model, min(CHUNK, self._sizes.max_tokens)
        hidden = torch.zeros(most, model.config.text.hidden_size, dtype=model.dtype, device=self._backend.rank.device)
        for count in one_size_per_doubling(list(range(1, most + 1))):
            wanted = np.zeros((3, count), np.int64)
            wanted[2] = 2
            prompt_logprobs(partial(self._logits, hidden, None), hidden.device, wanted, self._vocab, self._as_logits)

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        if request.sampling.prompt_logprobs is not None:
            place.reads_cache = False  # every token's hidden state is read

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if row.request.sampling.prompt_logprobs is None or row.choice > 0:
            return False
        self._rows[slot] = (row.request, [None])  # the first token has no log-probability
        return True

    def reset(self, slot: int, poison: bool) -> None:
        self._rows.pop(slot, None)
        self._sent.discard(slot)

    def role(self, step: Step) -> int:
        due = self._due(step)
        if due is not None:
            step.eager = True
            step.notes[self.name] = due
            return WAITS
        return JOINS if self._to_send(step) else ABSENT

    def between(self, step: Step) -> None:
        due = step.notes.get(self.name)
        if due is not None:
            step.run(self._project, step, due)

    def _project(self, step: Step, due: Due) -> None:
        """On the stream, after the forward: launches the log-probabilities."""
        if step.error is not None:
            return
        try:
            assert step.hidden is not None
            project = partial(self._logits, step.hidden, step.notes["adapters"])
            rest = self._vocab, self._as_logits, due.named
            due.pending = prompt_logprobs(project, step.hidden.device, due.wanted, *rest)
        except Exception as error:
            step.error = error

    def _logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of these tokens of the step, int64 [n]."""
        own = None if adapters is None else adapters.index_select(0, tokens)
        return self._model.logits(hidden.index_select(0, tokens), own)

    def collect(self, step: Step) -> None:
        due = step.notes.get(self.name)
        if due is not None:
            entries = due.pending.collect()
            due.hand_out(entries[number] for number in range(len(entries)))

    def after(self, step: Step, output: StepOutput, places: Sequence[int], scheduler: Scheduler) -> None:
        """Adds the list to the row's first output; a row that starts over has no output in this step."""
        for row, slot in self._to_send(step):
            if output.has_news(places[row]):
                step.home.extra(self.name, row, self._rows[slot][1])
                self._sent.add(slot)

    def ledger(self) -> dict[str, int]:
        return {self.name: len(self._rows)}

    def _to_send(self, step: Step) -> list[tuple[int, int]]:
        """(plan row, slot) of sampled rows whose list of log-probabilities was not sent yet."""
        slots = step.rows.slots[step.rows.sampled].tolist()
        rows = zip(step.rows.sampled.tolist(), slots)
        return [(row, slot) for row, slot in rows if slot in self._rows and slot not in self._sent]

    def _due(self, step: Step) -> Due | None:
        """The log-probabilities that this step has to compute; None if there are none."""
        rows = step.rows
        found: list[np.ndarray] = []  # int64 [3, count], by row
        targets = []
        named: list[tuple[int, ...]] = []
        for row, slot in enumerate(rows.slots.tolist()):
            if slot not in self._rows:
                continue
            request, target = self._rows[slot]
            prompt, done = request.prompt_token_ids, int(rows.computed[row])
            count = min(int(rows.lens[row]), len(prompt) - 1 - done)
            if count > 0:
                del target[done + 1 :]  # a preempted prompt is computed again
                k = request.sampling.prompt_logprobs or 0
                wanted = np.empty((3, count), np.int64)
                wanted[0] = np.arange(count) + rows.starts[row]
                wanted[1] = prompt[done + 1 : done + 1 + count].clip(0, self._vocab - 1)  # ids index the logits
                wanted[2] = self._vocab if k == -1 else min(k, self._vocab)
                found.append(wanted)
                targets.append((target, count))
                named += [request.sampling.logprob_token_ids] * count
        return Due(np.concatenate(found, axis=1), targets, named if any(named) else []) if found else None
