"""The sampler: order of operations, each rule's formula, draws that follow the distribution (short form of R9)."""

import numpy as np
import pytest
import torch

from engine.base.request import SamplingParams
from engine.kernels.sampling.draw import draw, uniform
from engine.kernels.sampling.top_k_top_p import top_k_top_p
from engine.sampling.sampler import Sampler
from tests.kernels.sampling import fits

VOCAB = 50


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample_one(logits: torch.Tensor, prompt: list[int] | None = None, index: int = 0, seed: int = 1, **rules) -> int:
    sampler = Sampler(4, VOCAB)
    sampler.admit(2, SamplingParams(**rules), np.asarray(prompt or [0], np.int32), seed)
    tokens, _ = sampler.sample(logits.clone(), np.array([2]), np.array([index]))
    return int(tokens[0])


def expected_probs(
    logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=0.0, **xtc
) -> np.ndarray:
    """The definition of the distribution, written as loops in float64; XTC applies always or never."""
    given = logits.double().numpy()
    low = given.max() - top_n_sigma * given.std() if top_n_sigma else -np.inf
    scaled = np.where(given >= low, given / temperature, -np.inf)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    keep = probs >= min_p * probs.max()
    if top_k:
        keep &= probs >= np.sort(np.where(keep, probs, 0))[::-1][min(top_k, VOCAB) - 1]
    kept = np.where(keep, probs, 0)
    if top_p < 1:
        order = np.argsort(-kept)
        mass, total = 0.0, kept.sum()
        for place in order:
            if mass >= top_p * total:
                kept[place] = 0
            mass += kept[place]
    kept /= kept.sum()
    threshold = xtc.get("xtc_threshold", 0.1)
    likely = [token for token in range(len(kept)) if kept[token] >= max(threshold, 1e-300)]
    if xtc.get("xtc_probability") == 1 and threshold <= 0.5 and len(likely) > 1:
        least = min(kept[token] for token in likely)
        kept = np.where(kept > least, 0, kept)
    return kept / kept.sum()


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
    ],
)
def test_draws_follow_the_distribution(rules):
    logits = logits_of(1)[0]
    wanted = expected_probs(logits, **rules)
    count = 100_000
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | rules
    probs = top_k_top_p(
        logits[None],
        torch.tensor([full["temperature"]]),
        torch.tensor([full["top_k"]]),
        torch.tensor([full["top_p"]]),
        torch.tensor([full["min_p"]]),
    )
    tokens = draw(probs.expand(count, -1), np.full(count, 7, np.uint64), np.arange(count)).numpy()
    seen = np.bincount(tokens, minlength=VOCAB)
    assert seen[wanted == 0].sum() == 0
    used = wanted * count >= 5
    chi2 = ((seen[used] - wanted[used] * count) ** 2 / (wanted[used] * count)).sum()
    freedom = used.sum() - 1
    # Wilson-Hilferty: about the 99.9 % point of the chi-squared distribution.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-6
    assert chi2 <= limit


NARROW = [
    {"top_n_sigma": 1.0, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.04},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 7},
    {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"top_n_sigma": 2.0, "top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.1, "temperature": 0.8},
]


@pytest.mark.parametrize("rules", NARROW)
def test_top_n_sigma_and_xtc_draw_from_their_definitions(rules):
    count = 1500
    logits = logits_of(1, 3)
    wanted = expected_probs(logits[0], **rules)
    sampler = Sampler(1, VOCAB)
    sampler.admit(0, SamplingParams(**rules), np.zeros(1, np.int32), 5)
    drawn, _ = sampler.sample(logits.expand(count, -1).clone(), np.zeros(count, np.int64), np.arange(count))
    assert fits(np.bincount(drawn, minlength=VOCAB), wanted)


def test_xtc_applies_by_its_own_draws_and_never_to_greedy_rows():
    logits = logits_of(1, 3)
    plain = [sample_one(logits, index=k) for k in range(200)]
    xtc = {"xtc_threshold": 0.01}
    assert [sample_one(logits, index=k, xtc_probability=1e-12, **xtc) for k in range(200)] == plain
    often = [sample_one(logits, index=k, xtc_probability=0.5, **xtc) for k in range(200)]
    always = [sample_one(logits, index=k, xtc_probability=1.0, **xtc) for k in range(200)]
    assert all(found in pair for found, pair in zip(often, zip(plain, always)))
    assert often not in (plain, always)
    assert sample_one(logits, temperature=0.0, xtc_probability=1.0, **xtc) == int(logits.argmax())


def test_uniform_is_uniform_and_depends_on_seed_and_index():
    values = uniform(np.repeat(np.arange(100, dtype=np.uint64), 100), np.tile(np.arange(100), 100))
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == 10_000
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(counts - 500).max() < 110


def test_a_row_does_not_depend_on_its_neighbours():
    sampler = Sampler(8, VOCAB)
    kinds = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"presence_penalty": 1.0}]
    logits = logits_of(len(kinds))
    for slot, rules in enumerate(kinds):
        sampler.admit(slot, SamplingParams(**rules), np.array([1, 2], np.int32), slot)
    together, _ = sampler.sample(logits.clone(), np.arange(len(kinds)), np.full(len(kinds), 3))
    for slot, rules in enumerate(kinds):
        alone = sample_one(logits[slot : slot + 1], [1, 2], 3, slot, **rules)
        assert alone == together[slot], rules


