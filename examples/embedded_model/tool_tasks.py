"""Tools: calls in the Hermes form, answers from a tool's result, and JSON by a schema that the question brings.

What is to be learned is copying: the name of a tool and the keys of its arguments out of the prompt, values out of the
question. So tools are thrown together from verbs, words and keys, and hardly one comes twice. Held-out tools have verbs,
words, keys and phrasings that training never draws from. Tools stand in the system text as the template writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.embedded_model import talk_tasks, text_tasks
from examples.embedded_model.blueprint import tools_text
from examples.embedded_model.sample import Dice, Turn

VERBS = ("get", "set", "find", "open", "close", "send", "book", "order", "start", "stop", "show", "add", "remove", "move",
         "check", "buy", "sell", "play", "paint", "count", "read", "write", "rent", "track", "update", "create", "delete",
         "save", "load", "call", "share", "clean", "build", "fix", "plan", "rate", "lock", "print", "copy", "test")  # fmt: skip
HELD_VERBS = ("look up", "cancel", "measure", "reserve", "schedule", "convert", "turn on", "ask for")
KEYS = ("name", "city", "level", "room", "count", "colour", "size", "day", "price", "title", "user", "street", "amount",
        "language", "speed", "weight", "path", "topic", "animal", "food", "person", "team", "number", "town", "item",
        "message", "file", "label", "first_name", "unit_price", "user_id", "room_name", "max_count", "order_id")  # fmt: skip
HELD_KEYS = ("place", "guest", "quantity", "height", "country", "product", "start_day", "seat_number", "code", "tag")
MARKS = (
    "on",
    "off",
    "low",
    "high",
    "small",
    "large",
    "red",
    "blue",
    "fast",
    "slow",
    "north",
    "south",
    "metric",
    "round",
)
# tools that people ask for without naming them: name, what it does, keys with kinds, questions
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
    ("paint_wall", "Paints a wall", (("colour", "mark"), ("coats", "integer")),
     ("Paint the wall {colour} with {coats} coats.",)),
    ("population_of", "People who live in a town", (("place", "town"),), ("How many people live in {place}?",)),
    ("call_taxi", "Orders a taxi", (("to", "town"), ("people", "integer")), ("I need a taxi to {to} for {people} people.",)),
)  # fmt: skip
ASKED = ("{c}.", "{c}", "Please {c}.", "Can you {c}?", "I want to {c}.", "Could you {c}?", "{c} now.", "I would like to {c}.",
         "Help me {c}.", "{c}, please.", "You should {c}.", "Let us {c}.")  # fmt: skip
HELD_ASKED = ("Would you {c}?", "Try to {c}.", "It is time to {c}.")
NAMED = ("Use {n}", "Call {n}", "Call the tool {n}", "Run {n}")
PAIRS = ("with {k} {v}", "with the {k} {v}", "{k} {v}", "{k}: {v}", "where {k} is {v}", "{k} = {v}", "the {k} is {v}",
         "using {v} as {k}", "with {v} as the {k}", "its {k} is {v}")  # fmt: skip
HELD_PAIRS = ("given {k} {v}", "let {k} be {v}", "with {k} set to {v}")
FAILED = ("not found", "no permission", "out of range", "closed", "no answer", "too many requests", "wrong key")


@dataclass(frozen=True)
class Tool:
    """A tool as clients send it, and what its arguments are."""

    function: dict[str, Any]
    keys: tuple[tuple[str, str], ...]  # with the kind of each value
    command: str  # what one asks for
    questions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.function["name"])


def _value(dice: Dice, kind: str) -> Any:
    """A value of a kind; texts come from lists of which a part is held out."""
    if kind == "integer":
        return dice.whole(0, 9) if dice.chance(0.3) else dice.whole(10, 999)
    if kind == "number":
        return dice.whole(0, 999) / 10
    if kind == "boolean":
        return dice.chance(0.5)
    if kind == "town":
        return talk_tasks._town(dice)
    if kind == "name":
        return talk_tasks._name(dice)
    if kind == "mark":
        return dice.pick(MARKS)
    roll = dice.r.random()
    if roll < 0.35:
        return talk_tasks._name(dice) if roll < 0.2 else talk_tasks._town(dice)
    return " ".join(dice.word() for _ in range(1 if roll < 0.8 else dice.whole(2, 3)))


def _schema(kind: str) -> dict[str, Any]:
    return {"type": kind if kind in ("integer", "number", "boolean") else "string"}


def _function(dice: Dice, name: str, told: str, keys: tuple[tuple[str, str], ...], marks: dict[str, list[str]]) -> dict:
    """The definition, spelled in the ways in which clients spell it."""
    properties = {}
    for key, kind in keys:
        properties[key] = {"enum": marks[key]} if kind == "mark" else _schema(kind)
        if dice.chance(0.2):
            properties[key]["description"] = f"the {key.replace('_', ' ')}"
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if dice.chance(0.8):
        parameters["required"] = [key for key, _ in keys]
    if dice.chance(0.2):
        parameters["additionalProperties"] = False
    described = {"description": told} if dice.chance(0.85) else {}
    return {"name": name, **described, "parameters": parameters}


def tool(dice: Dice) -> Tool:
    """A tool, thrown together or known."""
    marks = {}
    if dice.chance(0.25):
        name, told, keys, questions = dice.pick(HELD_KNOWN if dice.held else KNOWN)
        command = ""
    else:
        verb, thing = dice.pick(HELD_VERBS if dice.held else VERBS), dice.word(8)
        words = [*verb.split(), thing]
        name = dice.pick(("_".join(words), "_".join(words), words[0] + "".join(w.capitalize() for w in words[1:]),
                          "-".join(words)))  # fmt: skip
        command, questions = f"{verb} the {thing}", ()
        told = dice.pick((command.capitalize(), f"{command.capitalize()}.", f"Use it to {command}"))
        named = dice.some(HELD_KEYS if dice.held else KEYS, dice.whole(0, 3) if dice.chance(0.3) else dice.whole(1, 2))
        kinds = ("words", "words", "words", "integer", "integer", "number", "boolean", "mark")
        keys = tuple((key, dice.pick(kinds)) for key in named)
    for key, kind in keys:
        if kind == "mark":
            marks[key] = dice.some(MARKS, dice.whole(2, 4))
    return Tool(_function(dice, name, told, keys, marks), tuple(keys), command, tuple(questions))


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _question(dice: Dice, chosen: Tool) -> tuple[str, dict[str, Any]]:
    """(a question that only this tool answers, the arguments that the question gives)."""
    properties = chosen.function["parameters"]["properties"]
    given = {
        key: dice.pick(properties[key]["enum"]) if kind == "mark" else _value(dice, kind) for key, kind in chosen.keys
    }
    if chosen.questions:
        return dice.pick(chosen.questions).format(**given), given
    if "required" not in chosen.function["parameters"] and len(given) > 1 and dice.chance(0.5):
        del given[dice.pick(list(given))]
    pairs = [
        dice.pick(HELD_PAIRS if dice.held else PAIRS).format(k=key.replace("_", " ") if dice.chance(0.7) else key,
                                                            v=_shown(value))
        for key, value in given.items()
    ]  # fmt: skip
    said = dice.pick((" and ", ", ", ", ")).join(pairs)
    if not dice.held and dice.chance(0.1):
        command = dice.pick(NAMED).format(n=chosen.name)
        return (f"{command} {said}" if said else command), given
    command = f"{chosen.command} {said}" if said else chosen.command
    text = dice.pick(HELD_ASKED if dice.held else ASKED).format(c=command)
    return text[0].upper() + text[1:], given


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _offer(dice: Dice) -> Tool:
    """Puts one to three tools in front of the conversation; returns the one that is asked for."""
    tools: dict[str, Tool] = {}
    for _ in range(dice.whole(1, 3)):
        thrown = tool(dice)
        tools[thrown.name] = thrown
    dice.tools = tools_text([{"type": "function", "function": one.function} for one in tools.values()])
    return dice.pick(list(tools.values()))


def calls(dice: Dice) -> list[Turn]:
    """A call; or an answer without one, where the question is about something else."""
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
    """A call, its result, and an answer that says what the result says."""
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
        value = _shown(_value(dice, dice.pick(("words", "integer", "town"))))
        result, answer = value, f"The answer is {value}."
    else:
        keys = dice.some(HELD_KEYS if dice.held else KEYS, dice.whole(1, 3))
        found = {key: _value(dice, dice.pick(("words", "integer", "number", "town", "name"))) for key in keys}
        result = json.dumps(found, ensure_ascii=False)
        answer = " ".join(f"The {key.replace('_', ' ')} is {_shown(value)}." for key, value in found.items())
    return [asked, Turn([f"<tool_response>\n{result}\n</tool_response>"], answer, "exact", "tool_answer")]


def by_schema(dice: Dice) -> list[Turn]:
    """Values of a sentence as JSON that follows a schema in the question."""
    keys = dice.some(HELD_KEYS if dice.held else KEYS, dice.whole(1, 4))
    kinds = {
        key: dice.pick(("words", "words", "integer", "integer", "number", "boolean", "town", "name")) for key in keys
    }
    given = {key: _value(dice, kind) for key, kind in kinds.items()}
    schema = {"type": "object", "properties": {key: _schema(kind) for key, kind in kinds.items()}}
    if dice.chance(0.7):
        schema["required"] = keys
    order = dice.some(keys, len(keys))
    said = ", ".join(dice.pick(HELD_PAIRS if dice.held else PAIRS).format(k=key.replace("_", " "), v=_shown(given[key]))
                     for key in order)  # fmt: skip
    shapes = ("{s}. Answer as JSON by this schema: {j}", "Follow this JSON schema: {j}\n{s}", "{s}\nJSON schema: {j}",
              "Fill this schema: {j} The facts: {s}.", "Make JSON for the schema {j} from this: {s}")  # fmt: skip
    if dice.held:
        shapes = ("Write JSON that fits the schema {j} for: {s}", "{s}. Schema of the answer: {j}")
    question = dice.pick(shapes).format(s=said[0].upper() + said[1:], j=json.dumps(schema))
    return [Turn([question], json.dumps(given, ensure_ascii=False), "schema")]


TASKS: tuple[tuple[Callable[[Dice], list[Turn]], float, str], ...] = (
    (calls, 3.0, "tool_call"),
    (answers, 2.0, "tool_answer"),
    (by_schema, 1.5, "schema"),
)
