"""Chooses the native file or the class of transformers that serves a checkpoint.

Thread: any; no state. In: config.json and --model-impl. Out: the architecture, the kind of its class's result, and the
implementation: native, transformers, or mixed. ConfigError says why a checkpoint is not served.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re

from engine.base.errors import ConfigError
from engine.checkpoint.pooling import Form
from engine.checkpoint.section import Section
from engine.models.base.both_ways import class_of_body
from engine.models.base.spelling import nearest_families
from engine.models.lookup import MIXED, families, family_of, inner_decoder, served

log = logging.getLogger(__name__)


DRAFTERS = re.compile("Eagle|DFlash|DSpark|Speculator|DraftModel")  # in names of classes
BACKEND = "pip install 'transformers>=5.10' greenlet"


def implementation_of(root: Section, text_only: bool, implementation: str) -> tuple[str, Form, str]:
    """(architecture, kind of result, implementation); a native file is preferred to transformers."""
    named = [str(name) for name in root.items("architectures", ())]
    for name in named if implementation != "transformers" else ():
        if (found := _own(name)) is not None:
            return *found, _of_family(found[0], implementation)
    through = implementation != "native" and _has_backend()
    if implementation == "transformers" and not through:
        raise ConfigError(f"--model-impl transformers: a package is not installed; run {BACKEND}")
    inside = _decoder_inside(root, implementation, through)
    if through:
        from engine.models.transformers_backend.skeleton import known, seeing  # transformers, which takes seconds

        suits = importlib.import_module(MIXED).suits
        for name in named:
            if name in seeing() and not text_only and implementation == "auto" and suits(name, root.values):
                return name, "generate", "mixed"
            if name in known() or (name in seeing() and not (text_only and inside)):
                return name, "generate", "transformers"
    if inside and text_only:
        log.info("%s without its towers is served as %s", ", ".join(named), inside[0])
        return inside[0], "generate", inside[1]
    if implementation == "transformers":
        got = ", ".join(named) or "none"
        raise ConfigError(
            f"--model-impl transformers: {got} is among neither the decoders nor the models with towers of the "
            "installed transformers"
        )
    lacks = implementation == "auto" and not _has_backend()
    more = f"; transformers may serve it: run {BACKEND}" if lacks else ""
    raise ConfigError(_unsupported(root, named, bool(inside)) + more)


def _of_family(architecture: str, implementation: str) -> str:
    """The implementation of a family's decoder; ConfigError if it is transformers' and excluded, or not installed."""
    if not family_of(architecture).through:
        return "native"
    if implementation == "native":
        raise ConfigError(f"--model-impl native: the decoder of {architecture} runs through transformers; leave it out")
    if not _has_backend():
        raise ConfigError(f"the decoder of {architecture} runs through transformers: run {BACKEND}")
    return "transformers"


def _has_backend() -> bool:
    """Whether the packages for models through transformers are installed."""
    return all(map(importlib.util.find_spec, ("transformers", "greenlet")))


def _decoder_inside(root: Section, implementation: str, through: bool) -> tuple[str, str] | None:
    """(architecture, implementation) of the decoder inside an unknown model, for serving text only."""
    section = root.values.get("text_config")
    kind = section.get("model_type") if isinstance(section, dict) else None
    if kind and implementation != "transformers" and (family := inner_decoder(kind)) is not None:
        return family.architectures[0], "native"
    if kind and through:
        from engine.models.transformers_backend.skeleton import known

        return next(((name, "transformers") for name, each in known().items() if each == kind), None)
    return None


def _unsupported(root: Section, named: list[str], has_decoder: bool) -> str:
    """The error text: why a checkpoint is not served, and what to do."""
    if not named:
        return (
            f"config.json names no architecture (model_type {root.values.get('model_type')!r}); if its class is among "
            f"the {len(families())} that `omniloop docs models` lists, name it with --hf-overrides architectures=..."
        )
    if "speculators_model_type" in root.values or DRAFTERS.search(named[0]):
        wanted = """serve the model that it drafts for with --speculative-config '{"model": FOLDER}'"""
        return f"config.json: {named[0]} is a drafter, no model of its own: {wanted}"
    code = "auto_map" in root.values
    near = nearest_families(named[0], families())
    said = (
        f"config.json: architecture {', '.join(named)} is not supported",
        ": its classes are code in the checkpoint (auto_map), which is never run" if code else "",
        "; with --language-model-only its decoder is served" if has_decoder else "",
        "; a copy for transformers' own classes may be served" if code else "",
        f"; the nearest are {', '.join(near)}, and" if near else ";",
        f" `omniloop docs models` lists all {len(families())} that are",
    )
    return "".join(said)


def _own(name: str) -> tuple[str, Form] | None:
    """(class in the family's spelling, kind of result) of an architecture with a native file; None: there is none."""
    causal, form = class_of_body(name)
    if (found := served(name)) is not None:
        spelled, family = found
        embeds: Form = "embed" if form == "generate" else form  # an encoder with the head of its training
        return spelled, embeds if family.head is not None else "generate"
    names = (causal, causal.replace("ForCausalLM", "ForConditionalGeneration")) if form != "generate" else ()
    return next(((name, form) for name in names if (found := served(name)) is not None and found[0] == name), None)
