"""Routed experts in answers: the experts that each token chose, as base64 of an array with its dtype and shape.

Owner: none. In: a choice that has ended, with its experts. Out: fields of its JSON. A token's row holds the experts
that computed the token itself, in layer order, the highest score first.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from server.answers.choice import Choice


def encoded(experts: np.ndarray) -> dict[str, Any]:
    """An array [tokens, layers with experts, experts per token] as base64, in C order and little-endian."""
    data = base64.b64encode(experts.tobytes()).decode()
    return {"data": data, "dtype": experts.dtype.name, "shape": list(experts.shape)}


def of_answer(choice: Choice) -> dict[str, Any]:
    """`routed_experts` of the generated tokens; {} if the request did not ask for experts."""
    if choice.routed_experts is None:
        return {}
    start = len(choice.job.request.prompt_token_ids)
    return {"routed_experts": encoded(choice.routed_experts[start : start + choice.num_tokens])}


def of_prompt(choice: Choice) -> dict[str, Any]:
    """`prompt_routed_experts` of the prompt's tokens; {} if the request did not ask for experts."""
    if choice.routed_experts is None:
        return {}
    return {"prompt_routed_experts": encoded(choice.routed_experts[: len(choice.job.request.prompt_token_ids)])}


def of_both(choice: Choice, n: int) -> dict[str, Any]:
    """Both fields, for the end of a stream; only the first of a prompt's n choices has the prompt's experts."""
    return of_answer(choice) | (of_prompt(choice) if choice.index % n == 0 else {})
