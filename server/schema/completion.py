"""The body of /v1/completions (API.md section 10)."""

from __future__ import annotations

from server.schema.common import SamplingFields


class CompletionBody(SamplingFields, kw_only=True):
    """What differs from chat. `prompt`: a text, texts, token ids, or lists of token ids; not mixed."""

    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    suffix: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
