"""The body of /inference/v1/generate (API.md section 16): what the render endpoints return, and how to answer.

Spans and hashes here are what a client says; render/widened.py recomputes them, nothing uses them as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from server.schema.common import SamplingFields, StreamOptions


class TokenSampling(SamplingFields, kw_only=True):
    """`sampling_params`."""

    logprobs: int | None = None


class Place(msgspec.Struct, kw_only=True):
    """Where an item's rows stand among the token ids."""

    offset: int
    length: int


class Features(msgspec.Struct, kw_only=True):
    """Media items by modality, in prompt order: the hash of each, and its place."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Place]]


class GenerateBody(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: TokenSampling | None = None
    model: str | None = None
    features: Features | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    return_routed_experts: bool | None = None  # here, or in sampling_params
    kv_transfer_params: dict[str, Any] | None = None
