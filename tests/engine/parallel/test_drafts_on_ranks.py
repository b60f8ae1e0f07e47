"""Drafts on several ranks: rank 0 guesses, all ranks compute the guesses. Answers and drafts are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import engine.run.start
from _fast.layout import SlotWord
from engine.cache.tokens import GuestSpec
from engine.models.drafters.small_head import LentHead
from engine.parallel.host import HostExchange
from server.start.gguf import as_folder
from tests import block_drafters, drafters, tiny
from tests.drafters import PROMPTS
from tests.engine import test_dflash, test_draft_model, test_drafter, test_dspark, test_mtp, test_suffix
from tests.engine import test_drafted_grammars as grammars
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.kit import split
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine.test_drafts import SETTINGS as DRAFTED
from tests.engine.test_drafts import check, check_twice, collected, drafts_of, ngram, requests_of
from tests.engine.test_grammar_rows import FOLDER
from tests.engine_kit import answer, running, text_request
from tests.quant import ggufs
from tests.quant.written import VARIANTS, write

TARGET = test_drafter.TARGET
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
PATHS = ["host", "device", "steady"]


@pytest.fixture
def opened(request, monkeypatch):
    """The accelerators of the engine that is started next; empty on a host."""
    opened: list[Any] = []

    def open_accelerator(_device):
        device = request.param == "device"
        opened.append(HostAccelerator() if device else StandInAccelerator(next(iter(opened), None)))
        return opened[-1]

    if request.param != "host":
        monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)
    yield opened
    assert all(not getattr(made, "errors", []) for made in opened)


class Case(NamedTuple):
    """A drafter, the steps and drafts of its first answer, and the answer."""

    folder: Path
    asked: dict[str, Any]
    counts: tuple[int, int, int]
    text: tuple[int, ...]


def of_eagle(form: str) -> Case:
    return Case(
        tiny.checkpoint(TARGET), test_drafter.asked(3, form), test_drafter.expected(0, 3, form), test_drafter.text(0)
    )


def of_block(asked: dict[str, Any], form: block_drafters.Form) -> Case:
    return Case(tiny.checkpoint(TARGET), asked, test_dflash.expected(0, 5, form), test_drafter.text(0))


def of_model() -> Case:
    asked = test_draft_model.asked(3)
    return Case(tiny.checkpoint(TARGET), asked, test_draft_model.expected(0, 3), test_draft_model.text(0))


CASES: dict[str, Callable[[], Case]] = {
    "eagle3": lambda: of_eagle("flat"),
    "eagle3 over the last hidden state": lambda: of_eagle("flat-layers"),
    "p-eagle": lambda: of_eagle("parallel"),
    "mtp": lambda: Case(test_mtp.checkpoint(), test_mtp.asked(3), test_mtp.expected(0, 3), test_mtp.text(0)),
    "dflash, the target's head": lambda: of_block(test_dflash.asked(5, "flat"), test_dflash.FORMS["flat"]),
    "dspark": lambda: of_block(test_dspark.asked(5, "flat"), test_dspark.FORMS["flat"]),
    "a draft model": of_model,
}
EAGER = {"enforce_eager": True}
SETTINGS: dict[str, dict[str, Any]] = {"": {}, "chunks": {"max_prefill_chunk": 3}, "eager": EAGER}
SHORT = [
    ("eagle3", "host", 2, ""),
    ("eagle3", "device", 4, "chunks"),
    ("eagle3 over the last hidden state", "steady", 2, ""),
    ("dflash, the target's head", "steady", 2, ""),
    ("a draft model", "device", 2, "chunks"),
]
ALL = [
    pytest.param(*each, marks=() if each in SHORT else pytest.mark.full)
    for each in product(CASES, PATHS, (2, 4), SETTINGS)
    if each[0] != "mtp" or each[2] == 2  # its heads cannot be dealt out over four ranks
]


@pytest.mark.parametrize(("name", "opened", "ranks", "settings"), ALL, indirect=["opened"])
async def test_drafts_are_those_of_one_rank(opened, name, ranks, settings):
    case = CASES[name]()
    async with running(case.folder, tensor_parallel=ranks, speculative=case.asked, **SETTINGS[settings]) as own:
        (tokens,) = await answer(own, text_request(PROMPTS[0], len(case.text) - len(PROMPTS[0]), ignore_eos=True))
        assert tokens == list(case.text[len(PROMPTS[0]) :])
        drafts = drafts_of(own)
        assert case.counts[2] >= 5, "a drafter that is never right would not show an error"
        assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == case.counts


@pytest.mark.parametrize(
    ("method", "opened", "settings"),
    [
        pytest.param("ngram", "device", DRAFTED[1], id="ngram-chunks", marks=pytest.mark.full),
        pytest.param("ngram", "steady", DRAFTED[2], id="ngram-pressure"),
        pytest.param("suffix", "steady", {}, id="suffix"),
        *[
            pytest.param(method, path, settings, marks=pytest.mark.full)
            for method, settings, path in product(("suffix", "eagle3"), (*DRAFTED, EAGER), PATHS)
        ],
    ],
    indirect=["opened"],
)
async def test_answers_are_those_of_one_rank_without_drafts(opened, method, settings):
    """Rules, log-probabilities, several choices, preempted rows, cached prefixes."""
    asked = {"ngram": ngram(4), "suffix": SUFFIX}.get(method) or test_drafter.asked(4)
    requests = requests_of(5, 9, 32)
    async with running(tiny.checkpoint(TARGET), **settings) as own:
        wanted = await collected(own, requests)
    opened.clear()
    async with running(tiny.checkpoint(TARGET), tensor_parallel=2, speculative=asked, **settings) as own:
        await check_twice(own, requests, wanted)
        drafts = drafts_of(own)
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize("opened", ["device", pytest.param("steady", marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize("method", ["ngram", pytest.param("eagle3", marks=pytest.mark.full)])
async def test_drafts_under_a_grammar_are_those_of_one_rank(opened, method):
    """The host fills the masks along rank 0's drafts."""
    eagle = {"model": str(drafters.eagle3(FOLDER.name)), "num_speculative_tokens": 3} if method == "eagle3" else {}
    found, requests = [], grammars.requests_of(1, 8)
    for ranks, speculative in ((1, {}), (2, eagle or ngram(4))):
        opened.clear()
        async with running(FOLDER, tensor_parallel=ranks, speculative=speculative) as own:
            found.append(await collected(own, requests))
            drafts = drafts_of(own)
    check(*found)
    assert (drafts.num_draft_tokens if eagle else drafts.num_accepted_tokens) > 0


