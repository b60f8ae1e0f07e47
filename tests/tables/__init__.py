"""Generated tables of README and of the pages: each lies between two marks and is generated from the code.

`python -m tests.tables` writes all of them; tests/tables/test_tables.py fails where a file's table differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.tables.fields import field_table
from tests.tables.flags import flag_table
from tests.tables.memory import memory_table
from tests.tables.metrics import metric_table
from tests.tables.support import architectures, formats, routes

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "server" / "docs"
END = "<!-- end of the table -->\n"
TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "memory": (ROOT / "README.md", memory_table),
    "architectures": (DOCS / "models.md", architectures),
    "formats": (DOCS / "models.md", formats),
    "fields": (DOCS / "fields.md", field_table),
    "flags": (DOCS / "flags.md", flag_table),
    "metrics": (DOCS / "metrics.md", metric_table),
    "routes": (DOCS / "clients.md", routes),
}


def mark(name: str) -> str:
    return f"<!-- table: {name} -->\n"


def written(name: str) -> str:
    """The table as it is in the file now."""
    text = TABLES[name][0].read_text(encoding="utf-8")
    assert mark(name) in text, f"{TABLES[name][0].name} has no mark of the table {name}"
    return text.partition(mark(name))[2].partition(END)[0]


def write(name: str) -> None:
    """Replaces the table in its file."""
    path, make = TABLES[name]
    before, found, rest = path.read_text(encoding="utf-8").partition(mark(name))
    assert found, f"{path.name} has no mark of the table {name}"
    path.write_text(before + found + make() + END + rest.partition(END)[2], encoding="utf-8")
