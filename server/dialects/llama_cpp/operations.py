"""The operations of llama.cpp's protocol, for /openapi.json."""

from __future__ import annotations

from typing import Any

import msgspec

from server.dialects.llama_cpp import answers, schema
from server.openapi import WORK, Operation

TAG = "llama.cpp"


def work(id: str, summary: str, body: type[msgspec.Struct], answer: Any, event: Any = None) -> Operation:
    return Operation(id, TAG, summary, answer, event, body, statuses=WORK)


COMPLETED = answers.LlamaCompletion | list[answers.LlamaCompletion]
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/completion"): work(
        "llama_completion", "Continue texts, in llama.cpp's protocol", schema.LlamaCompletionBody, COMPLETED,
        answers.LlamaCompletion,
    ),
    ("POST", "/completions"): work(
        "llama_completions", "The same by its other name", schema.LlamaCompletionBody, COMPLETED,
        answers.LlamaCompletion,
    ),
    ("POST", "/infill"): work(
        "llama_infill", "The text in a gap, for editors", schema.LlamaInfillBody, answers.LlamaCompletion,
        answers.LlamaCompletion,
    ),
}  # fmt: skip
