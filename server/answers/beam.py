"""Beam search: the likeliest answers, by short requests that share their prefixes through the prefix cache.

Owner: loop. In: an Answer that is open and has submitted nothing. Out: one Delta per choice, as if the engine had
generated it, best first. Each round requests one token of every beam with the 2 * width likeliest tokens, keeps the
`width` best continuations, and collects the beams that ended. The search stops early only if no open beam can still
win.

    beams (token ids, sum of log-probabilities) -> width requests of one token -> candidates -> beams | ended

The score is that of transformers' beam search: sum / length ** length_penalty, over prompt and answer. With a grammar,
the candidates are the likeliest allowed tokens, by the same log-probabilities; each beam has its own matcher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from engine.base.errors import EngineError
from engine.base.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from engine.grammar.row import GrammarRow
from server.answers.answer import Answer
from server.answers.beam_lines import Line, grown_rows, lines_of
from server.errors import from_engine
from server.jobs.job import Job

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens of one candidate answer so far."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0  # sum of log-probabilities
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason = FinishReason.NONE
    row: GrammarRow | None = None  # state of the grammar, if the answer has one

    def score(self, prompt_len: int, penalty: float) -> float:
        """Length-normalised score, higher is better; an end-of-sequence token does not count as length."""
        length = prompt_len + len(self.tokens) - (self.finish is FinishReason.STOP)
        return self.total / max(1, length) ** penalty


class BeamSearch:
    """The search for one prompt's best answers. Owner: loop."""

    def __init__(self, answer: Answer, at: int) -> None:
        self.answer = answer
        self.at = at  # index of the prompt
        self.job: Job = answer.jobs[at]
        self.width = answer.asked.n
        self.penalty = answer.asked.length_penalty
        self.ended: list[Beam] = []
        self.first: Delta | None = None  # delta of the first round: cached tokens, prompt log-probabilities
        params = self.job.request.sampling
        self.most = params.max_tokens
        self.num_logprobs = params.logprobs
        self.eos = () if params.ignore_eos else params.eos_token_ids
        self.stops = params.stop_token_ids

    async def run(self) -> None:
        """Run the search and end the prompt's choices; returns at once if the answer has failed."""
        request = self.job.request
        beams = [Beam(row=None if request.grammar is None else GrammarRow(request.grammar, request.sampling))]
        for _ in range(self.most):
            lines = await self.lines(beams)
            beams, lines = self.without_finished(beams, lines)
            if self.answer.error is not None or not beams:
                break
            entries = await self.round(beams, lines)
            if self.answer.error is not None:
                return
            if entries is None:  # aborted: deliver the best so far
                beams = [replace(beam, finish=FinishReason.ABORT) for beam in beams]
                break
            beams = await self.best_next(beams, lines, entries)
            if not beams or self.settled(beams):
                break
        if self.answer.error is None:
            open_ends = [replace(beam, finish=beam.finish or FinishReason.LENGTH) for beam in beams]
            self.deliver(self.ranked([*self.ended, *open_ends])[: self.width])

    async def lines(self, beams: Sequence[Beam]) -> list[Line]:
        """The allowed next tokens of each beam."""
        if self.job.request.grammar is None:
            return [Line()] * len(beams)
        return await self.in_pool(partial(lines_of, [beam.row for beam in beams], self.answer.state.vocabulary.width))

    def without_finished(self, beams: Sequence[Beam], lines: Sequence[Line]) -> tuple[list[Beam], list[Line]]:
        """The beams that may continue. The answer fails if the grammar allows no continuation and no beam has ended."""
        for beam, line in zip(beams, lines):
            if line.finish is FinishReason.COMPLETE:
                self.ended.append(replace(beam, finish=line.finish))
        going = [(beam, line) for beam, line in zip(beams, lines) if not line.finish]
        errors = [line.error for line in lines if line.error is not None]
        if errors and not going and not self.ended:
            self.answer.fail(from_engine(errors[0], param=self.answer.form_param))
        return [beam for beam, _ in going], [line for _, line in going]

    async def round(self, beams: Sequence[Beam], lines: Sequence[Line]) -> list[TokenLogprob] | None:
        """The likeliest next tokens of every beam; None if the client or an operator has ended the answer."""
        top = max(2 * self.width, self.num_logprobs or 0)
        requests = [
            self.request(beam, (self.num_logprobs or 0) if line.listed else top, line.listed)
            for beam, line in zip(beams, lines)
        ]
        entries = await self.ask(requests)
        short = [
            at for at, (line, entry) in enumerate(zip(lines, entries or ())) if line.is_short(entry, 2 * self.width)
        ]
        if entries is None or not short:
            return entries
        again = await self.ask([self.request(beams[at], self.num_logprobs or 0, lines[at].tokens) for at in short])
        for at, entry in zip(short, again or ()):
            entries[at] = entry
        return None if again is None else entries

    async def ask(self, requests: Sequence[Request]) -> list[TokenLogprob] | None:
        """One token of each request; None if the answer has ended."""
        answer, found = self.answer, dict[int, Delta]()
        done = asyncio.get_running_loop().create_future()

        def take(at: int, delta: Delta) -> None:
            found[at] = delta
            if len(found) == len(requests) and not done.done():
                done.set_result(None)

        try:
            for at, request in enumerate(requests):
                answer.follow(answer.state.engine.submit(request), partial(take, at))
        except EngineError as error:
            answer.fail(from_engine(error, answer.state.places.retry_after(), self.job.param))
        await asyncio.wait((done, answer.finished), return_when="FIRST_COMPLETED")
        answer.unfollow()
        deltas = [found[at] for at in sorted(found)]
        for delta in deltas:
            if delta.error is not None:
                answer.fail(from_engine(delta.error, param=answer.form_param))
        if answer.aborted or any(delta.finish_reason is FinishReason.ABORT for delta in deltas):
            return None
        if self.first is None and deltas:
            self.first = deltas[0]
            answer.metrics.first_token(time.monotonic())
        return [delta.logprobs[0] for delta in deltas if delta.logprobs]

    async def in_pool(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self.answer.state.pool, work)

    def request(self, beam: Beam, top: int, listed: tuple[int, ...]) -> Request:
        """A request for one more token after the prompt and the beam's tokens, with log-probabilities of other
        tokens.
        """
        base, said = self.job.request, len(beam.tokens)
        positions = base.positions
        if positions is not None and said:
            places = np.arange(len(base.prompt_token_ids), len(base.prompt_token_ids) + said) + base.position_delta
            positions = np.concatenate([positions, np.tile(places, (len(positions), 1))], axis=1).astype(np.int32)
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=top,
            logprob_token_ids=listed,
            prompt_logprobs=None if said else base.sampling.prompt_logprobs,
        )
        ids = np.concatenate([base.prompt_token_ids, np.asarray(beam.tokens, np.int32)])
        return replace(base, prompt_token_ids=ids, sampling=sampling, positions=positions, n=1, grammar=None)

    async def best_next(
        self, beams: Sequence[Beam], lines: Sequence[Line], entries: Sequence[TokenLogprob]
    ) -> list[Beam]:
        """The `width` best continuations that have not ended; those that ended go to `self.ended`."""
        grown = [
            self.grown(beam, token, logprob, rank, entry)
            for beam, line, entry in zip(beams, lines, entries, strict=True)
            for rank, (token, logprob) in enumerate(line.likeliest(entry, 2 * self.width), 1)
        ]
        if self.job.request.grammar is not None:
            grown = await self.held(grown)
        self.ended += [beam for beam in grown if beam.finish]
        going = [beam for beam in grown if not beam.finish]
        going.sort(key=lambda beam: beam.total, reverse=True)
        return going[: self.width]

    def grown(self, beam: Beam, token: int, logprob: float, rank: int, entry: TokenLogprob) -> Beam:
        """One continuation of one beam; its last token may end the beam."""
        finish = FinishReason.NONE
        if token in self.eos:
            finish = FinishReason.STOP
        elif token in self.stops:
            finish = FinishReason.STOP_TOKEN
        logprobs = beam.logprobs
        if self.num_logprobs is not None:
            most = self.num_logprobs
            line = TokenLogprob(token, logprob, rank, entry.top_ids[:most], entry.top_logprobs[:most])
            logprobs = (*logprobs, line)
        return Beam((*beam.tokens, token), beam.total + logprob, logprobs, finish, beam.row)

    async def held(self, beams: Sequence[Beam]) -> list[Beam]:
        """The beams with their own grammar rows, advanced by the last token; complete if the grammar allows no further
        token.
        """
        pairs = [(beam.row, beam.tokens[-1]) for beam in beams if beam.row is not None and not beam.finish]
        rows = iter(await self.in_pool(partial(grown_rows, pairs)))
        found = []
        for beam in beams:
            if beam.row is None or beam.finish:
                found.append(beam)
                continue
            row, complete = next(rows)
            found.append(replace(beam, row=row, finish=FinishReason.COMPLETE if complete else beam.finish))
        return found

    def settled(self, beams: Sequence[Beam]) -> bool:
        """Whether no open beam can still become one of the best: totals only decrease."""
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

    def deliver(self, best: Sequence[Beam]) -> None:
        """Pass each choice to the answer as one Delta."""
        for index in range(self.width):
            beam = best[index] if index < len(best) else Beam(finish=FinishReason.ABORT)  # ended in the first round
            delta = Delta(index, list(beam.tokens), beam.finish, logprobs=list(beam.logprobs) or None)
            if beam.finish is FinishReason.STOP_TOKEN:
                delta.stop_token_id = beam.tokens[-1]
            if index == 0 and self.first is not None:
                delta.cached_tokens, delta.queued = self.first.cached_tokens, self.first.queued
                delta.extras = dict(self.first.extras)
            self.answer.take(self.at, delta)


async def search(answer: Answer) -> None:
    """Search all prompts of an answer, one after the other."""
    for at in range(len(answer.jobs)):
        if answer.error is None:
            await BeamSearch(answer, at).run()
