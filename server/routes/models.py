"""/v1/models: one object per name, for OpenAI and Anthropic clients at once (API.md section 16).

/model_info and /get_server_info give SGLang's router the name to route by.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.http.exchange import state_of
from server.routes.endpoint import check_model, json_response, route
from server.state import AppState


def card(state: AppState, name: str) -> dict[str, Any]:
    """One model object. `root` is the first served name: paths of the machine stay inside."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": state.created,
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
        "created": state.created,
        "owned_by": "omniloop",
        "root": state.names[0],
        "parent": None,
        "max_model_len": state.engine.max_model_len,
        "permission": [permission],
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.created)),
    }


async def listing(request: Request) -> Response:
    state = state_of(request)
    cards = [card(state, name) for name in state.names]
    return json_response(
        {"object": "list", "data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    )


async def one(request: Request) -> Response:
    """A name's object; without a name (`/v1/models/`) all of them."""
    state, name = state_of(request), request.path_params["id"]
    return json_response(card(state, check_model(state, name))) if name else await listing(request)


async def info(request: Request) -> Response:
    """The first name in the words of SGLang; a path of this machine is not among them."""
    state = state_of(request)
    name = state.names[0]
    return json_response(
        {
            "model_path": name,
            "served_model_name": name,
            "is_generation": state.engine.model.pooling is None,
            "context_length": state.engine.max_model_len,
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
