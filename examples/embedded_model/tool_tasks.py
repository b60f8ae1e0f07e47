"""Tools: calls in Hermes' format, answers from a tool's result, and JSON that follows a schema in the question.

The skill to learn is copying: a tool's name and the keys of its arguments from the prompt, values from the question.
Names, keys and descriptions therefore use any words of the list and rarely repeat: with only 40 verbs and 34 keys, a
model learns them by heart. `tool_requests` composes requests that do not name their tool. Held-out tools have verbs, words, keys and
phrasings that training never draws. Tools are in the system text, as the template writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.embedded_model import talk_tasks, text_tasks
from examples.embedded_model.blueprint import tools_text
from examples.embedded_model.sample import Dice, Turn
from examples.embedded_model.tool_requests import request
from examples.embedded_model.tool_words import (
    HELD_VERBS,
    KEYS,
    MARKS,
    PARTICLES,
    VERBS,
    as_said,
    plain_words,
    schema_of,
    shown,
    some_keys,
    spelled,
    spoken,
    throw_value,
)

# Tools that requests do not name: name, description, keys with kinds, questions.
KNOWN = (
    ("get_weather", "Weather of a town", (("city", "town"),),
     ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}", "Is it raining in {city}?")),
    ("add_numbers", "Adds two numbers", (("a", "integer"), ("b", "integer")),
     ("Add {a} and {b} with the tool.", "What is {a} + {b}? Use the tool.", "Let the tool add {a} and {b}.")),
    ("get_time", "Time of day in a town", (("town", "town"),),
     ("What time is it in {town}?", "Tell me the time in {town}.", "How late is it in {town}?")),
    ("send_message", "Sends a text to somebody", (("to", "name"), ("text", "words")),
     ("Tell {to}: {text}", "Send {to} the message {text}", "Write to {to}: {text}")),
    ("set_timer", "Starts a timer", (("minutes", "integer"),),
     ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer, {minutes} minutes")),
    ("get_price", "Price of a thing", (("item", "words"),),
     ("What does a {item} cost?", "How much is the {item}?", "What is the price of {item}?")),
    ("play_song", "Plays music", (("title", "words"),), ("Play {title}.", "I want to hear {title}.", "Put on {title}.")),
    ("find_person", "Looks somebody up", (("name", "name"),), ("Who is {name}?", "Find {name}.", "Do you know {name}?")),
)  # fmt: skip
HELD_KNOWN = (
    ("paint_wall", "Paints a wall", (("shade", "mark"), ("coats", "integer")),
     ("Paint the wall {shade} with {coats} coats.",)),
    ("population_of", "People who live in a town", (("place", "town"),), ("How many people live in {place}?",)),
    ("call_taxi", "Orders a taxi", (("goal", "town"), ("people", "integer")), ("I need a taxi to {goal} for {people} people.",)),
)  # fmt: skip
# Descriptions, with questions that use the description's words: for one value, or for a value and a number.
TOLD = (
    (
        "{T} of a {u}",
        ("What is the {t} of {v}?", "Tell me the {t} of {v}.", "Which {t} has {v}?", "I want the {t} of {v}."),
    ),
    ("Finds the {t}", ("Find the {t} for {v}.", "Where is the {t} for {v}?", "Is there a {t} for {v}?")),
    ("Counts the {t} in a {u}", ("How many {t} are in {v}?", "Count the {t} in {v}.", "How much {t} has {v}?")),
    ("Orders a {t} for a {u}", ("I need a {t} for {v}.", "Get me a {t} to {v}.", "Bring a {t} to {v}.")),
    ("{T} and {u}", ("Does {v} have a {t} or a {u}?", "Look at the {t} and {u} of {v}.", "{t} and {u}: {v}")),
    ("Changes the {t}", ("Make the {t} {v}.", "Turn the {t} to {v}.", "Let the {t} become {v}.")),
)
TOLD_TWICE = (
    ("Orders {t}", ("I need {n} {t} from {v}.", "Bring {n} {t} to {v}.", "Get {n} {t} for {v}.")),
    ("{T} with a {u} for a number of people", ("A {t} in {v} for {n} people.", "Find a {t} in {v}, we are {n}.")),
    ("Changes {t} and {u}", ("Make the {t} {v}, {n} times.", "The {t} becomes {v} with {n} {u}.")),
    ("Waits for the {t}", ("Wait {n} minutes for the {t} of {v}.", "The {t} of {v} comes in {n} hours.")),
)
HELD_TOLD = (("{T} in a {u}", ("Which {t} can I see in {v}?", "How is the {t} in {v}?")),)
HELD_TOLD_TWICE = (("Books a {t}", ("Book a {t} to {v} for {n} people.", "I want a {t} to {v} with {n} seats.")),)
ASKED = ("{c}.", "{c}", "Please {c}.", "Can you {c}?", "I want to {c}.", "Could you {c}?", "{c} now.", "I would like to {c}.",
         "Help me {c}.", "{c}, please.", "You should {c}.", "Let us {c}.", "Would you please {c}?", "Now {c}.", "We have to {c}.",
         "Try and {c}.", "Will you {c}?", "Now is the time to {c}.", "I need you to {c}.", "Hello, {c}.", "It would be good to {c}.",
         "My friend wants to {c}.", "Do {c}.", "First {c}.", "Then {c}.", "Is it possible to {c}?", "Why not {c}?", "Time to {c}!",
         "Next, {c}.", "You can {c}.", "So {c}!", "Be so kind and {c}.", "How about this: {c}")  # fmt: skip
HELD_ASKED = ("Would you {c}?", "Try to {c}.", "It is time to {c}.")
NAMED = (
    "Use {n}",
    "Call {n}",
    "Call the tool {n}",
    "Run {n}",
    "With {n}",
    "The tool {n}",
    "Please use {n}",
    "Take {n}",
)
# A key with its value: an opening and a joint; training never combines the pairs of HELD_PAIRS.
OPENINGS = ("", "", "with ", "with the ", "the ", "where ", "given ", "for ", "let ", "its ", "and its ", "using ", "having ", "take ",
            "here ", "by ")  # fmt: skip
JOINTS = ("{k} {v}", "{k} {v}", "{k}: {v}", "{k} is {v}", "{k} = {v}", "{k} be {v}", "{k} set to {v}", "{k} as {v}", "{k} of {v}",
          "{v} as {k}", "{v} as the {k}", "{v} for the {k}", "{k} equal to {v}", "{k} '{v}'", "{k} - {v}", "{k} at {v}",
          "{k}={v}")  # fmt: skip
HELD_PAIRS = ("given {k} {v}", "let {k} be {v}", "with {k} set to {v}")
FAILED = ("not found", "no permission", "out of range", "closed", "no answer", "too many requests", "wrong key")


@dataclass(frozen=True)
class Tool:
    """A tool in the form that clients send, with the kinds of its arguments."""

    function: dict[str, Any]
    keys: tuple[tuple[str, str], ...]  # with the kind of each value
    command: str  # the action that a question requests
    questions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.function["name"])


def _pair(dice: Dice, key: str, value: Any) -> str:
    """The words for a key and its value in a question."""
    while True:
        form = dice.pick(HELD_PAIRS) if dice.held else dice.pick(OPENINGS) + dice.pick(JOINTS)
        if dice.held or form not in HELD_PAIRS:
            return form.format(k=as_said(dice, key), v=shown(value))


def _function(dice: Dice, name: str, told: str, keys: tuple[tuple[str, str], ...], marks: dict[str, list[str]]) -> dict:
    """The definition of a function, in one of the forms that clients write."""
    properties = {}
    for key, kind in keys:
        properties[key] = {"enum": marks[key]} if kind == "mark" else schema_of(kind)
        if dice.chance(0.2):
            properties[key]["description"] = f"the {key.replace('_', ' ')}"
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if dice.chance(0.8):
        parameters["required"] = [key for key, _ in keys]
    if dice.chance(0.2):
        parameters["additionalProperties"] = False
    return (
        {"name": name, "description": told, "parameters": parameters}
        if told
        else {"name": name, "parameters": parameters}
    )


def _told(dice: Dice) -> tuple[str, str, tuple[tuple[str, str], ...], tuple[str, ...]]:
    """A tool whose questions use the words of its description: (name, description, keys, questions)."""
    twice = dice.chance(0.4)
    if twice:
        told, questions = dice.pick(HELD_TOLD_TWICE if dice.held else TOLD_TWICE)
    else:
        told, questions = dice.pick(HELD_TOLD if dice.held else TOLD)
    thing, unit = plain_words(dice, 2)
    value, *number = some_keys(dice, 2 if twice else 1)
    name = spelled(dice, [*plain_words(dice, 1), thing] if dice.chance(0.6) else plain_words(dice, 2))
    keys = [(value, dice.pick(("town", "name", "words"))), *((key, "integer") for key in number)]
    dice.r.shuffle(keys)
    places = {
        "T": thing.capitalize(),
        "t": thing,
        "u": unit,
        "v": f"{{{value}}}",
        "n": f"{{{number[0]}}}" if number else "",
    }
    return name, told.format(**places), tuple(keys), tuple(question.format(**places) for question in questions)


@dataclass(frozen=True)
class Company:
    """Verbs and keys that the tools of one conversation draw from."""

    verbs: tuple[str, ...] = VERBS
    keys: tuple[str, ...] = KEYS


def tool(dice: Dice, company: Company | None = None) -> Tool:
    """A random tool or one of the known ones."""
    company = company or Company()
    marks = {}
    command, roll = "", dice.r.random()
    if roll < (0.12 if dice.held else 0.06):
        name, told, keys, questions = dice.pick(HELD_KNOWN if dice.held else KNOWN)
    elif roll < (0.3 if dice.held else 0.14):
        name, told, keys, questions = _told(dice)
    elif roll < 0.48 and not dice.held:
        name, told, keys, question = request(dice, ASKED, company.keys)
        questions = (question,)
    else:
        words = (
            dice.pick(HELD_VERBS if dice.held else company.verbs).split() if dice.chance(0.5) else plain_words(dice, 1)
        )
        if not dice.held and dice.chance(0.25):
            words = [*words, dice.pick(PARTICLES)]
        things = plain_words(dice, 2 if dice.chance(0.2) else 1)
        name, questions = spelled(dice, [*words, *things]), ()
        command = " ".join([*words, dice.pick(("the", "the", "a", "this")), *things])
        told = dice.pick((command.capitalize(), f"{command.capitalize()}.", f"Use it to {command}"))
        count = dice.whole(0, 3) if dice.chance(0.3 if dice.held else 0.45) else dice.whole(1, 2)
        kinds = ("words", "words", "words", "integer", "integer", "number", "boolean", "mark")
        keys = tuple((key, dice.pick(kinds)) for key in some_keys(dice, count, company.keys))
    for key, kind in keys:
        if kind == "mark":
            marks[key] = dice.some(MARKS, dice.whole(2, 4)) if dice.chance(0.5) else plain_words(dice, dice.whole(2, 4))
    return Tool(_function(dice, name, told, keys, marks), tuple(keys), command, tuple(questions))


def _question(dice: Dice, chosen: Tool) -> tuple[str, dict[str, Any]]:
    """(a question that fits only this tool, the arguments in the question)."""
    properties = chosen.function["parameters"]["properties"]
    given = {
        key: dice.pick(properties[key]["enum"]) if kind == "mark" else throw_value(dice, kind)
        for key, kind in chosen.keys
    }
    if chosen.questions:
        return dice.pick(chosen.questions).format(**given), given
    if "required" not in chosen.function["parameters"] and len(given) > 1 and dice.chance(0.5):
        del given[dice.pick(list(given))]
    said = dice.pick((" and ", ", ", ", ")).join(_pair(dice, key, value) for key, value in given.items())
    if not dice.held and dice.chance(0.1):
        command = dice.pick(NAMED).format(n=chosen.name)
        return (f"{command} {said}" if said else command), given
    command = f"{chosen.command} {said}" if said else chosen.command
    text = dice.pick(HELD_ASKED if dice.held else ASKED).format(c=command)
    return text[0].upper() + text[1:], given


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call in the model's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _offer(dice: Dice) -> Tool:
    """Adds one to three tools (in training up to five) to the system text; returns the tool of the question."""
    tools: dict[str, Tool] = {}
    company, count = Company(), dice.whole(1, 3)
    if not dice.held:
        count += dice.whole(1, 2) if dice.chance(0.2) else 0
        if dice.chance(0.4):  # similar tools: the model must read the difference
            company = Company(tuple(dice.some(VERBS, 2)), tuple(dice.some(KEYS, 4)))
    for _ in range(count):
        thrown = tool(dice, company)
        tools[thrown.name] = thrown
    dice.tools = tools_text([{"type": "function", "function": one.function} for one in tools.values()])
    return dice.pick(list(tools.values()))


def calls(dice: Dice) -> list[Turn]:
    """A question with a call, or a question about something else with an answer."""
    chosen = _offer(dice)
    if dice.chance(0.15):
        maker, _, _ = dice.pick((*text_tasks.TASKS, *talk_tasks.TASKS[:2]))
        task, dice.task = dice.task, maker.__name__
        made = maker(dice)
        dice.task = task
        return made if isinstance(made, list) else [made]
    question, given = _question(dice, chosen)
    return [Turn([question], call_text(chosen.name, given), "call")]


def answers(dice: Dice) -> list[Turn]:
    """A call, its result, and an answer with the content of the result."""
    chosen = _offer(dice)
    question, given = _question(dice, chosen)
    asked = Turn([question], call_text(chosen.name, given), "call", "tool_call")
    roll = dice.r.random()
    if roll < 0.15:
        failed = dice.pick(FAILED)
        result, answer = json.dumps({"error": failed}), f"That did not work: {failed}."
    elif roll < 0.3:
        result, answer = json.dumps({dice.pick(("ok", "done", "success")): True}), "Done."
    elif roll < 0.45:
        value = shown(throw_value(dice, dice.pick(("words", "integer", "town"))))
        result, answer = value, f"The answer is {value}."
    else:
        keys = some_keys(dice, dice.whole(1, 3))
        found = {key: throw_value(dice, dice.pick(("words", "integer", "number", "town", "name"))) for key in keys}
        result = json.dumps(found, ensure_ascii=False)
        answer = " ".join(f"The {spoken(key)} is {shown(value)}." for key, value in found.items())
    return [asked, Turn([f"<tool_response>\n{result}\n</tool_response>"], answer, "exact", "tool_answer")]


def by_schema(dice: Dice) -> list[Turn]:
    """Values of a sentence as JSON that follows a schema in the question."""
    keys = some_keys(dice, dice.whole(1, 4))
    kinds = {
        key: dice.pick(("words", "words", "integer", "integer", "number", "boolean", "town", "name")) for key in keys
    }
    given = {key: throw_value(dice, kind) for key, kind in kinds.items()}
    schema = {"type": "object", "properties": {key: schema_of(kind) for key, kind in kinds.items()}}
    if dice.chance(0.7):
        schema["required"] = keys
    order = dice.some(keys, len(keys))
    said = ", ".join(_pair(dice, key, given[key]) for key in order)
    shapes = ("{s}. Answer as JSON by this schema: {j}", "Follow this JSON schema: {j}\n{s}", "{s}\nJSON schema: {j}",
              "Fill this schema: {j} The facts: {s}.", "Make JSON for the schema {j} from this: {s}",
              "Schema: {j}\n{s}", "Give me JSON that has the schema {j}. {s}.", "{s}. Put this in the schema {j}",
              "Write JSON by the schema {j} of this: {s}")  # fmt: skip
    if dice.held:
        shapes = ("Write JSON that fits the schema {j} for: {s}", "{s}. Schema of the answer: {j}")
    question = dice.pick(shapes).format(s=said[0].upper() + said[1:], j=json.dumps(schema))
    return [Turn([question], json.dumps(given, ensure_ascii=False), "schema")]


TASKS: tuple[tuple[Callable[[Dice], list[Turn]], float, str], ...] = (
    (calls, 3.0, "tool_call"),
    (answers, 2.0, "tool_answer"),
    (by_schema, 1.5, "schema"),
)
