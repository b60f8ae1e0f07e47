"""Prompts with bidirectional attention: last keys by row, refused prompts, and prompts that share cached blocks."""

import asyncio

import numpy as np
import pytest

import engine.run.start
from engine import Request, SamplingParams
from engine.base.bidirectional import bi_spans_of, last_keys
from engine.base.errors import RequestError
from engine.base.limits import Limits, check
from engine.base.request import MediaInput
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.models.seeing import spliced

LIMITS = Limits(
    max_model_len=100, num_blocks=50, max_open=8, vocab_size=100, num_embeddings=100, max_logprobs=5,
    encoder_capacity=30, modalities=("image",), max_bi_span=20,
)  # fmt: skip


def request(length, *spans):
    media = tuple(MediaInput("image", bytes(16), (span,), span[1], {}) for span in spans)
    return Request(np.arange(length, dtype=np.int32), SamplingParams(max_tokens=1), media=media)


def with_spans(kind):
    return Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"bidirectional": kind})


def test_tokens_of_a_picture_see_to_its_end_and_those_of_a_prompt_to_the_prompts():
    """Row 0: a chunk from position 2 on; row 1: a prompt and the beginning of its answer; row 2: an answer's token."""
    slots, lens, computed = np.array([4, 1, 0]), np.array([5, 6, 1]), np.array([2, 0, 9])
    pictures = {4: bi_spans_of(request(12, (3, 3), (9, 2)), "items"), 1: bi_spans_of(request(4, (1, 2)), "items")}
    got = last_keys(slots, lens, computed, pictures, "items")
    assert got.tolist() == [2, 5, 5, 5, 6, *[0, 2, 2, 3, 4, 5], 9]
    prompts = {1: bi_spans_of(request(4), "prompt")}
    got = last_keys(slots, lens, computed, prompts, "prompt")
    assert got.tolist() == [2, 3, 4, 5, 6, *[~3] * 4, 4, 5, 9]
    assert last_keys(slots, lens, np.array([6, 4, 9]), {1: prompts[1], 4: pictures[4][:1]}, "items") is None
    assert bi_spans_of(request(12, (3, 3)), "") is None


@pytest.mark.parametrize(
    ("kind", "asked", "complaint"),
    [
        (
            "items",
            request(40, (3, 21)),
            r"21 tokens that see each other \(one picture\).*room for 20.*--max-num-batched",
        ),
        ("prompt", request(21), r"21 tokens that see each other \(the prompt\)"),
        ("prompt", request(20, (0, 8), (9, 8)), None),
        ("items", request(60, (0, 20), (20, 20), (40, 20)), None),
    ],
)
def test_what_no_step_could_compute_is_refused(kind, asked, complaint):
    if complaint is None:
        check(asked, with_spans(kind))
        return
    with pytest.raises(RequestError, match=complaint):
        check(asked, with_spans(kind))
    check(asked, LIMITS)


@pytest.mark.parametrize("name", ["paligemma", "paligemma2"])
async def test_blocks_of_a_prompt_that_sees_itself_are_found_by_the_same_prompt_only(name):
    made, _ = spliced(name, "two pictures")

    def ask(last):
        ids = np.concatenate([made.prompt_token_ids, [last]]).astype(np.int32)
        return Request(ids, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), media=made.media)

    async with running(tiny.checkpoint(name), enable_prefix_caching=False) as served:
        alone = [(await answer(served, ask(last)))[0] for last in (3, 4)]
    async with running(tiny.checkpoint(name)) as served:
        hits = []
        for last in (3, 4, 4, 3):
            assert (await answer(served, ask(last)))[0] == alone[last - 3]
            hits.append(served.stats.prefix_hits)
    assert hits[:2] == [0, 0], "another end is another prompt"
    assert (hits[3] > hits[2] > 0) == (name == "paligemma"), "a window shorter than the prompt keeps too few blocks"


async def test_the_device_path_gives_the_cpus_answers(monkeypatch):
    """Device steps on the host: the record contains the last keys, and captured forwards read them."""
    name, prompts = "paligemma2", ("picture", "two pictures", "text")

    def ask(prompt):
        made, _ = spliced(name, prompt)
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        return Request(made.prompt_token_ids, sampling, media=made.media)

    settings = {"max_num_seqs": 4, "max_num_queued_reqs": 8, "max_num_batched_tokens": 96, "max_model_len": 80}
    async with running(tiny.checkpoint(name)) as served:
        wanted = [(await answer(served, ask(prompt)))[0] for prompt in prompts]
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(tiny.checkpoint(name), **settings) as served:
        for _ in range(2):
            got = await asyncio.gather(*(answer(served, ask(prompt)) for prompt in prompts))
            assert [tokens[0] for tokens in got] == wanted
