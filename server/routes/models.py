"""/v1/models: one object per name, for OpenAI and Anthropic clients at once (API.md section 16).

/model_info and /get_server_info give SGLang's router the name by which it routes.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.http.exchange import state_of
from server.routes.endpoint import adapter_of, check_model, json_response, route
from server.state import AppState

WEIGHTS = "default"  # the version of the weights that a server has started with


def card(state: AppState, name: str) -> dict[str, Any]:
    """One model object. `root` is the first served name, or an adapter's path below --lora-dir, so that no path of the
    machine is disclosed; `parent` of an adapter is the base.
    """
    adapter = None if state.adapters is None or name in state.names else state.adapters.get(adapter_of(state, name))
    created = state.created if adapter is None else adapter.created
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "omniloop",
        "root": state.names[0] if adapter is None else adapter.source.root,
        "parent": None if adapter is None else state.names[0],
        "max_model_len": state.engine.max_model_len,
        "permission": [permission],
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
    }


async def listing(request: Request) -> Response:
    state = state_of(request)
    named = () if state.adapters is None else (each.name for each in state.adapters.names)
    cards = [card(state, name) for name in (*state.names, *named)]
    return json_response(
        {"object": "list", "data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    )


async def one(request: Request) -> Response:
    """The object of a name; all objects without a name (`/v1/models/`)."""
    state, name = state_of(request), request.path_params["id"]
    return json_response(card(state, check_model(state, name))) if name else await listing(request)


async def info(request: Request) -> Response:
    """Facts about the first name under SGLang's keys; no path of this machine."""
    state = state_of(request)
    name = state.names[0]
    return json_response(
        {
            "model_path": name,
            "served_model_name": name,
            "is_generation": state.engine.model.pooling is None,
            "context_length": state.engine.max_model_len,
            "tokenizer_path": name,
            "architectures": [state.engine.model.architecture],
            "weight_version": WEIGHTS,
            "preferred_sampling_params": dict(state.defaults) or None,
            "has_image_understanding": "image" in state.engine.model.modalities,
            "has_audio_understanding": "audio" in state.engine.model.modalities,
        }
    )


ROUTES = [
    route("/v1/models", listing, "GET"),
    route("/v1/models/{id:path}", one, "GET"),
    route("/model_info", info, "GET"),
    route("/get_server_info", info, "GET"),
]
