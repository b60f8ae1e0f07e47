"""Ids of calls in a history, as the model's chat template takes them; they may come from another server or dialect.

Owner: any thread; a CallIds lives for one conversation. In: ids as clients send them. Out: the same, where the template
takes any; else nine letters and digits (Mistral's), or the tool's name and a running number, where the template shows a
call by its id alone (Kimi's): another id would hide from the model what it called. Which of these is tried once per
template: a call with a long id is refused, or shown without its name.
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


def id_form(shown: Callable[[str], str | None]) -> IdForm:
    """`shown`: a conversation as text, in which the tool NAME is called with an id; None where the template refuses."""
    text = shown(LONG_ID)
    if text is None:
        return "any" if shown(SHORT_ID) is None else "short"
    return "named" if LONG_ID in text and NAME not in text else "any"


def shortened(given: str) -> str:
    """The same id always becomes the same."""
    return given if SHORT.fullmatch(given) else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class CallIds:
    """Ids of one conversation, in its order."""

    def __init__(self, form: Callable[[], IdForm]) -> None:
        self._form = form  # asked for where there are calls
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
        """The id in a tool's answer."""
        form = self._form()
        return shortened(given) if form == "short" else self._made.get(given, given)
