"""The DraftModel part: a small decoder with the target's vocabulary guesses the next tokens of rows.

Owner: device thread; the stream runs the hook and `after_choice` (draft_model_steps). The small model's layers are
further layers of the KV cache. It computes all tokens that the target computes, prompts included, in the same step, so
chunks, cached prefixes and preempted rows are the same for both models. Drafts are made at the begin of the step that
verifies them, when their blocks are in the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from _fast.scheduler import Scheduler
from engine.base.config import EngineConfig
from engine.base.drafts import DraftConfig
from engine.base.request import Request
from engine.cache.spec import LayerCache
from engine.device.memory import gib
from engine.layers.batch import LayerHook
from engine.models.drafters.draft_model import SmallDecoder
from engine.models.drafters.small_head import tied_bytes
from engine.step.live import Place
from engine.step.parts.draft_model_steps import DraftModelHook, DraftModelSteps
from engine.step.parts.drafter_load import guess_of, load_drafter
from engine.step.parts.drafts import takes_drafts
from engine.step.parts.part import Claim, StepPart, Steps
from engine.step.sizes import Sizes
from engine.step.step import Chosen
from engine.weights.load import weight_bytes


class DraftModel(StepPart):
    """The small model and its layers in the cache."""

    name = "draft_model"

    def __init__(
        self,
        config: EngineConfig,
        drafts: DraftConfig,
        drafter: SmallDecoder,
        sizes: Sizes,
    ) -> None:
        self._config, self._drafts, self._drafter, self._sizes = config, drafts, drafter, sizes
        self._steps: DraftModelSteps

    def line(self) -> str:
        size, block_size = gib(self._weights()), self._sizes.block_size
        each = sum(spec.block_bytes(block_size) for spec in self._drafter.specs) * 1000 / block_size / 2**20
        head = ", with an 8-bit head" if self._drafts.small_head else ""
        return (
            f"drafts: {self._drafts.num_tokens} in a step, by {self._drafter.described}{head}; weights of {size}, "
            f"{each:.1f} MiB of the KV cache per 1,000 tokens"
        )

    def _weights(self) -> int:
        """Bytes of the weights."""
        model = self._drafter.model
        return weight_bytes(model) + tied_bytes(model.head)

    def claim(self) -> Claim:
        return Claim(weight_bytes=self._weights(), specs=self._drafter.specs)

    def start(self, steps: Steps) -> None:
        """Loads the weights."""
        rank, specs = steps.backend.rank, self._drafter.specs
        first = next(number for number, spec in enumerate(rank.layout.specs) if spec is specs[0])
        groups = rank.layout.group_of[first : first + len(specs)]
        guess = guess_of(self._drafts, steps.backend.sampler)
        self._steps = DraftModelSteps(self._drafter, rank, self._sizes, groups, guess)
        load_drafter(self._drafter.model, self._config, rank)

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        self._steps.allocate(num_blocks, caches)

    def layer_hook(self) -> LayerHook | None:
        return DraftModelHook(lambda: self._steps, self._sizes.num_drafts)

    def after_choice(self, chosen: Chosen, variant: int) -> None:
        self._steps.offer(chosen)

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        raw = self._config.logprobs_mode.startswith("raw") and not self._drafts.forced
        masked = self._drafts.forced and request.grammar is not None
        if takes_drafts(request.sampling, raw) and not masked and not place.traced:
            place.drafts = self._drafts.num_tokens
