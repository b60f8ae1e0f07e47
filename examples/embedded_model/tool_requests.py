"""Requests for tools that they do not name: only the description has their words, and values are amid the text.

A request is composed of an opening, a thing, joints and places for values; the description has the same words in
another form; the tool's name often has none of them. These requests are for training only, and none has the frame of a
held-out request.
"""

from __future__ import annotations

import re

from examples.embedded_model.sample import Dice
from examples.embedded_model.tool_words import VERBS, made_up, plain_words, some_keys, spelled

# Placeholders: {t} thing, {u} unit or place, {w} verb, {v} value, {n} number; {T} and {W} begin with a capital letter.
TOLD = ("{T}", "The {t}", "{T} of a {u}", "{T} of any {u}", "{T} in every {u}", "{T} by {u}", "{T} for a {u}", "Finds the {t}",
        "Finds {t} near a {u}", "Says what the {t} is", "Gives the {t} of a {u}", "Reads the {t} from a {u}", "Knows all {t}",
        "Orders {t}", "Orders a {t}", "Makes a {t}", "Sends a {t} to somebody", "Changes the {t}", "Counts {t}", "All about {t}",
        "Shows the {t}", "Brings a {t} to a {u}", "Use it for {t}", "A tool for the {t}", "Reports {t} and {u}",
        "{T} and {u} of a place", "Keeps a {t}", "Tells {t} from {u}", "Gets a {t} for a number of {u}", "Buys {t}")  # fmt: skip
OPENINGS = ("What is the {t}", "What is a {t}", "Where is the {t}", "When is the {t}", "Who has the {t}", "How big is the {t}",
            "How old is the {t}", "How good is the {t}", "How much {t} is there", "How many {t} are there", "What {t} is there",
            "Which {t} is best", "What {t} do they have", "Is there a {t}", "Are there any {t}", "Does anybody know the {t}",
            "Can somebody see the {t}", "What about the {t}", "Why is there no {t}", "Do you have the {t}", "Was there a {t}",
            "Could there be {t}", "May we have a {t}", "Have you seen the {t}")  # fmt: skip
WISHES = ("Tell me the {t}", "Give me the {t}", "Show me the {t}", "Say the {t}", "I need the {t}", "I need a {t}", "I need {t}",
          "I look for a {t}", "We want a {t}", "We want {t}", "Get a {t}", "Get the {t}", "Get us {t}", "Bring the {t}", "Bring a {t}",
          "Find a {t}", "Find {t}", "Describe the {t}", "Look at the {t}", "I would love a {t}", "A {t}", "The {t}", "{T}", "My {t}",
          "Order a {t}", "Order {t}", "I must have a {t}", "We look for the {t}", "Make a {t}", "Arrange a {t}", "Let us have a {t}",
          "One {t}", "Another {t}", "I want the {t}", "Search the {t}", "They want a {t}", "She needs a {t}", "Pass me a {t}")  # fmt: skip
BEFORE_VALUE = ("of", "for", "in", "near", "at", "to", "from", "with", "by", "around", "behind", "about", "on", "at the", "in the",
                "called", "named", "like")  # fmt: skip
NUMBERS = ("for {n} {u}", "with {n} {u}", "and {n} {u}", "in {n} {u}", "by {n} {u}", "of {n} {u}", "using {n} {u}", ", {n} {u}",
           "at {n} {u}", "after {n} {u}", "through {n} {u}", "on {n} {u}", "; we are {n} {u}", "that has {n} {u}", "{n} times",
           "from {n} {u}", "over {n} {u}", "plus {n} {u}", "for about {n} {u}", "with {n} more {u}", "which takes {n} {u}")  # fmt: skip
FIRST = (
    "{v}: {b}",
    "For {v}, {b}",
    "In {v}, {b}",
    "{v}, {b}",
    "About {v}: {b}",
    "I am at {v}. {b}",
    "It is {v}. {b}",
    "We go to {v}. {b}",
)
# Descriptions in the third person, and requests with the same verb and thing.
DOES = (
    "{W}s a {t}",
    "{W}s the {t}",
    "{W}s {t}",
    "To {w} a {t}",
    "{W} the {t}",
    "{T}: {w} it",
    "{W}s a {t} in a {u}",
    "Can {w} a {t}",
)
DO = ("{w} the {t}", "{w} a {t}", "{w} my {t}", "{w} this {t}", "{w} {t}", "{w} one {t}", "{w} our {t}", "{w} that {t}")
DO_VALUE = (
    "{v}",
    "{v}",
    "to {v}",
    "into {v}",
    "for {v}",
    "with {v}",
    "from {v}",
    "in {v}",
    "as {v}",
    "of {v}",
    "until {v}",
    "so that it is {v}",
)
# Things that do something at a place.
WHO = ("{T} that {w} in a {u}", "{T} which {w} at a {u}", "What {t} {w} in a {u}", "Number of {t} that {w}")
WHO_ASKED = ("Do {t} {w} in {v}", "Which {t} {w} at {v}", "Why do the {t} {w} near {v}", "Where do {t} {w} around {v}", "Do any {t} {w} in {v}",
             "How many {t} {w} near {v}", "How often do {t} {w} in {v}", "Count the {t} that {w} in {v}", "When do {t} {w} at {v}")  # fmt: skip
