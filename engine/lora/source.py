"""Source: where an adapter's files are. Frozen; any thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """The folder of an adapter in PEFT's format."""

    folder: str  # an existing folder, or the path of one below `beneath`
    beneath: str = ""  # the folder that must contain it, without symbolic links; "": the operator named `folder`
    root: str = ""  # the source as clients may see it
    sha256: str = ""  # the hash that the weights file must have, in hexadecimal; "": any