class Unshared:
    """A mistake: other ranks lack something that rank 0 has sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lacking: SlotWord | str) -> None:
        self.lacking, self._share, self._guesses = lacking, HostExchange.share, HostExchange.share_guesses
        monkeypatch.setattr(HostExchange, "share", lambda link, *given: self.share(link, *given))
        monkeypatch.setattr(HostExchange, "share_guesses", lambda link, inputs: self.share_guesses(link, inputs))

    def share(self, link, inputs, slots):
        words, drafts = slots.words.clone(), slots.drafts.clone()
        self._share(link, inputs, slots)
        if link.rank and isinstance(self.lacking, SlotWord):
            slots.word(self.lacking).copy_(words[:, self.lacking])
        elif link.rank and self.lacking == "drafts":
            slots.drafts.copy_(drafts)

    def share_guesses(self, link, inputs):
        before = inputs.token_ids.clone()
        self._guesses(link, inputs)
        if link.rank and self.lacking == "guesses":  # the rank has not waited for the pass
            inputs.token_ids.copy_(before)


@pytest.mark.parametrize("lacking", ["", SlotWord.LENGTH, SlotWord.NUM_DRAFTS, "drafts", "guesses"])
@pytest.mark.parametrize("opened", ["device"], indirect=True)
async def test_a_rank_that_lacks_what_rank_0_has_drafted_is_found(opened, lacking, monkeypatch):
    full = list(test_drafter.text(0) if lacking == "guesses" else test_suffix.text()[:85])
    prompt, asked = (8, test_drafter.asked(3)) if lacking == "guesses" else (50, ngram(4))
    Unshared(monkeypatch, lacking)
    async with running(tiny.checkpoint(TARGET), tensor_parallel=2, speculative=asked) as own:
        found = []
        async with own.submit(text_request(full[:prompt], len(full) - prompt, ignore_eos=True)) as stream:
            async for delta in stream:
                found += delta.token_ids
        assert lacking or drafts_of(own).num_accepted_tokens > 0
    assert (found == full[prompt:]) == (not lacking)


@pytest.mark.parametrize("opened", ["host", "device"], indirect=True)
async def test_rank_0_alone_holds_the_drafter(opened):
    held = []
    for speculative in ({}, test_drafter.asked(3)):
        opened.clear()
        async with running(tiny.checkpoint(TARGET), tensor_parallel=2, speculative=speculative) as own:
            held.append(own.limits.of_ranks)
            ranks, blocks = own.inspect().runtime.executor.ranks, own.limits.num_blocks + 1
    (plain, _), (first, other) = held
    assert first.weights > plain.weights
    assert first.kv_cache > other.kv_cache == plain.kv_cache
    assert len(ranks) == (len(opened) or 1)
    for rank in ranks:
        guests = [len(cache) for cache, spec in zip(rank.caches, rank.layout.specs) if isinstance(spec, GuestSpec)]
        assert guests == [0 if rank.number else 2]
        assert rank.layout.block_bytes * blocks == own.limits.of_ranks[rank.number].kv_cache


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("small", [False, True])
def test_a_head_that_is_dealt_out_is_copied_for_the_drafter(name, small):
    """A head of the files, and one that is the embedding."""
    model = split(tiny.checkpoint(name), 2)
    target = model.whole
    lent = LentHead(target, small)
    assert lent.copy is not None
    lent.copy.load("auto", None, 0)
    hidden = torch.randn(5, target.config.text.hidden_size, generator=torch.Generator().manual_seed(2))
    limit = 0.3 if small else 1e-5
    assert (lent.logits(hidden) - model.logits(hidden)).abs().max() <= limit
    assert (lent.copy.num_bytes == 0) == (name == "gemma3" and not small)
    model.close()


@pytest.mark.parametrize("form", ["ct head", "q6_k"])
@torch.inference_mode()
def test_a_head_of_codes_that_is_dealt_out_is_copied_for_the_drafter(form, tmp_path):
    if form in VARIANTS:
        folder = write(tmp_path / "written", VARIANTS[form])
    else:
        folder = Path(as_folder(str(ggufs.write(tmp_path / "llama.gguf", "llama", form)), tokenizer=False))
    model = split(folder, 2, dtype="float32")
    lent = LentHead(model.whole, small=True)  # codes remain as they are
    assert lent.copy is not None
    lent.copy.load("auto", None, 0)
    hidden = torch.randn(5, model.config.text.hidden_size, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(lent.logits(hidden), model.logits(hidden), atol=1e-4, rtol=1e-5)
    model.close()
