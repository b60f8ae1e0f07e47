"""Prompt and media must agree, and splicing is one pass (SECURITY S24, S26)."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mm.errors import MediaError
from mm.item import Part, Processed
from mm.processors.base import Filling
from mm.processors.qwen_vl import QwenVL
from mm.splice import splice

IMAGE, VIDEO = 94, 95


@pytest.fixture(scope="module")
def processor(tmp_path_factory) -> QwenVL:
    config = {"model_type": "qwen2_5_vl", "image_token_id": IMAGE, "video_token_id": VIDEO}
    return QwenVL(tmp_path_factory.mktemp("vl"), config)


def picture(rows: int = 2, columns: int = 3) -> Processed:
    grid = np.array([[1, rows * 2, columns * 2]], np.int64)
    return Processed("image", (Part("image", b"h" * 16, rows * columns, {"grid_thw": grid}),))


def refusal(processor, *arguments) -> MediaError:
    with pytest.raises(MediaError) as caught:
        splice(*arguments, processor)
    return caught.value


def test_slots_widen_where_the_renderer_put_them(processor: QwenVL) -> None:
    spliced = splice([1, IMAGE, 2, 3, IMAGE, 4], (1, 4), [picture(1, 2), picture()], processor)
    assert spliced.prompt_token_ids.dtype == np.int32
    assert spliced.prompt_token_ids.tolist() == [1, IMAGE, IMAGE, 2, 3, *[IMAGE] * 6, 4]
    assert [entry.spans for entry in spliced.media] == [((1, 2),), ((5, 6),)]
    assert [entry.num_tokens for entry in spliced.media] == [2, 6]
    assert spliced.counts == {"image": 8}
    assert spliced.positions is not None
    assert spliced.positions.dtype == np.int32
    assert spliced.positions.shape == (3, 12)
    assert spliced.position_delta == int(spliced.positions.max()) + 1 - 12


@pytest.mark.parametrize(
    ("token_ids", "slots", "items"),
    [
        ([1, IMAGE, 2], (), 0),  # the client typed a placeholder
        ([1, 2], (), 1),
        ([1, IMAGE, 2], (1,), 0),
        ([1, IMAGE, 2], (1,), 2),
        ([1, IMAGE, 2], (0,), 1),
        ([1, IMAGE, 2], (3,), 1),
        ([1, IMAGE, 2], (-2,), 1),
        ([1, VIDEO, 2], (1,), 1),
        ([1, IMAGE, IMAGE], (1,), 1),
        ([1, IMAGE, VIDEO], (1,), 1),
        ([1, IMAGE, IMAGE], (2, 1), 2),
        ([1, IMAGE, IMAGE], (1, 1), 2),
    ],
)
def test_disagreement_is_refused(processor: QwenVL, token_ids: list[int], slots: tuple[int, ...], items: int) -> None:
    error = refusal(processor, token_ids, slots, [picture()] * items)
    assert (error.status, error.reason) == (400, "placeholder_mismatch")


def test_a_text_model_takes_no_media() -> None:
    spliced = splice([1, 2, 3], (), [], None)
    assert spliced.prompt_token_ids.tolist() == [1, 2, 3]
    assert spliced.positions is None
    assert refusal(None, [1, IMAGE], (1,), [picture()]).reason == "placeholder_mismatch"


@pytest.mark.parametrize("runs", [((0, 5),), ((0, 7),), ((0, 3), (2, 3)), ((3, 3), (0, 3)), ((-1, 6),), ()])
def test_a_processor_that_contradicts_itself_fails_that_request_alone(processor: QwenVL, monkeypatch, runs) -> None:
    monkeypatch.setattr(type(processor), "fill", lambda _, item: Filling(np.full(6, IMAGE, np.int32), (runs,)))
    error = refusal(processor, [1, IMAGE], (1,), [picture()])
    assert (error.status, error.reason) == (500, "internal_error")


def test_widening_is_linear(processor: QwenVL) -> None:
    def seconds(count: int) -> float:
        token_ids = [5, IMAGE] * count
        slots = list(range(1, 2 * count, 2))
        items = [picture(4, 4)] * count
        best = 9.0
        for _ in range(3):
            began = time.thread_time()
            splice(token_ids, slots, items, processor)
            best = min(best, time.thread_time() - began)
        return best

    seconds(50)
    assert any(seconds(3200) < 8 * seconds(800) for _ in range(4))  # quadratic work would take 16 times as long


def test_no_media_leaves_the_prompt_as_it_is(processor: QwenVL) -> None:
    spliced = splice(np.array([1, 2, 3], np.int32), (), [], processor)
    assert spliced.prompt_token_ids.tolist() == [1, 2, 3]
    assert spliced.media == ()
    assert spliced.positions is None
