"""The body of /v1/completions (API.md section 10)."""

from __future__ import annotations

from typing import Annotated

from server.schema import fields
from server.schema.common import SamplingFields
from server.schema.fields import said


class CompletionBody(SamplingFields, kw_only=True):
    """Fields of completions that chat does not have. `prompt`: a text, texts, token ids, or lists of token
    ids; not mixed.
    """

    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        said("A text, texts, token ids or lists of token ids to continue, not mixed.", "Once upon a time"),
    ] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        said(
            "Embeddings in place of a prompt, as base64 of a safetensors or torch file; needs --enable-prompt-embeds."
        ),
    ] = None
    suffix: Annotated[
        str | None, said("The text after the answer; for models with tokens for filling in the middle.")
    ] = None
    logprobs: fields.Logprobs = None
    echo: Annotated[bool | None, said("Whether the answer begins with the prompt.")] = None
