"""The routes that flags enable or disable: pages, operators' routes, loads of adapters, planted faults.

Owner: loop; made once, at start. In: the flags. Out: lines of the route table.
"""

from __future__ import annotations

from starlette.routing import Route

from server.flags.config import Config
from server.routes import adapters, dev, docs, faults, health, pages, playground

SWITCHES = {"--enable-runtime-lora": adapters.ROUTES, "--enable-dev-endpoints": dev.ROUTES}


def switch_of(path: str) -> str:
    """The flag that would enable a path; "": none."""
    return next((flag for flag, lines in SWITCHES.items() if any(line.path == path for line in lines)), "")


def routes(config: Config) -> list[Route]:
    """The enabled routes."""
    server = config.server
    found = [
        health.WITHOUT_PAGE if server.disable_playground else playground.ROUTES,
        *([] if server.disable_docs else [docs.ROUTES, pages.ROUTES]),
        *([adapters.ROUTES] if config.lora.enable_runtime_lora else []),
        *([dev.ROUTES] if server.enable_dev_endpoints else []),
        *([faults.ROUTES] if config.health.debug_faults else []),
    ]
    return [line for lines in found for line in lines]