# Frames of held-out requests, with their own words replaced by placeholders.
HELD_FRAMES = frozenset((
    "which {t} can i see in {v}", "how is the {t} in {v}", "book a {t} to {v} for {n} {u}", "i want a {t} to {v} with {n} {u}",
    "i need a {t} to {v} for {n} {u}", "{w} the {t} {v} with {n} {u}", "how many {t} {w} in {v}",
))  # fmt: skip
Request = tuple[str, str, tuple[tuple[str, str], ...], str]


def frame(dice: Dice, number: bool, asked: tuple[str, ...]) -> tuple[str, str]:
    """(frame of the description, frame of the request), with placeholders for words and values."""
    while True:
        roll = dice.r.random()
        if roll < 0.4:
            told, base, end = dice.pick(TOLD), dice.pick(WISHES), "."
        elif roll < 0.62:
            told, base, end = dice.pick(TOLD), dice.pick(OPENINGS), "?"
        elif roll < 0.75:
            told, base, end = dice.pick(WHO), dice.pick(WHO_ASKED), "?"
        else:
            told, base, end = dice.pick(DOES), f"{dice.pick(DO)} {dice.pick(DO_VALUE)}", "."
        tail = dice.pick(NUMBERS) if number else ""
        if "{v}" not in base and dice.chance(0.12):
            first = dice.pick(FIRST)
            keep = first.endswith(". {b}") or base.startswith("I ")
            base = first.format(v="{v}", b=base if keep else base[0].lower() + base[1:])
        elif "{v}" not in base:
            base = f"{base} {dice.pick(BEFORE_VALUE)} {{v}}"
        text = f"{base} {tail}".strip().replace(" ,", ",").replace(" ;", ";")
        if plain_frame(text) in HELD_FRAMES:
            continue
        if roll >= 0.75:
            text, end = dice.pick(asked).format(c=text), ""
        return told, text[0].upper() + text[1:] + ("" if dice.chance(0.15) else end)


def plain_frame(text: str) -> str:
    """A frame without capitals and punctuation, for comparing."""
    return re.sub(r"[.?!,]", "", text.replace("{T}", "{t}").replace("{W}", "{w}")).lower().strip()


def request(dice: Dice, asked: tuple[str, ...], among: tuple[str, ...]) -> Request:
    """A tool and a request for it: (name, description, keys with kinds, request)."""
    number = dice.chance(0.45)
    told, text = frame(dice, number, asked)
    thing, unit, other, verb = plain_words(dice, 4)
    verb = dice.pick(VERBS) if dice.chance(0.4) else verb
    if dice.chance(0.12):
        thing = f"{thing} {plain_words(dice, 1)[0]}"
    last = thing.split()[-1]
    roll = dice.r.random()
    name = spelled(
        dice,
        [verb, last]
        if roll < 0.25
        else [other, last]
        if roll < 0.5
        else [other, *plain_words(dice, 1)]
        if roll < 0.9
        else [last, dice.pick(("of", "by", "in", "list"))],
    )
    value, *numbers = some_keys(dice, 2 if number else 1, among)
    if number and dice.chance(0.4) and unit != value:  # the key is the word next to the number
        numbers = [unit]
    elif dice.chance(0.15):
        value = unit if unit not in numbers else value
    keys = [(value, dice.pick(("town", "name", "words", "words", "mark"))), *((key, "integer") for key in numbers)]
    dice.r.shuffle(keys)
    words = {"t": thing, "u": unit, "w": verb, "T": thing.capitalize(), "W": verb.capitalize()}
    told = told.format(**words)
    text = text.format(**words, v=f"{{{value}}}", n=f"{{{numbers[0]}}}" if numbers else "")
    if dice.chance(0.04):
        told = f"{told} {made_up(dice)}"
    return name, told, tuple(keys), text[0].upper() + text[1:]
