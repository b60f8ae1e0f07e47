"""SigLIP 2 of pictures of any shape (NaFlex): SigLIP, whose learned positions are stretched over each picture."""

from __future__ import annotations

from dataclasses import replace

from engine.models.pooling.siglip import FAMILY as SIGLIP

FAMILY = replace(SIGLIP, name="SigLIP 2", architectures=("Siglip2Model",), processor="naflex:NaflexPictures")
