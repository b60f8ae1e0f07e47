"""Granite Speech (4.0 1B): a Granite decoder that hears sounds of any length."""

from __future__ import annotations

from functools import partial

from engine.encoders.granite_speech import UNREAD, GraniteSpeechTower, read_audio, rows
from engine.models import seeing
from engine.models.family import Family
from engine.models.hearing import hearing

FAMILY = Family(
    name="Granite Speech",
    model=hearing(GraniteSpeechTower, rows(), tower_name="encoder", ignore=UNREAD),
    text=partial(seeing.text, tied=True),
    towers={"encoder": read_audio},
    processor="granite_speech:GraniteSpeech",
)
