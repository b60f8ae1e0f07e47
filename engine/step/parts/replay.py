"""Replay: a part whose drafts are recorded answers, of which a set part is right; for measurements.

Owner: device thread; the stream runs `after_choice`. A recording is a file with a JSON object in each line, in the
words of an answer: {"prompt_token_ids": [...], "token_ids": [...]}. A request whose prompt is recorded gets drafts; its
answer is that of a server without drafts, and the number of its steps is what a drafter of that quality would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from _fast.scheduler import Scheduler
from engine.base.drafts import FLAG, RECORDING, DraftConfig
from engine.base.errors import ConfigError
from engine.base.request import Request
from engine.kernels.sampling.replay import replay
from engine.kernels.sampling.surviving import survivals_on
from engine.sampling.pending import send
from engine.step.live import LiveRow, Place
from engine.step.parts.drafts import takes_drafts
from engine.step.parts.part import Claim, StepPart, Steps
from engine.step.sizes import Sizes
from engine.step.step import Chosen

MOST_BYTES = 256 << 20  # of a recording


class Recorded(msgspec.Struct):
    """A line of a recording."""

    prompt_token_ids: list[int]
    token_ids: list[int]


class Replay(StepPart):
    """The recorded answers, and those of live slots on the device."""

    name = "replay"

    def __init__(self, config: DraftConfig, sizes: Sizes, raw: bool, vocab: int) -> None:
        """`raw`: log-probabilities are those of the model's logits."""
        self.config, self._sizes, self._raw, self._vocab = config, sizes, raw, vocab
        self._answers = read_recording(config.recording, vocab)
        self._texts: torch.Tensor  # int32 [max_slots + 1, longest]: recorded tokens by their place, -1 elsewhere
        self._survivals: torch.Tensor

    def claim(self) -> Claim:
        return Claim(weight_bytes=4 * (self._sizes.max_slots + 1) * (self._sizes.max_model_len + 1))

    def start(self, steps: Steps) -> None:
        sizes, device = self._sizes, steps.backend.rank.device
        shape = (sizes.max_slots + 1, sizes.max_model_len + 1)
        self._texts = torch.full(shape, -1, dtype=torch.int32, device=device)
        found = survivals_on(self.config.survivals, device)
        assert found is not None, "the settings of this method have survivals"
        self._survivals = found

    def line(self) -> str:
        return f"drafts: {self.config.num_tokens} in a step, from {len(self._answers)} recorded answers"

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        drafted = takes_drafts(request.sampling, self._raw) and request.grammar is None and not place.traced
        if drafted and _key(request.prompt_token_ids) in self._answers:
            place.drafts = self.config.num_tokens

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        """Writes the recorded answer. No step needs the host for drafts."""
        prompt = row.request.prompt_token_ids
        text = np.full(self._texts.shape[1], -1, np.int32)
        if (answer := self._answers.get(_key(prompt))) is not None:
            text[len(prompt) : len(prompt) + len(answer)] = answer[: max(0, len(text) - len(prompt))]
        self._texts[slot].copy_(send(text, self._texts.device))
        return False

    def after_choice(self, chosen: Chosen, variant: int) -> None:
        replay(chosen.state, self._texts, chosen.runs, chosen.slots, self._survivals, self._vocab)


def _key(prompt: object) -> bytes:
    return np.ascontiguousarray(prompt, np.int32).tobytes()


def read_recording(path: str, vocab: int) -> Mapping[bytes, np.ndarray]:
    """The answers int32 [tokens] by their prompts. Raises ConfigError."""
    try:
        if (size := Path(path).stat().st_size) > MOST_BYTES:
            raise ConfigError(
                f"{FLAG}: {path} has {size:,} bytes; a recording has at most {MOST_BYTES:,}: leave out answers"
            )
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{FLAG}: {RECORDING}={path!r} cannot be read: {error.strerror}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            one = msgspec.json.decode(line, type=Recorded)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f'{FLAG}: {path}, line {number}: {error}; lines are {{"prompt_token_ids": [..], "token_ids": [..]}}'
            ) from None
        if wrong := [token for token in one.prompt_token_ids + one.token_ids if not 0 <= token < vocab]:
            raise ConfigError(f"{FLAG}: {path}, line {number}: token {wrong[0]}; the model has tokens 0 to {vocab - 1}")
        found[_key(one.prompt_token_ids)] = np.array(one.token_ids, np.int32)
    if not found:
        raise ConfigError(f"{FLAG}: {path} has no line; a line is a recorded answer")
    return found
