"""The endpoint that CONTRIBUTING.md shows is one file and one word of the app."""

from __future__ import annotations

from server import app
from tests.contributing import example
from tests.server.asgi import Client


async def test_the_example_answers(tmp_path, monkeypatch, state):
    monkeypatch.setattr(app, "FAMILIES", (*app.FAMILIES, example("endpoint", tmp_path)))
    answer = await Client(app.make_app(state)).get("/uptime")
    assert answer.status == 200
    assert answer.json()["seconds"] >= 0
