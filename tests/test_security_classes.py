"""Every class of threats has at least one test named after the class: `test_s04_bytes_are_counted_as_they_arrive`.

The table describes each class; the number in the name of a failing test says which rule is broken.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from server.dialects.table import routes_of
from server.flags.config import Config

TESTS = Path(__file__).parent
CLASSES = {
    1: "headers, Host and path", 2: "API keys", 3: "routes that change the server", 4: "bodies and uploads",
    5: "the shape of JSON", 6: "browsers", 7: "request ids and stored objects", 8: "metrics", 9: "logs",
    10: "texts of errors", 11: "slow clients", 12: "disconnects and deadlines", 13: "which URLs are fetched",
    14: "which addresses are dialled", 15: "transfers", 16: "local files", 17: "data URLs", 18: "formats of images",
    19: "orientation and colours of images", 20: "audio", 21: "video", 22: "options of processors",
    23: "time and memory of decoding", 24: "media and prompt agree", 25: "token ids", 26: "special tokens in texts",
    27: "lengths", 28: "multipliers", 29: "chat templates", 30: "schemas and grammars", 31: "parsers of answers",
    32: "tensors of clients", 33: "code in checkpoints", 34: "adapters", 35: "identity in caches",
    36: "caches by key", 37: "residue in slots", 38: "one bad request", 39: "memory of the device",
    40: "a lost device", 41: "health", 42: "overload", 43: "drain", 44: "memory and the ledger", 45: "dependencies",
}  # fmt: skip


def named() -> dict[int, set[str]]:
    """Class -> tests with the class's number in their names: collected by pytest, with an assertion in the body."""
    found: dict[int, set[str]] = {number: set() for number in CLASSES}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                number := re.match(r"test_s(\d\d)_", node.name)
            ):
                found[int(number[1])].add(node.name)
    return found


def test_every_class_has_a_test_of_its_name():
    found = named()
    assert sorted(CLASSES) == list(range(1, 46))
    assert not [f"S{number}: {CLASSES[number]}" for number, tests in found.items() if not tests]


def test_s34_no_adapter_is_loaded_at_run_time_without_the_flag():
    assert not [line.path for line in routes_of(Config()) if "lora" in line.path or "adapter" in line.path]
