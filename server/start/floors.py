"""Floors: the oldest allowed versions of packages that read untrusted bytes; the server refuses to start with older
ones.

See SECURITY S45. Owner: none, run once at start. In: the installed versions. Out: nothing, or a one-line ConfigError.
The numbers are those of pyproject.toml, which a later `pip install` of another package may override.
"""

from __future__ import annotations

import re
from importlib import metadata

from engine.base.errors import ConfigError

FLOORS = {
    "starlette": "1.3.0",
    "httptools": "0.6",
    "websockets": "15",
    "python-multipart": "0.0.27",
    "aiohttp": "3.13.3",
    "orjson": "3.11.6",
    "msgspec": "0.19",
    "jinja2": "3.1.6",
    "llguidance": "1.9",
    "pillow": "13.0.0",
    "av": "14",
    "safetensors": "0.5",
}


def check(floors: dict[str, str] = FLOORS) -> None:
    """Raise ConfigError for packages older than their floor; packages without metadata (vendored ones) are skipped."""
    old = []
    for name, floor in floors.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if numbers(version) < numbers(floor):
            old.append(f"{name} {version} (needs {floor})")
    if old:
        names = " ".join(f"'{each.split()[0]}>={floors[each.split()[0]]}'" for each in old)
        raise ConfigError(f"these packages have known faults: {', '.join(old)}; pip install {names}")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without its suffix and trailing zeros: "1.2.0rc1" is (1, 2)."""
    found = [int(each) for each in re.sub(r"[^\d.].*", "", version).split(".") if each]
    while found and not found[-1]:
        found.pop()
    return tuple(found)
