"""The whole route table: our own routes, those of other servers' protocols, and the description of all of them.

Owner: loop; made once, at start. In: the flags. Out: a line for each path. A dialect is a folder here, with one line in
each of the two tables below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from server.dialects.cohere import routes as cohere
from server.dialects.decisions import routes as decisions
from server.dialects.llama_cpp import routes as llama_cpp
from server.dialects.ollama import routes as ollama
from server.dialects.sagemaker import routes as sagemaker
from server.dialects.sglang import routes as sglang
from server.dialects.tei import routes as tei
from server.flags.config import Config
from server.routes import docs
from server.routes.endpoint import route
from server.routes.table import own_routes

if TYPE_CHECKING:
    from server.openapi import Operation

FAMILIES = (ollama, llama_cpp, sglang, decisions, tei, cohere, sagemaker)


def operations() -> dict[tuple[str, str], Operation]:
    """Every operation by method and path, for /openapi.json; its types take some milliseconds to import."""
    from server.dialects.cohere.operations import OPERATIONS as COHERE
    from server.dialects.decisions.operations import OPERATIONS as DECISIONS
    from server.dialects.llama_cpp.operations import OPERATIONS as LLAMA_CPP
    from server.dialects.ollama.operations import OPERATIONS as OLLAMA
    from server.dialects.sagemaker.operations import OPERATIONS as SAGEMAKER
    from server.dialects.sglang.operations import OPERATIONS as SGLANG
    from server.dialects.tei.operations import OPERATIONS as TEI
    from server.openapi import TABLE
    from server.routes.batch_operations import OPERATIONS as BATCHES

    return {**TABLE, **BATCHES, **OLLAMA, **LLAMA_CPP, **SGLANG, **DECISIONS, **TEI, **COHERE, **SAGEMAKER}


def routes_of(config: Config) -> list[Route]:
    """Every line of the table that the flags enable."""
    described = [*docs.ROUTES, route("/openapi.json", docs.describing(operations), "GET")]
    return [
        *own_routes(config),
        *(line for family in FAMILIES for line in family.ROUTES),
        *([] if config.server.disable_docs else described),
    ]
