"""Inserts the prefix of each media item: text that a model family's processor writes before a loaded item.

Owner: pool, pure functions. In: a rendered Prompt, and each item's prefix (mm/item: Processed). Out: the Prompt with
the prefixes, its slots and rows moved; `Prompt.text` is unchanged. A prefix is tokenized together with the text before
it, back to the nearest boundary of text: a special token, another item, a client's rows. Text that the family always
writes around a placeholder stays next to the placeholder (server/render/media: ALWAYS_AROUND). In a prompt of token ids
the text before an item is unknown, so the prefix is tokenized alone.

    <start_of_turn> user Look NL <start_of_image>  ->  ... user Look Here is the original image NL <start_of_image>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from server.render.media import ALWAYS_AROUND
from server.render.prompt import Prompt
from server.render.tokenizer import Tokenizer


def with_preambles(prompt: Prompt, preambles: Sequence[str], tokenizer: Tokenizer) -> Prompt:
    """The prompt with a prefix before each slot; "": no prefix."""
    ids, of_text = prompt.token_ids, prompt.text is not None
    ends = [0, *(slot + 1 for slot in prompt.slots), *(item.start + len(item.rows.numbers) for item in prompt.rows)]
    pieces: list[np.ndarray] = []
    done, wider = 0, []  # `wider`: tokens that each slot's prefix adds
    for slot, preamble in zip(prompt.slots, preambles):
        start, least = slot, max(end for end in ends if end <= slot)
        while preamble and of_text and start > least and not tokenizer.is_special(int(ids[start - 1])):
            start -= 1
        always_after = ALWAYS_AROUND.get(tokenizer.token_of(int(ids[slot])) or "", ("",))[0] if of_text else ""
        written = written_before(ids[start:slot], preamble, always_after, tokenizer) if preamble else ids[slot:slot]
        pieces += (ids[done:start], written)
        wider.append(len(written) - (slot - start))
        done = slot
    found = np.concatenate([*pieces, ids[done:]])
    slots = tuple(slot + more for slot, more in zip(prompt.slots, accumulate(wider)))
    rows = tuple(
        replace(item, start=item.start + sum(more for slot, more in zip(prompt.slots, wider) if slot < item.start))
        for item in prompt.rows
    )
    return replace(prompt, token_ids=found, slots=slots, rows=rows)


def written_before(ids: np.ndarray, preamble: str, always_after: str, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens before a placeholder, with the prefix inserted."""
    text = tokenizer.decode(ids)
    if tokenizer.encode_segments([(text, True)]) != ids.tolist():  # a client's incomplete character
        return np.append(ids, tokenizer.encode_segments([(preamble + always_after, True)])).astype(np.int32)
    written = text.removesuffix(always_after) + preamble + always_after
    return np.array(tokenizer.encode_segments([(written, True)]), np.int32)
