"""The body of /inference/v1/generate (API.md section 16): the output of render endpoints, and how to answer.

Spans and hashes here are a client's claims; render/widened.py recomputes them before use.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from server.schema import fields
from server.schema.common import SamplingFields, StreamOptions
from server.schema.fields import said


class TokenSampling(SamplingFields, kw_only=True):
    """`sampling_params`."""

    logprobs: fields.Logprobs = None


class Place(msgspec.Struct, kw_only=True):
    """The place of an item's rows among the token ids."""

    offset: Annotated[int, said("The first of the item's token ids.", 4)]
    length: Annotated[int, said("The number of the item's token ids.", 256)]


class Features(msgspec.Struct, kw_only=True):
    """Media items by modality, in prompt order: the hash of each, and its place."""

    mm_hashes: Annotated[dict[str, list[str]], said("Hashes of the items, by modality, in the order of the prompt.")]
    mm_placeholders: Annotated[
        dict[str, list[Place]], said("Places of the items, by modality, in the order of the prompt.")
    ]


class GenerateBody(msgspec.Struct, kw_only=True):
    token_ids: Annotated[list[int], said("The prompt.", [1, 2, 3])]
    sampling_params: Annotated[TokenSampling | None, said("How to sample.")] = None
    model: fields.Model = None
    features: Annotated[Features | None, said("The media of the prompt, as a render endpoint returned them.")] = None
    stream: fields.Stream = None
    stream_options: Annotated[StreamOptions | None, said("What a stream reports in addition to the answer.")] = None
    output_mode: Annotated[
        Literal["tokens", "text"] | None,
        said("Whether choices have token ids alone (tokens) or text too (text).", "tokens"),
    ] = None
    cache_salt: fields.CacheSalt = None
    priority: fields.Priority = None
    request_id: fields.RequestId = None
    return_routed_experts: fields.ReturnRoutedExperts = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        said("Refused where it has an entry: keys and values are not transferred between servers."),
    ] = None
