"""Ids of calls in a history, in the form that the model's chat template takes; ids may come from another server or API.

Owner: any thread; a CallIds lives for one conversation. In: ids as clients send them. Out: the same ids, if the
template takes any id; nine letters and digits, if it takes only these (Mistral's); the tool's name and a running
number, if it renders a call as its id only (Kimi's), since another id would hide the tool's name from the model. The
form is found once per template, by rendering a call with a long id: the template rejects it, or leaves out the name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Literal

IdForm = Literal["any", "short", "named"]

SHORT = re.compile(r"[a-zA-Z0-9]{9}")
NAMED = re.compile(r"functions\.(.+):[0-9]+")
LONG_ID, SHORT_ID, NAME = "a-long-id-of-a-call", "abcdefgh9", "name-of-a-tool"


def id_form(render: Callable[[str], str | None]) -> IdForm:
    """The form of ids. `render` renders a conversation that has a call of NAME with an id; None if the template rejects
    it.
    """
    text = render(LONG_ID)
    if text is None:
        return "any" if render(SHORT_ID) is None else "short"
    return "named" if LONG_ID in text and NAME not in text else "any"


def shortened(given: str) -> str:
    """Nine letters and digits; equal ids give equal results."""
    return given if SHORT.fullmatch(given) else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class CallIds:
    """Ids of one conversation, in order."""

    def __init__(self, form: Callable[[], IdForm]) -> None:
        self._form = form  # called only if there are calls
        self._count = 0
        self._made: dict[str, str] = {}

    def asked(self, given: Any, name: str) -> Any:
        """The id of a call of the tool `name`."""
        form, count = self._form(), self._count
        self._count += 1
        known = given if isinstance(given, str) else ""
        if form == "short":
            return shortened(known) if known else f"call{count:05d}"
        if form == "named":
            found = NAMED.fullmatch(known)
            self._made[known] = known if found and found[1] == name else f"functions.{name}:{count}"
            return self._made[known]
        return given

    def answered(self, given: str) -> str:
        """The id in a tool's result."""
        form = self._form()
        return shortened(given) if form == "short" else self._made.get(given, given)
