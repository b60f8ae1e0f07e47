"""Prompts of rows: reads and checks `prompt_embeds` of requests, and makes them into prompts.

Owner: loop; tensors are read in the pool. In: base64 in a completion's `prompt_embeds` or in chat parts of that type.
Out: a Prompt whose positions the rows take, or the marks of a conversation. Refused if the operator has not enabled
them, and together with fields that need the prompt's tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from mm.client_rows import ClientRows, read_rows
from server.errors import ApiError, invalid
from server.render.prompt import Prompt, PromptRows
from server.render.row_marks import PLACEHOLDER, RowMarks, row_parts
from server.schema.common import SamplingFields
from server.state import AppState

# Fields that need the prompt's tokens or text, with their values that have no effect.
NEEDS_TOKENS = {
    "echo": (None, False),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "repetition_penalty": (None, 1.0),
    "dry_multiplier": (None, 0.0),
    "use_beam_search": (None, False),
}


def refuse_others(state: AppState, body: SamplingFields) -> None:
    """Raise ApiError if rows are not enabled, or if another field needs token ids, which rows do not have."""
    if not state.config.rows.enable_prompt_embeds:
        raise ApiError(
            403,
            "override_not_trusted",
            "prompt_embeds: this server takes none; --enable-prompt-embeds allows them",
            "prompt_embeds",
        )
    for name, nothing in NEEDS_TOKENS.items():
        if getattr(body, name, None) not in nothing:
            raise invalid(name, f"{name}: needs token ids, which prompt_embeds do not have; leave the field out")


async def read(state: AppState, text: str, param: str) -> ClientRows:
    """Decode rows of the model's width. Raises MediaError."""
    limits = state.engine.limits
    most = min(limits.max_model_len, limits.encoder_capacity)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(state.pool, read_rows, text, limits.hidden_size, most, param)


async def prompt_of(state: AppState, text: str, param: str) -> Prompt:
    """A prompt made only of rows."""
    rows = await read(state, text, param)
    return Prompt(np.full(len(rows.numbers), PLACEHOLDER, np.int32), rows=(PromptRows(0, rows),))


async def marked(state: AppState, body: Any) -> RowMarks | None:
    """The rows of a chat body, replaced by marks in its parts; None if it has none."""
    marks = None
    for content, at, path in row_parts(body.messages):
        if marks is None:
            refuse_others(state, body)
            marks = RowMarks()
        content[at] = marks.put(await read(state, content[at]["data"], f"{path}.data"))
    return marks