def test_penalties_count_answer_tokens_and_repetition_also_the_prompt():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 2.9, 2.0
    assert sample_one(logits, [5], temperature=0.0) == 5
    assert sample_one(logits, [5], temperature=0.0, presence_penalty=2.0) == 5  # tokens of the prompt do not count
    assert sample_one(logits, [5], temperature=0.0, repetition_penalty=2.0) == 6
    sampler = Sampler(1, VOCAB)
    sampler.admit(0, SamplingParams(temperature=0.0, frequency_penalty=0.6), np.array([1], np.int32), 0)
    tokens = [int(sampler.sample(logits.clone(), np.array([0]), np.array([k]))[0][0]) for k in range(5)]
    assert tokens == [5, 6, 5, 6, 7]


def test_bias_allowed_bad_words_and_min_tokens_mask():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 3.0, 2.0
    greedy = {"temperature": 0.0}
    assert sample_one(logits, **greedy, logit_bias=((6, 5.0),)) == 6
    assert sample_one(logits, **greedy, allowed_token_ids=(8, 6)) == 6
    assert sample_one(logits, **greedy, bad_words=((5,),)) == 6
    assert sample_one(logits, [3, 4], **greedy, bad_words=((3, 4, 5),)) == 6
    assert sample_one(logits, [4, 4], **greedy, bad_words=((3, 4, 5),)) == 5
    assert sample_one(logits, index=1, **greedy, min_tokens=2, eos_token_ids=(5,)) == 6
    assert sample_one(logits, index=2, **greedy, min_tokens=2, eos_token_ids=(5,)) == 5


def test_logprobs_are_of_the_raw_logits_and_ordered():
    logits = logits_of(1)
    sampler = Sampler(1, VOCAB)
    params = SamplingParams(temperature=0.7, logprobs=4, logit_bias=((9, 100.0),), logprob_token_ids=(3,))
    sampler.admit(0, params, np.array([1], np.int32), 0)
    tokens, found = sampler.sample(logits.clone(), np.array([0]), np.array([0]))
    wanted = torch.log_softmax(logits[0].double(), dim=-1)
    assert tokens[0] == 9
    entry = found[0]
    assert entry.token_id == 9
    assert entry.logprob == pytest.approx(float(wanted[9]), abs=1e-5)
    assert entry.rank == int((logits[0] > logits[0, 9]).sum()) + 1
    assert entry.top_ids[:4] == logits[0].topk(4).indices.tolist()
    assert entry.top_ids[4:] == [3]
    assert entry.top_logprobs == pytest.approx([float(wanted[i]) for i in entry.top_ids], abs=1e-5)


def test_rows_that_are_not_numbers_are_marked_and_others_untouched():
    logits = logits_of(3)
    logits[1, 4] = float("nan")
    sampler = Sampler(3, VOCAB)
    for slot in range(3):
        sampler.admit(slot, SamplingParams(temperature=float(slot)), np.array([1], np.int32), 0)
    tokens, _ = sampler.sample(logits.clone(), np.arange(3), np.zeros(3, np.int64))
    assert tokens[1] == -1
    assert tokens[0] == int(logits[0].argmax())
    assert 0 <= tokens[2] < VOCAB


def test_s37_reset_covers_every_array_of_a_slot():
    sampler = Sampler(2, VOCAB)
    fresh = Sampler(2, VOCAB)
    params = SamplingParams(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, logprobs=1, presence_penalty=1.0)
    sampler.admit(1, params, np.array([1], np.int32), 99)
    sampler.reset(1)
    fresh.reset(1)
    for name, value in vars(fresh).items():
        mine = vars(sampler)[name]
        if isinstance(value, np.ndarray):
            assert np.array_equal(mine, value), name
        else:
            assert mine == value, name


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_logprobs_mode_reports_its_own_numbers(temperature):
    logits = logits_of(1)[0]
    rules = SamplingParams(
        temperature=temperature, top_k=4, logit_bias=((7, 3.0),), logprobs=6, logprob_token_ids=(7, 9)
    )
    biased = logits.clone()
    biased[7] += 3.0
    kept = biased / (temperature or 1.0)
    if temperature:
        kept[kept < kept.topk(4).values[-1]] = float("-inf")
    wanted = {
        "raw_logprobs": torch.log_softmax(logits, 0),
        "raw_logits": logits,
        "processed_logprobs": torch.log_softmax(kept, 0),
        "processed_logits": kept,
    }
    chosen = set()
    for mode, values in wanted.items():
        sampler = Sampler(4, VOCAB, mode)
        sampler.admit(2, rules, np.asarray([0], np.int32), 1)
        tokens, told = sampler.sample(logits.clone()[None], np.array([2]), np.array([0]))
        chosen.add(int(tokens[0]))
        entry = told[0]
        assert entry.logprob == pytest.approx(float(values[tokens[0]]), abs=1e-5)
        assert entry.top_logprobs[:6] == pytest.approx(values.topk(6).values.tolist(), abs=1e-5)
        assert entry.top_ids[6:] == [7, 9]
        assert entry.top_logprobs[6:] == pytest.approx(values[[7, 9]].tolist(), abs=1e-5)
    assert len(chosen) == 1  # the mode changes the reported values, never the sampled token


def test_a_guess_from_equal_logits_is_the_token_that_the_row_draws():
    sampler, logits = Sampler(4, VOCAB), logits_of(3)
    for slot, heat in enumerate((0.0, 0.8, 1.2)):
        sampler.admit(slot, SamplingParams(temperature=heat, top_k=20), np.zeros(1, np.int32), 7 + slot)
    slots, places = np.arange(3), np.array([4, 5, 6])
    drawn, _ = sampler.sample(logits.clone(), slots, places)
    logits[0, 3] = float("nan")
    run = torch.tensor([1, 6, -1], dtype=torch.int32)
    found = sampler.guess(logits, torch.from_numpy(slots), run, torch.from_numpy(places))
    assert found.tolist() == [-1, -1, -1, -1, -1, -1, drawn[1]]
