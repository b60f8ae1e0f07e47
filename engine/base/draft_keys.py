"""Keys of vLLM's --speculative-config that choose nothing here: values that are taken, and why others are refused.

In: the object of the flag. Out: the object without these keys, or a ConfigError that names the key. Thread: any. Source
of the names: vllm/config/speculative.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.base.errors import ConfigError


class Passed(NamedTuple):
    """A key. `holds`: values that change nothing here."""

    advice: str
    holds: tuple[Any, ...] = (None,)


TREES = "drafts are chains, not trees; leave it out"
PASSED = {
    "attention_backend": Passed("kernels are the server's own; leave it out"),
    "code_revision": Passed("code from a checkpoint never runs; leave it out"),
    "disable_padded_drafter_batch": Passed("drafts of all requests share passes; leave it out", (None, False)),
    "draft_load_config": Passed("a drafter is read like the model; leave it out"),
    "draft_tensor_parallel_size": Passed("a drafter is on one device; give 1", (None, 1)),
    "enforce_eager": Passed("use --enforce-eager", (None, False)),
    "kv_cache_dtype": Passed("a drafter's layers have a type of their own; leave it out", (None, "auto")),
    "speculative_token_tree": Passed(TREES),
    "tensor_parallel_size": Passed("a drafter is on one device; give 1", (None, 1)),
    "use_local_argmax_reduction": Passed("one device has nothing to reduce; leave it out", (None, False, True)),
}


def without_passed(flag: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The object without keys whose values change nothing here. Raises ConfigError for other values of these keys."""
    for key in given.keys() & PASSED.keys():
        value, entry = given[key], PASSED[key]
        if not any(value is held or (value == held and type(value) is type(held)) for held in entry.holds):
            raise ConfigError(f"{flag}: {key}={value!r}: {entry.advice}")
    return {key: value for key, value in given.items() if key not in PASSED}
