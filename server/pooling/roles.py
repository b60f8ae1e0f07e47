"""Roles: what a text is for, in the words of Cohere's, Jina's, Voyage's and NVIDIA's clients, as a prompt's name.

Pure. In: `input_type`, or Jina's `task`. Out: the name of one of the checkpoint's prompts, or None where it has none of
the kind, as for models that read all texts alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from server.errors import invalid, quoted

PROMPTS = {  # names of the checkpoint's prompts
    "query": ("retrieval.query", "query"),
    "document": ("retrieval.passage", "document", "passage", "corpus"),
}
ROLES = {
    "search_query": "query",
    "retrieval.query": "query",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}
OTHERS = ("classification", "clustering", "separation", "text-matching", "image")  # by name, or not at all


def prompt_named(param: str, asked: str, prompts: Mapping[str, str], exact: bool = False) -> str | None:
    """Raises ApiError for a word that neither the clients nor the checkpoint know; `exact`: that names no prompt."""
    if asked in prompts:
        return asked
    role, spelled = ROLES.get(asked, asked), {name.lower(): name for name in prompts}
    found = next((spelled[name] for name in (*PROMPTS.get(role, ()), role) if name in spelled), None)
    if found is None and (exact or (role not in PROMPTS and role not in OTHERS)):
        known = ", ".join(dict.fromkeys((*prompts, *PROMPTS, *ROLES, *(() if exact else OTHERS))))
        raise invalid(param, f"{param}: got {quoted(asked)}; must be one of {known}")
    return found
