"""`python -m tests.tables [NAME ...]`: writes the tables into README and the pages."""

from __future__ import annotations

import sys

from tests.tables import TABLES, write

for name in sys.argv[1:] or TABLES:
    write(name)
