"""Functions from files of transformers that cannot be imported without torchvision."""

import __future__

import ast
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch


def cut_out(path: str, name: str) -> Any:
    """The function `name`, compiled from a source file of transformers."""
    root = Path(importlib.util.find_spec("transformers").origin).parent
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    scope = {"np": np, "math": math, "torch": torch}
    lazy = __future__.annotations.compiler_flag
    exec(compile(ast.Module(found, []), path, "exec", lazy), scope)
    return scope[name]
