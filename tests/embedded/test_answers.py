"""The embedded model over HTTP: it answers held-out items correctly, and greedily with the tokens of transformers.

One server process without --model. The accuracy thresholds leave room for chance: the model card has the accuracy
measured on thousands of items, while this test notices only that serving breaks the model.
"""

import base64
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from openai import OpenAI

from examples.embedded_model import blueprint as bp
from examples.embedded_model.encode import TABLE, Encoder
from examples.embedded_model.evaluate import LINES
from examples.embedded_model.heldout import items, judge, samples
from examples.embedded_model.media import encode_picture, encode_sound
from examples.embedded_model.reference import arguments, prompt
from examples.embedded_model.sample import Media, Sample
from tests.end_to_end.process import serving

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ask():
    """Starts a server; yields a function that sends messages, streams a greedy answer and returns its whole text."""
    with (
        serving() as process,
        OpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="none", timeout=300) as client,
    ):
        model = client.models.list().data[0].id

        def one(messages: list[dict]) -> str:
            chunks = client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_tokens=96, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        yield one


def _measure(ask, count: int, seed: int, live: bool) -> tuple[dict[str, list[bool]], list]:
    right, wrong = defaultdict(list), []
    chosen = list(items(count, seed, live))
    with ThreadPoolExecutor(4) as pool:
        for (task, _, expected, check), got in zip(chosen, pool.map(ask, [i[1] for i in chosen]), strict=True):
            right[task].append(judge(got, expected, check))
            if not right[task][-1]:
                wrong.append((task, expected, got))
    return right, wrong


@pytest.mark.parametrize(("count", "least"), [(40, 35), pytest.param(200, 184, marks=pytest.mark.full)])
def test_held_out_items(ask, count, least):
    right, wrong = _measure(ask, count, seed=1, live=False)
    answers = [a for part in right.values() for a in part]
    assert len(answers) == count
    assert sum(answers) >= least, wrong
    for task, part in right.items():  # two items of a task prove little
        assert len(part) < 5 or sum(part) >= 0.6 * len(part), (task, wrong)


@pytest.mark.full
def test_every_line_of_the_table(ask):
    right, wrong = _measure(ask, 200 * len(TABLE), seed=11, live=True)
    for name, rows, wanted in LINES:
        answers = [a for row in rows for a in right.get(row, [])]
        if wanted and answers:
            assert 100 * sum(answers) / len(answers) >= wanted, (name, [w for w in wrong if w[0] in rows][:20])


def _exact(sample: Sample) -> list[dict]:
    """Messages whose media survive encoding bit for bit: PNG, and WAV at 16 kHz."""
    messages: list[dict] = [{"role": "system", "content": sample.system}] if sample.system else []
    for number, turn in enumerate(sample.turns):
        content = []
        for part in turn.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            elif part.kind == "image":
                data = base64.b64encode(encode_picture(part.data, "png")).decode()
                content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
            else:
                data = base64.b64encode(encode_sound(part.data, "wav")).decode()
                content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        messages.append({"role": "user", "content": content})
        if number + 1 < len(sample.turns):
            messages.append({"role": "assistant", "content": turn.answer})
    return messages


def _rounded(sample: Sample) -> Sample:
    """The sample with its sounds rounded to 16-bit integers, as the WAV file holds them."""
    for turn in sample.turns:
        for part in turn.parts:
            if isinstance(part, Media) and part.kind == "audio":
                part.data = (part.data.clip(-1, 1) * 32767).astype(np.int16).astype(np.float32) / 32768
    return sample


def test_greedy_answers_equal_transformers(ask):
    thinker = transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(bp.MODEL_DIR, dtype=torch.float32)
    thinker.eval()
    extractor, encoder = transformers.AutoFeatureExtractor.from_pretrained(bp.MODEL_DIR), Encoder()
    tasks = tuple(task for task in TABLE if not task.startswith("video"))
    differing = []
    for task, sample, _ in samples(24, 5, tasks=tasks):
        got = ask(_exact(sample))
        inputs = arguments(prompt(encoder, _rounded(sample)), extractor)
        with torch.no_grad():
            ids = thinker.generate(**inputs, max_new_tokens=96, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        wanted = encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        if got != wanted:
            differing.append((task, got, wanted))
    assert not differing
