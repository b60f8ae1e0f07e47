"""Roles: the purpose of a text, in the words of Cohere's, Jina's, Voyage's and NVIDIA's clients, as a prompt's name.

Pure. In: `input_type`, or Jina's `task`. Out: the name of one of the checkpoint's prompts, or None if it has none for
this purpose, as in models that read all texts alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from server.errors import invalid, quoted

PROMPTS = {  # role -> names that checkpoints give to its prompt
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
OTHERS = ("classification", "clustering", "separation", "text-matching", "image")  # used only as names


def prompt_named(param: str, asked: str, prompts: Mapping[str, str], exact: bool = False) -> str | None:
    """The prompt's name. Raises ApiError for an unknown word; `exact`: also for a word that names no prompt."""
    if asked in prompts:
        return asked
    role, spelled = ROLES.get(asked, asked), {name.lower(): name for name in prompts}
    found = next((spelled[name] for name in (*PROMPTS.get(role, ()), role) if name in spelled), None)
    if found is None and (exact or (role not in PROMPTS and role not in OTHERS)):
        known = ", ".join(dict.fromkeys((*prompts, *PROMPTS, *ROLES, *(() if exact else OTHERS))))
        raise invalid(param, f"{param}: got {quoted(asked)}; must be one of {known}")
    return found
