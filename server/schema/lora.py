"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter (API.md section 17)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.schema.fields import said


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    lora_name: Annotated[str, said("The name by which requests will choose the adapter.", "support-tone")]
    lora_path: Annotated[str, said("A folder below --lora-dir, or ORG/NAME on the hub with --lora-hub.", "tone/v2")]
    load_inplace: Annotated[bool | None, said("Whether the adapter replaces a loaded one of the same name.")] = None
    sha256: Annotated[str | None, said("The SHA-256 that adapter_model.safetensors must have, in hexadecimal.")] = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    lora_name: Annotated[str, said("The name of a loaded adapter.", "support-tone")]
