"""The worked examples of CONTRIBUTING.md as modules, for the tests that build and run them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"


def example(name: str, folder: Path) -> ModuleType:
    """Writes the code block after `<!-- example: name -->` into `folder` and imports it."""
    (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    file = folder / f"example_{name}.py"
    file.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"example_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
