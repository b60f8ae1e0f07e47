"""SigLIP 2 for pictures of any shape (NaFlex): SigLIP with learned positions interpolated to each picture."""

from __future__ import annotations

from dataclasses import replace

from engine.models.pooling.siglip import FAMILY as SIGLIP

FAMILY = replace(SIGLIP, name="SigLIP 2", architectures=("Siglip2Model",), processor="naflex:NaflexPictures")
