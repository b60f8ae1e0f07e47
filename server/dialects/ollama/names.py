"""Names of the served model as Ollama's clients write them. Owner: loop."""

from __future__ import annotations

from server.http.exchange import Exchange
from server.routes.endpoint import check_model, served_model
from server.state import AppState

LATEST = ":latest"


async def served_of(exchange: Exchange, name: str | None) -> str:
    """The same for a route that computes: an adapter of that name serves the exchange."""
    model = model_of(exchange.state, name)
    await served_model(exchange, model if model in exchange.state.names else model.removesuffix(LATEST))
    return model


def model_of(state: AppState, name: str | None) -> str:
    """The name to answer with: the requested one, with or without :latest, or the first one. 404 for other names."""
    known = (name or "").removesuffix(LATEST)
    if known and name not in state.names:
        check_model(state, known)
        return str(name)
    return check_model(state, name)
