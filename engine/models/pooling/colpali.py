"""ColPali: a page retriever based on PaliGemma; each page is scaled to the tower's square."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.base.model_config import PoolingConfig
from engine.checkpoint.section import Section
from engine.models.media.paligemma import FAMILY as PALIGEMMA
from engine.models.media.seeing import seeing
from engine.models.pooling.page_retriever import below_vlm, placeholder, said, token_named, vectors


def pooling(folder: Path, body: Section, root: Section, given: Mapping[str, Any]) -> PoolingConfig:
    """The pooling config; <bos> begins every text and follows a picture."""
    begin = token_named(folder, "bos_token")
    words = said(folder, "visual_prompt_prefix", "Describe the image.")
    page = f"{placeholder(folder, root)}{begin}{words}\n"
    return vectors(folder, body, root, given, said(folder, "query_prefix", "Question: "), page, begin)


FAMILY = replace(
    PALIGEMMA, name="ColPali", architectures=("ColPaliForRetrieval",), model=below_vlm(seeing), pooling=pooling
)
