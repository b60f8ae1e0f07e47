"""The Drafter part: a small model over the target's hidden states guesses the next tokens of rows.

Owner: device thread; the stream runs the hook and `after_choice` (drafter_steps). A step begins with the guesses, in
passes that are no part of its forward: the blocks of the drafts are in the tables by then, and the places of the step's
tokens are those that the drafter computes.
Then the target computes the guesses with all other tokens, and the drafter's entries of all tokens of the step are
written, of prompts too. An entry lies at the place of the token that it embeds or whose streams it holds, so a block's
bytes follow from the tokens that name the block, and prefix hits are those of a server without drafts: if entries read
the feature of the token before, the feature of a block's last token is stored with the block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from _fast.scheduler import Scheduler
from engine.base.config import EngineConfig
from engine.base.drafts import DraftConfig
from engine.base.request import Request
from engine.cache.spec import LayerCache
from engine.device.memory import gib
from engine.layers.batch import LayerHook
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.models.drafters.base import DraftModel, hosted
from engine.step.live import Place
from engine.step.parts.drafter_kinds import has_features, passes_of, steps_of
from engine.step.parts.drafter_load import guess_of, load_drafter
from engine.step.parts.drafter_steps import DrafterHook, DrafterSteps, Runs
from engine.step.parts.drafts import takes_drafts
from engine.step.parts.part import Claim, StepPart, Steps
from engine.step.sizes import Sizes
from engine.step.step import Chosen
from engine.weights.load import weight_bytes

log = logging.getLogger("omniloop.engine")


class Drafter(StepPart):
    """The drafter and its layer in the cache."""

    name = "drafter"

    def __init__(
        self, config: EngineConfig, drafts: DraftConfig, drafter: DraftModel, model: Model, sizes: Sizes
    ) -> None:
        """`model`: the target as rank 0 runs it."""
        assert isinstance(model, Decoder), "other models are refused"
        self._config, self._drafts, self._sizes = config, drafts, sizes
        self._drafter, self._model = drafter, model
        self._specs = hosted(drafter.cache_specs(), model)
        self._copy = None if drafter.lent is None else drafter.lent.copy  # of the target's head
        self._steps: DrafterSteps

    def line(self) -> str:
        size, head = gib(self._weights()), ", with an 8-bit head" if self._drafts.small_head else ""
        return f"drafts: {self._drafts.num_tokens} in a step, by {self._drafter.described}{head}; weights of {size}"

    def _weights(self) -> int:
        """Bytes of the weights."""
        return weight_bytes(self._drafter) + (0 if self._copy is None else self._copy.num_bytes)

    def claim(self) -> Claim:
        sizes, feature = self._sizes, self._drafter.text.hidden_size * self._model.dtype.itemsize
        if not has_features(self._drafter):
            return Claim(weight_bytes=self._weights(), specs=self._specs)
        return Claim(
            token_bytes=-(-feature // sizes.block_size),
            weight_bytes=self._weights() + feature * (sizes.max_slots + 1 + sizes.max_tokens),
            specs=self._specs,
        )

    def start(self, steps: Steps) -> None:
        """Loads the weights."""
        rank = steps.backend.rank
        group = rank.layout.group_of[next(n for n, one in enumerate(rank.layout.specs) if one is self._specs[0])]
        guess = guess_of(self._drafts, steps.backend.sampler)
        self._steps = steps_of(self._drafter, Runs(rank, self._sizes, group, guess))
        load_drafter(self._drafter, self._config, rank, self._copy)
        if self._drafter.warning:
            log.warning("%s", self._drafter.warning)

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        self._steps.allocate(num_blocks, caches)

    def layer_hook(self) -> LayerHook | None:
        passes = passes_of(self._drafter, self._sizes.num_drafts)
        return DrafterHook(lambda: self._steps, self._model, self._drafter.streams, passes)

    def after_choice(self, chosen: Chosen, variant: int) -> None:
        self._steps.accept(chosen)

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        raw = self._config.logprobs_mode.startswith("raw") and not self._drafts.forced
        masked = self._drafts.forced and request.grammar is not None
        if takes_drafts(request.sampling, raw) and not masked and not place.traced:
            place.drafts = self._drafts.num_tokens
