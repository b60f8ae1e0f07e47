"""The part that guesses tokens, by the method of --speculative-config. Thread: device, at start; `check` too.

A method has a part of its own: copies of the row's text (drafts), a drafter over hidden states (drafter), a smaller
model (draft_model), recorded answers (replay). Of several ranks the first has the part; the others get its drafts
(engine/kernels/parallel/tokens.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.base.config import EngineConfig
from engine.base.drafts import NGRAM, REPLAY, SUFFIX, draft_config
from engine.cache.spec import CacheSpec
from engine.cache.state import StateSpec
from engine.models.base.model import Model
from engine.models.drafters.lookup import draft_model_for, drafter_for
from engine.parallel.model import first_of, whole_of
from engine.step.parts.draft_model import DraftModel
from engine.step.parts.drafter import Drafter
from engine.step.parts.drafts import Drafts
from engine.step.parts.part import StepPart
from engine.step.parts.replay import Replay
from engine.step.sizes import Sizes

log = logging.getLogger("omniloop.engine")


def drafting_part(config: EngineConfig, model: Model, specs: Sequence[CacheSpec], sizes: Sizes) -> StepPart | None:
    """The part of a model that generates tokens; None: no drafts. `specs`: caches of the model. Raises ConfigError."""
    drafts = draft_config(config.speculative)
    if drafts is None:
        return None
    if drafts.forced:
        log.warning("rejection_sample_method 'synthetic': drafts count by chance, so answers are NOT the model's")
    raw = config.logprobs_mode.startswith("raw") and not drafts.forced
    if drafts.method == REPLAY:
        return Replay(drafts, sizes, raw, model.config.text.vocab_size)
    if drafts.method in (NGRAM, SUFFIX):
        # Only the budget lets a part rest. A state's rows read their slots' lengths, which steps without drafts do not
        # write.
        rests = drafts.adaptive and not any(isinstance(spec, StateSpec) for spec in specs)
        return Drafts(drafts, sizes, raw, rests)
    if (small := draft_model_for(config, model)) is not None:
        return DraftModel(config, *small, sizes)
    found = drafter_for(config, whole_of(model))
    assert found is not None, "there are no other methods"
    return Drafter(config, *found, first_of(model), sizes)
