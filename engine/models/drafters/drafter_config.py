"""DrafterConfig: what every kind of drafter has in its configuration; Files: where it is read.

Thread: any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.base.drafts import MOST_DRAFTS
from engine.base.model_config import TextConfig
from engine.checkpoint.config import saved_dtype
from engine.checkpoint.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """One drafter as the engine sees it."""

    folder: str
    text: TextConfig  # its decoder; vocab_size counts the target's tokens
    vocab_size: int  # of its head
    streams: tuple[int, ...]  # of the target's residual streams those that it reads: n is the input of layer n
    stream_width: int
    torch_dtype: torch.dtype
    num_tokens: int  # drafts for which the file was made; 0: not given
    most_tokens: int = MOST_DRAFTS  # drafts that it can guess in a step
    small_head: bool = False  # the operator's choice, see small_head
    warning: str = ""  # what the operator should know about the files


@dataclass(frozen=True, slots=True)
class Files:
    """A drafter's folder, its config.json, and the object there that describes the decoder."""

    folder: str
    root: Section
    body: Section

    def options(self, *objects: str) -> Section:
        """The keys at the top and those of these objects of the file; null counts as missing. Raises ConfigError."""
        there = [self.root.section(name) for name in objects if self.root.values.get(name) is not None]
        inner = {key: value for each in there for key, value in each.values.items()}
        values = {**inner, **{key: value for key, value in self.root.values.items() if value is not None}}
        return Section({key: value for key, value in values.items() if value is not None}, self.root.path)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the files' weights."""
        return saved_dtype(self.root.values, self.body.values)

    @property
    def num_tokens(self) -> int:
        """How many drafts the file proposes; 0: it does not say. Raises ConfigError."""
        if self.root.values.get("speculators_config") is None:
            return 0
        methods = self.root.section("speculators_config").values.get("proposal_methods")
        for method in methods if isinstance(methods, list) else ():
            count = method.get("speculative_tokens") if isinstance(method, dict) else None
            if isinstance(count, int) and 1 <= count <= MOST_DRAFTS:
                return count
        return 0
