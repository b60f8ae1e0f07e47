"""Places at which a continuous sound is cut into windows."""

from __future__ import annotations

import numpy as np
import pytest

from mm.transform.quiet import quiet_end

RATE = 16000


def sound(*loud: float) -> np.ndarray:
    """Noise: a tenth of a second at each of the given loudnesses."""
    draw = np.random.default_rng(0)
    return np.concatenate([draw.normal(0, each, RATE // 10) for each in loud]).astype(np.float32)


@pytest.mark.parametrize(
    ("loud", "first", "full", "between"),
    [
        ([0.2] * 6 + [0.001] * 2 + [0.2] * 4, 4, False, (0.6, 0.8)),
        ([0.2] * 6 + [0.001] * 2 + [0.2] * 4, 9, False, None),  # the quiet place is before `first`
        ([0.2] * 12, 4, False, None),
        ([0.2] * 7 + [0.1] + [0.2] * 4, 4, True, (0.7, 0.8)),  # full window: cut at the quietest place, even if loud
        ([0.2] * 12, 12, True, (1.2, 1.2)),
        ([0.2] * 12, 12, False, None),
    ],
)
def test_a_window_ends_at_a_quiet_place_or_when_it_is_full(loud, first, full, between):
    found = quiet_end(sound(*loud), RATE, first * RATE // 10, full)
    assert (found is None) is (between is None)
    if between is not None and found is not None:
        assert between[0] <= found / RATE <= between[1]
