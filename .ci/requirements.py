"""Prints the requirements of pyproject.toml (and of the extras named), one per line, for pip -r."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
wanted = project["dependencies"] if len(sys.argv) == 1 else []
for extra in sys.argv[1:]:
    wanted = [*wanted, *project["optional-dependencies"][extra]]
print("\n".join(wanted))
