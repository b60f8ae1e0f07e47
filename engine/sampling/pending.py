"""Log-probabilities in transfer from the device: sent without waiting, read after the step's event has fired.

Owner: device thread. The device packs all values of a row into one line of int32 words, which the computing stream
copies into pinned memory; `collect` turns the words into TokenLogprob objects.

    line: token | logprob | rank | k ids | k values | values of the requested ids        (floats as their bits)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.base.request import TokenLogprob
from engine.kernels.sampling.logprobs import log_sum, logprobs
from engine.sampling.logprobs import CHUNK, together

ONE_COPY = 1 << 20  # bytes of lines per copy


class Pending:
    """Lines in flight; each has a number chosen by its maker (a sampled row, a prompt position)."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, int, list[int], list[tuple[int, Sequence[int]]]]] = []

    def add(self, lines: Tensor, width: int, numbers: list[int], wanted: list[tuple[int, Sequence[int]]]) -> None:
        """Sends lines int32 [n, 3 + 2 * width + extra] to the host; `numbers`: each line's number; `wanted`: how many
        of the `width` top tokens each line gets, and its requested ids."""
        self._parts.append((home(lines), width, numbers, wanted))

    def collect(self) -> dict[int, TokenLogprob]:
        """Number -> log-probabilities, without rows that have no token (-1). Call it after the step's event."""
        found = {}
        for lines, width, numbers, wanted in self._parts:
            words = lines.numpy()
            values = words.view(np.float32)
            for line, (number, (k, asked)) in enumerate(zip(numbers, wanted)):
                if words[line, 0] < 0:
                    continue
                ids, logprobs = words[line, 3 : 3 + k].tolist(), values[line, 3 + width : 3 + width + k].tolist()
                logprobs += values[line, 3 + 2 * width : 3 + 2 * width + len(asked)].tolist()
                token, logprob, rank = int(words[line, 0]), float(values[line, 1]), int(words[line, 2])
                found[number] = TokenLogprob(token, logprob, rank, [*ids, *asked], logprobs)
        return found


def logprob_lines(logits: Tensor, tokens: Tensor, k: int, as_logits: bool, asked: Tensor | None = None) -> Tensor:
    """Lines int32 [n, 3 + 2 * k + m] on the logits' device.

    logits float32 [n, vocab], at most CHUNK rows to bound memory; tokens int64 [n], -1 for none; asked int64
    [n, m].
    """
    own, rank, ids, values = logprobs(logits, tokens.clamp(min=0), k, as_logits)
    parts = [tokens[:, None].int(), _bits(own[:, None]), rank[:, None].int(), ids.int(), _bits(values)]
    if asked is not None:
        more = logits.gather(1, asked)  # [n, m]
        parts.append(_bits(more if as_logits else more - log_sum(logits)[:, None]))
    return torch.cat(parts, dim=1)


def prompt_logprobs(
    project: Callable[[Tensor], Tensor],
    device: torch.device,
    asked: np.ndarray,
    vocab: int,
    as_logits: bool = False,
    named: Sequence[tuple[int, ...]] = (),
) -> Pending:
    """Log-probabilities of prompt positions, without waiting: one line per column of `asked`, numbered by column.

    asked int64 [3, n]: number of a token in the step, the following token, number of top tokens. named: each column's
    requested ids; (): no column has any. `project` makes the float32 logits [rows, vocab] of tokens int64 [rows] on the
    device; only CHUNK rows exist at a time. The values are raw in every mode, because no token was drawn.
    """
    pending = Pending()
    ids = _padded(named)
    for alike, width in together(asked[2], vocab):
        rows, following = send(asked[:2, alike], device)  # [n] each
        more = None if ids is None else send(ids[alike], device)
        held: list[Tensor] = []  # lines from `begin` on, collected to save copies: each copy needs pinned memory
        begin = 0
        for start in range(0, len(alike), CHUNK):
            end = min(start + CHUNK, len(alike))
            logits = project(rows[start:end]).float()  # [chunk, vocab]
            some = None if more is None else more[start:end]
            held.append(logprob_lines(logits, following[start:end], width, as_logits, some))
            if end == len(alike) or (len(held) + 1) * held[0].nbytes > ONE_COPY:
                numbers = alike[begin:end]
                lines = torch.cat(held) if len(held) > 1 else held[0]
                wanted = [(int(asked[2, number]), named[number] if named else ()) for number in numbers.tolist()]
                pending.add(lines, width, numbers.tolist(), wanted)
                held, begin = [], end
    return pending


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of values on the device, through new pinned memory, so the host does not wait and overwrites nothing."""
    if device.type == "cpu":
        return torch.from_numpy(values.copy())
    pinned = torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, pin_memory=True)
    pinned.numpy()[...] = values
    # torch holds the pinned block until the copy has run, even after this variable is gone.
    return pinned.to(device, non_blocking=True)


def home(values: Tensor) -> Tensor:
    """A copy in host memory, pinned if there is a device; readable once the stream has run the copy."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return pinned.copy_(values, non_blocking=True)


def _padded(named: Sequence[tuple[int, ...]]) -> np.ndarray | None:
    """The requested ids, int64 [n, most], filled up with 0; None: there are none."""
    most = max(map(len, named), default=0)
    if not most:
        return None
    found = np.zeros((len(named), most), np.int64)
    for line, ids in zip(found, named):
        line[: len(ids)] = ids
    return found


def _bits(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32)
