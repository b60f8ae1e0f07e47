"""Texts and pictures of dual-encoder models in the same steps: on a CPU, on the device path, with towers in parts."""

from __future__ import annotations

import numpy as np
import pytest

import engine.run.start
from engine.base.request import MediaInput, PoolingParams, Request, SamplingParams
from tests import tiny_towers
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import answered
from tests.engine_kit import running

KINDS = ["clip", "siglip", "siglip2"]
DRAW = np.random.default_rng(0)
PICTURES = {1, 4, 5, 9}
POOLS = {"max_num_seqs": 4, "max_num_queued_reqs": 4, "dtype": "float32"}


def request(kind: str) -> Request:
    """Ten inputs; the token id of a picture has no meaning."""
    pixels = DRAW.standard_normal((len(PICTURES), 16, 3 * 14 * 14)).astype(np.float32)
    inputs, media = [], []
    for number in range(10):
        length = 64 if kind != "clip" else int(DRAW.integers(2, 77))
        inputs.append(DRAW.integers(2, 260, 1 if number in PICTURES else length).astype(np.int32))
    starts = np.concatenate([[0], np.cumsum([len(one) for one in inputs])])
    for number, values in zip(sorted(PICTURES), pixels):
        rows, columns = (4, 1 + number % 4) if kind == "siglip2" else (4, 4)  # pictures of any shape
        features = {"pixel_values": values[: rows * columns], "grid": np.array([rows, columns], np.int64)}
        media.append(MediaInput("image", number.to_bytes(16, "little"), ((int(starts[number]), 1),), 1, features))
    return Request(
        np.concatenate(inputs),
        SamplingParams(max_tokens=1),
        media=tuple(media),
        n=len(inputs),
        pooling=PoolingParams(starts),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_the_device_path_and_pieces_of_towers_make_the_same_arrays(monkeypatch, kind):
    folder, asked = tiny_towers.checkpoint(kind), request(kind)

    async def made(**settings):
        async with running(folder, device="cpu", **POOLS, **settings) as served:
            return await answered(served, asked)

    wanted = await made()
    assert len({one.tobytes() for one in wanted}) == len(wanted)
    for one, other in zip(await made(encoder_budget=5), wanted):
        np.testing.assert_allclose(one, other, atol=1e-5)
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    for settings in ({}, {"enforce_eager": True}, {"encoder_budget": 5}):
        for one, other in zip(await made(**settings), wanted):
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=str(settings))
