"""Beam search: the likeliest answers, by short requests that share their prefixes through the prefix cache.

Owner: loop. In: an Answer that is open and has submitted nothing. Out: one Delta per choice, as if the engine had made
it, best first. Each round asks the engine for one token of every beam with the 2 * width likeliest, keeps the `width`
best continuations, and puts those that ended aside. It ends early only when nothing open can still win.

    beams (token ids, sum of log-probabilities) -> width requests of one token -> candidates -> beams | ended

The score is that of transformers' beam search: sum / length ** length_penalty, over prompt and answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engine.errors import EngineError
from engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from server.answer import Answer
from server.errors import from_engine
from server.job import Job


@dataclass(frozen=True, slots=True)
class Beam:
    """One answer as far as it goes."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0  # sum of log-probabilities
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason = FinishReason.NONE

    def score(self, prompt_len: int, penalty: float) -> float:
        """Higher is better; an end-of-sequence token has no length."""
        length = prompt_len + len(self.tokens) - (self.finish is FinishReason.STOP)
        return self.total / max(1, length) ** penalty


class BeamSearch:
    """The search for one prompt's best answers. Owner: loop."""

    def __init__(self, answer: Answer, at: int) -> None:
        self.answer = answer
        self.at = at  # which prompt
        self.job: Job = answer.jobs[at]
        self.width = answer.asked.n
        self.penalty = answer.asked.length_penalty
        self.ended: list[Beam] = []
        self.first: Delta | None = None  # of the first round: cached tokens, prompt log-probabilities
        params = self.job.request.sampling
        self.most = params.max_tokens
        self.shown = params.logprobs
        self.eos = () if params.ignore_eos else params.eos_token_ids
        self.stops = params.stop_token_ids

    async def run(self) -> None:
        """Ends the prompt's choices; returns at once when the answer has failed."""
        beams = [Beam()]
        for _ in range(self.most):
            deltas = await self.round(beams)
            if self.answer.error is not None:
                return
            if deltas is None:  # aborted: the best so far
                beams = [replace(beam, finish=FinishReason.ABORT) for beam in beams]
                break
            beams = self.best_next(beams, deltas)
            if not beams or self.settled(beams):
                break
        open_ends = [replace(beam, finish=beam.finish or FinishReason.LENGTH) for beam in beams]
        self.tell(self.ranked([*self.ended, *open_ends])[: self.width])

    async def round(self, beams: Sequence[Beam]) -> list[Delta] | None:
        """One token of every beam; None when the client or an operator has ended the answer."""
        answer, found = self.answer, dict[int, Delta]()
        done = asyncio.get_running_loop().create_future()

        def take(at: int, delta: Delta) -> None:
            found[at] = delta
            if len(found) == len(beams) and not done.done():
                done.set_result(None)

        try:
            for at, beam in enumerate(beams):
                answer.follow(answer.state.engine.submit(self.request(beam)), partial(take, at))
        except EngineError as error:
            answer.fail(from_engine(error, answer.state.places.retry_after()))
        await asyncio.wait((done, answer.finished), return_when="FIRST_COMPLETED")
        answer.unfollow()
        deltas = [found[at] for at in sorted(found)]
        for delta in deltas:
            if delta.error is not None:
                answer.fail(from_engine(delta.error))
        if answer.aborted or any(delta.finish_reason is FinishReason.ABORT for delta in deltas):
            return None
        if self.first is None and deltas:
            self.first = deltas[0]
            answer.metrics.first_token(time.monotonic())
        return deltas

    def request(self, beam: Beam) -> Request:
        """The prompt and what the beam has said, for one more token."""
        base, said = self.job.request, len(beam.tokens)
        positions = base.positions
        if positions is not None and said:
            places = np.arange(len(base.prompt_token_ids), len(base.prompt_token_ids) + said) + base.position_delta
            positions = np.concatenate([positions, np.tile(places, (3, 1))], axis=1).astype(np.int32)
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=max(2 * self.width, self.shown or 0),
            prompt_logprobs=None if said else base.sampling.prompt_logprobs,
        )
        ids = np.concatenate([base.prompt_token_ids, np.asarray(beam.tokens, np.int32)])
        return replace(base, prompt_token_ids=ids, sampling=sampling, positions=positions, n=1)

    def best_next(self, beams: Sequence[Beam], deltas: Sequence[Delta]) -> list[Beam]:
        """The `width` best continuations that go on; those that ended are put aside."""
        going: list[Beam] = []
        for beam, delta in zip(beams, deltas, strict=True):
            assert delta.logprobs
            entry = delta.logprobs[0]
            for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs), 1):
                if rank > 2 * self.width:
                    break
                self.grow(going, beam, token, logprob, rank, entry)
        going.sort(key=lambda beam: beam.total, reverse=True)
        return going[: self.width]

    def grow(self, going: list[Beam], beam: Beam, token: int, logprob: float, rank: int, entry: TokenLogprob) -> None:
        """One continuation of one beam, among those that go on or those that ended."""
        finish = FinishReason.NONE
        if token in self.eos:
            finish = FinishReason.STOP
        elif token in self.stops:
            finish = FinishReason.STOP_TOKEN
        logprobs = beam.logprobs
        if self.shown is not None:
            shown = self.shown
            told = TokenLogprob(token, logprob, rank, entry.top_ids[:shown], entry.top_logprobs[:shown])
            logprobs = (*logprobs, told)
        grown = Beam((*beam.tokens, token), beam.total + logprob, logprobs, finish)
        (self.ended if finish else going).append(grown)

    def settled(self, beams: Sequence[Beam]) -> bool:
        """Whether nothing that goes on can still be among the best: totals only fall."""
        if len(self.ended) < self.width:
            return False
        self.ended = self.ranked(self.ended)[: self.width]
        worst = self.score(self.ended[-1])
        prompt_len = len(self.job.request.prompt_token_ids)
        lengths = (prompt_len + len(beams[0].tokens), prompt_len + self.most)
        return all(beam.total / length**self.penalty <= worst for beam in beams for length in lengths)

    def score(self, beam: Beam) -> float:
        return beam.score(len(self.job.request.prompt_token_ids), self.penalty)

    def ranked(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=self.score, reverse=True)

    def tell(self, best: Sequence[Beam]) -> None:
        """The choices, each in one Delta."""
        for index in range(self.width):
            beam = best[index] if index < len(best) else Beam(finish=FinishReason.ABORT)  # cut off in the first round
            delta = Delta(index, list(beam.tokens), beam.finish, logprobs=list(beam.logprobs) or None)
            if beam.finish is FinishReason.STOP_TOKEN:
                delta.stop_token_id = beam.tokens[-1]
            if index == 0 and self.first is not None:
                delta.cached_tokens, delta.queued = self.first.cached_tokens, self.first.queued
                delta.prompt_logprobs = self.first.prompt_logprobs
            self.answer.take(self.at, delta)


async def search(answer: Answer) -> None:
    """All prompts of an answer, one after the other."""
    for at in range(len(answer.jobs)):
        if answer.error is None:
            await BeamSearch(answer, at).run()
