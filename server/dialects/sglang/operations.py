"""The operations of SGLang's protocol, for /openapi.json."""

from __future__ import annotations

from dataclasses import replace

from server.dialects.sglang import answers, schema
from server.openapi import TABLE, TEXT, WORK, Operation

TAG = "SGLang"

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/generate"): Operation(
        "sglang_generate", TAG, "Continue texts or token ids, in SGLang's protocol",
        answers.SglangGenerated | list[answers.SglangGenerated], answers.SglangGenerated, schema.SglangBody,
        statuses=WORK,
    ),
    ("GET", "/get_model_info"): replace(
        TABLE["GET", "/model_info"], id="sglang_model_info", tag=TAG, summary="The same by its older path"
    ),
    ("GET", "/health_generate"): Operation(
        "sglang_health", TAG, "Ready for work: the engine has computed a token", media=TEXT
    ),
    ("POST", "/abort_request"): Operation(
        "sglang_abort", TAG, "End answers by their id", body=schema.SglangAbortBody, media=TEXT, statuses=WORK
    ),
}  # fmt: skip
