"""llama.cpp's sampling fields as ours: converted, refused by name, or passed without effect.

Owner: loop, pure functions. In: LlamaFields. Out: SamplingFields. Defaults are the model's and the operator's, not
llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from server.dialects.llama_cpp.schema import LlamaFields
from server.errors import invalid, quoted
from server.render.tokenizer import Tokenizer
from server.schema.common import SamplingFields

SAME = (
    "stream", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "ignore_eos", "return_progress",
)  # fmt: skip
# Our field -> the client's, in errors.
NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.json": "json_schema",
}
NEVER = -100.0  # the bias of a token that false forbids


def sampling_of(body: LlamaFields, tokenizer: Tokenizer) -> SamplingFields:
    """The sampling fields, without max_tokens. Raises ApiError."""
    found: dict[str, Any] = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.repeat_last_n not in (None, -1, 0):
        text = f"repeat_last_n: got {body.repeat_last_n}; must be -1, the whole text, or 0, no penalty"
        raise invalid("repeat_last_n", text)
    if body.repeat_penalty is not None and body.repeat_last_n != 0:
        found["repetition_penalty"] = body.repeat_penalty
    if body.logit_bias:
        found["logit_bias"] = biases(body.logit_bias, tokenizer)
    if body.grammar and body.json_schema is not None:
        raise invalid("grammar", "grammar: not together with json_schema; send one of them")
    if body.grammar:
        found["structured_outputs"] = {"grammar": body.grammar}
    if body.json_schema is not None:
        found["structured_outputs"] = {"json": body.json_schema}
    return SamplingFields(**found)


def biases(given: list[list[Any]] | dict[str, Any], tokenizer: Tokenizer) -> dict[str, float]:
    """`logit_bias` by token id; the tokens of a text have its bias each."""
    pairs: Iterable[Any] = given.items() if isinstance(given, dict) else given
    found: dict[str, float] = {}
    for at, pair in enumerate(pairs):
        if len(pair) != 2 or isinstance(pair[0], float | bool) or isinstance(pair[1], str) or pair[1] is True:
            text = f"logit_bias[{at}]: got {quoted(pair)}; must be a token id or a text, and a number or false"
            raise invalid(f"logit_bias[{at}]", text)
        token, bias = pair[0], NEVER if pair[1] is False else float(pair[1])
        if isinstance(token, str) and not (isinstance(given, dict) and token.isdigit()):
            found |= {str(each): bias for each in tokenizer.encode(token)}
        else:
            found[str(token)] = bias
    return found


def limit_of(body: LlamaFields) -> int | None:
    """max_tokens; None: the rest of the context. With n_predict 0 one token is made, and not sent."""
    most = body.n_predict
    return None if most is None or most < 0 else max(most, 1)
