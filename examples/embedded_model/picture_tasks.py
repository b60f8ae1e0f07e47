"""Questions about pictures: one object, many, several pictures, print. Each function makes a picture and its turns."""

from __future__ import annotations

import json
from collections.abc import Callable

from examples.embedded_model.pictures import NAMES, SHAPES, Thing, paint, print_text, thing
from examples.embedded_model.sample import Dice, Media, Turn

NEAR = {frozenset(p) for p in (("white", "yellow"), ("white", "cyan"), ("white", "pink"), ("black", "brown"), ("gray", "brown"),
        ("red", "orange"), ("orange", "yellow"), ("pink", "white"), ("pink", "gray"), ("black", "purple"), ("black", "blue"),
        ("red", "pink"), ("purple", "blue"), ("red", "brown"), ("orange", "brown"), ("gray", "white"))}  # fmt: skip


def plural(name: str) -> str:
    """The plural: crosses, boxes; other names take an s."""
    return name + ("es" if name.endswith(("s", "x")) else "s")


def joined(names: list[str]) -> str:
    """The names joined as "a, b and c"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def article(name: str) -> str:
    """The name with its article: "a red circle", "an orange circle"."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def sentence(text: str) -> str:
    """The text as a sentence, with a capital letter and a full stop."""
    return text[0].upper() + text[1:] + "."


def ground_for(dice: Dice, colours: list[str]) -> str:
    """A background colour that differs from every object's."""
    free = [n for n in NAMES if n not in colours and all(frozenset((n, c)) not in NEAR for c in colours)]
    free = free or [n for n in NAMES if n not in colours]
    return "white" if "white" in free and dice.chance(0.25) else dice.pick(free)


def picture(dice: Dice, things: list[Thing]) -> tuple[Media, str]:
    """Paints the objects; returns the picture and the background's colour."""
    ground = ground_for(dice, [t.colour for t in things])
    return Media("image", paint(dice, things, ground)), ground


def with_media(dice: Dice, media: list[Media], turns: list[Turn]) -> list[Turn]:
    """Adds the media to the first turn, mostly before the text."""
    first = turns[0]
    first.parts = [*media, *first.parts] if dice.chance(0.8) else [*first.parts, *media]
    return turns


def yes(value: bool) -> str:
    """ "Yes." or "No."."""
    return "Yes." if value else "No."


def one_object(dice: Dice) -> list[Turn]:
    """Shape, colour and background of a single object."""
    size = dice.between(0.13, 0.45)
    margin = size * 0.95
    item = thing(dice, x=dice.between(margin, 1 - margin), y=dice.between(margin, 1 - margin), size=size)
    media, ground = picture(dice, [item])
    other = thing(dice)
    turns = [
        Turn([dice.ask("describe")], sentence(article(item.name))),
        Turn([dice.ask("shape")], sentence(article(item.shape))),
        Turn([dice.ask("colour")], sentence(item.colour)),
        Turn([dice.ask("background")], sentence(ground)),
        Turn([dice.ask("exists", what=other.name)], yes(other.name == item.name)),
    ]
    order = dice.some(range(len(turns)), dice.whole(2, 4))
    return with_media(dice, [media], [turns[i] for i in order])


def spread(dice: Dice, count: int, low: float, high: float) -> list[tuple[float, float, float]]:
    """Places (x, y, size) that do not touch, computed as on a square canvas."""
    found: list[tuple[float, float, float]] = []
    shrink = 1.0
    while len(found) < count:
        size = dice.between(low, high) * shrink
        x, y = dice.between(size, 1 - size), dice.between(size, 1 - size)
        if all((x - a) ** 2 + (y - b) ** 2 > (1.1 * (size + s)) ** 2 for a, b, s in found):
            found.append((x, y, size))
        else:
            shrink *= 0.985
    return found


def counting(dice: Dice) -> list[Turn]:
    """Counting one to six objects, with or without other objects among them."""
    total = dice.whole(1, 6)
    kind = dice.whole(0, 3)
    base = thing(dice)
    second = thing(dice, colour=dice.pick([n for n in NAMES if n != base.colour]))
    places = spread(dice, total, 0.08, 0.16 if total > 3 else 0.2)
    same = kind == 0  # all objects have one kind
    things = []
    for x, y, size in places:
        model = base if same or dice.chance(0.6) else second
        if kind == 3 and not same:
            model = thing(dice)
        shape = thing(dice, shape=model.shape, colour=model.colour)  # with an angle of its own
        things.append(Thing(shape.shape, shape.colour, x, y, size, shape.angle))
    media, _ = picture(dice, things)
    what = [("shapes", total), ("objects", total), (plural(base.shape), sum(t.shape == base.shape for t in things)),
            (f"{base.colour} shapes", sum(t.colour == base.colour for t in things)),
            (plural(base.name), sum(t.name == base.name for t in things)),
            (plural(second.shape), sum(t.shape == second.shape for t in things)),
            (plural(second.name), sum(t.name == second.name for t in things))]  # fmt: skip
    chosen = [w for w in dice.some(what, 4) if w[1] > 0 or dice.chance(0.3)] or [what[0]]
    turns = [Turn([dice.ask("count", what=name)], str(number)) for name, number in chosen]
    if dice.chance(0.15):
        turns[-1] = Turn(
            [dice.ask("count", what="shapes").rstrip("?.") + "? Answer as JSON."], json.dumps({"count": total}), "json"
        )
    return with_media(dice, [media], turns)


def _pair(dice: Dice, count: int) -> list[Thing]:
    """`count` objects that differ in shape and in colour."""
    shapes, colours = dice.some(SHAPES, count), dice.some(NAMES, count)
    places = spread(dice, count, 0.09, 0.2)
    return [
        thing(dice, shape=s, colour=c, x=x, y=y, size=r)
        for s, c, (x, y, r) in zip(shapes, colours, places, strict=True)
    ]


def _side(a: Thing, b: Thing) -> str:
    """The side of b on which a is, along the axis of the larger distance."""
    across, down = a.x - b.x, a.y - b.y
    if abs(across) > abs(down):
        return "left" if across < 0 else "right"
    return "above" if down < 0 else "below"


def _clear(a: Thing, b: Thing) -> bool:
    """Whether a and b are clearly apart along one axis, and less along the other."""
    across, down = abs(a.x - b.x), abs(a.y - b.y)
    return max(across, down) > 1.35 * min(across, down) and max(across, down) > 0.18


def sided(dice: Dice) -> list[Turn]:
    """On which of two sides an object is; the question names both sides."""
    while True:
        a, b = things = _pair(dice, 2)
        if _clear(a, b):
            break
    side = _side(a, b)
    across = ("left or right of", "to the left or to the right of", "right or left of")
    sides = dice.pick(across if side in ("left", "right") else ("above or below", "below or above"))
    names = dice.pick(((a.shape, b.shape), (a.name, b.name)))
    media, _ = picture(dice, things)
    return [Turn([media, dice.ask("sided", a=names[0], b=names[1], sides=sides)], sentence(side))]


def relations(dice: Dice) -> list[Turn]:
    """Left, right, above, below, bigger or smaller, among two or three objects."""
    while True:
        things = _pair(dice, 2 if dice.chance(0.7) else 3)
        a, b = things[0], things[1]
        if _clear(a, b):
            break
    words = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}
    if dice.chance(0.3):
        words = {"left": "left of", "right": "right of", "above": "over", "below": "under"}
    media, _ = picture(dice, things)
    side = _side(a, b)
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}[side]
    call_a, call_b = ((a.shape, b.shape), (a.name, b.name), (f"{a.colour} {a.shape}", b.shape))[dice.whole(0, 2)]
    said = dice.pick((side, side, opposite, opposite))
    turns = [
        Turn([dice.ask("where", a=call_a, b=call_b)], sentence(side)),
        Turn([dice.ask("relation", a=call_a, b=call_b, rel=words[said])], yes(said == side)),
        Turn([dice.ask("colour_of", what=a.shape)], sentence(a.colour)),
        Turn([dice.ask("shape_of", what=b.colour)], sentence(article(b.shape))),
    ]
    edges = {"on the left": min(things, key=lambda t: t.x), "on the right": max(things, key=lambda t: t.x),
             "at the top": min(things, key=lambda t: t.y), "at the bottom": max(things, key=lambda t: t.y)}  # fmt: skip
    across = side in ("left", "right")
    if len(things) == 2:
        name = dice.pick(("on the left", "on the right") if across else ("at the top", "at the bottom"))
        turns.append(Turn([dice.ask("extreme", side=name)], sentence(f"the {edges[name].name}")))
        in_order = sorted(things, key=lambda t: t.x if across else t.y)
        turns.append(Turn([dice.ask("describe")], sentence(joined([article(t.name) for t in in_order]))))
    if max(a.size, b.size) > 1.25 * min(a.size, b.size):
        big = dice.chance(0.5)
        chosen = max(a, b, key=lambda t: t.size) if big else min(a, b, key=lambda t: t.size)
        turns.append(
            Turn(
                [dice.ask("bigger", a=a.name, b=b.name, size="bigger" if big else "smaller")],
                sentence(f"the {chosen.name}"),
            )
        )
    order = dice.some(range(len(turns)), dice.whole(2, 4))
    return with_media(dice, [media], [turns[i] for i in order])


def several(dice: Dice) -> list[Turn]:
    """Questions about two or three pictures in one prompt."""
    count = 2 if dice.chance(0.75) else 3
    nth = ("first", "second", "third")
    if count == 2 and dice.chance(0.35):
        numbers = dice.some(range(1, 7), 2)
        scenes = [[thing(dice, x=x, y=y, size=s) for x, y, s in spread(dice, n, 0.08, 0.15)] for n in numbers]
        media = [picture(dice, scene)[0] for scene in scenes]
        more = dice.chance(0.6)
        best = numbers.index(max(numbers) if more else min(numbers))
        turns = [Turn([dice.ask("more_objects", more="more" if more else "fewer")], sentence(f"the {nth[best]}")),
                 Turn([f"How many shapes are in the {nth[dice.whole(0, 0)]} picture?"], str(numbers[0]))]  # fmt: skip
        return with_media(dice, media, turns[: dice.whole(1, 2)])
    shapes, colours = dice.some(SHAPES, count), dice.some(NAMES, count)
    if dice.chance(0.3):
        shapes[1] = shapes[0]
    elif dice.chance(0.4):
        colours[1] = colours[0]
    items = []
    for shape, colour in zip(shapes, colours, strict=True):
        size = dice.between(0.18, 0.42)
        items.append(
            thing(
                dice,
                shape=shape,
                colour=colour,
                size=size,
                x=dice.between(size, 1 - size),
                y=dice.between(size, 1 - size),
            )
        )
    media = [picture(dice, [item])[0] for item in items]
    wanted = dice.whole(0, count - 1)
    called = items[wanted].shape if shapes.count(shapes[wanted]) == 1 and dice.chance(0.6) else items[wanted].name
    aspect = dice.pick(("shape", "color"))
    equal = shapes[0] == shapes[1] if aspect == "shape" else colours[0] == colours[1]
    other = dice.whole(0, count - 1)
    turns = [Turn([dice.ask("which_picture", what=called)], sentence(f"the {nth[wanted]}")),
             Turn([dice.ask("nth_picture", nth=nth[other])], sentence(article(items[other].name)))]  # fmt: skip
    if count == 2:
        turns.append(Turn([dice.ask("same", what=aspect)], yes(equal)))
    order = dice.some(range(len(turns)), dice.whole(1, len(turns)))
    return with_media(dice, media, [turns[i] for i in order])


def as_json(dice: Dice) -> list[Turn]:
    """The shape and colour of one object as JSON."""
    item = thing(dice, size=dice.between(0.18, 0.42), x=dice.between(0.42, 0.58), y=dice.between(0.42, 0.58))
    media, _ = picture(dice, [item])
    questions = ("Answer as JSON with shape and color.", "Give the shape and the color as JSON.", "Describe it as JSON with the keys shape and color.",
                 "What is in the picture? Answer as JSON.", "Describe the picture as JSON.", "Return JSON with shape and color.")  # fmt: skip
    if dice.held:
        questions = ("Describe the shape as JSON with shape and color.", "What do you see? Reply as JSON.")
    answer = json.dumps({"shape": item.shape, "color": item.colour})
    return with_media(dice, [media], [Turn([dice.pick(questions)], answer, "json")])


def reading(dice: Dice) -> list[Turn]:
    """Reading a printed word or number of up to six characters."""
    ink = dice.pick(NAMES)
    ground = ground_for(dice, [ink])
    roll = dice.r.random()
    if roll < 0.4:
        text = "".join(dice.pick("0123456789") for _ in range(dice.whole(1, 6)))
        question = dice.ask("read_number")
    else:
        if roll < 0.7:
            text = dice.word(6)
        else:
            text = "".join(dice.pick("abcdefghijklmnopqrstuvwxyz") for _ in range(dice.whole(2, 6)))
        text = text.upper() if dice.chance(0.5) else text.capitalize() if dice.chance(0.3) else text
        question = dice.ask("read")
    media = Media("image", print_text(dice, text, ink, ground))
    turns = [Turn([question], text)]
    if dice.chance(0.15):
        turns.append(Turn([dice.ask("background")], sentence(ground)))
        if dice.chance(0.5):
            turns.reverse()
    return with_media(dice, [media], turns)


# function, weight in training, row of the table
TASKS: tuple[tuple[Callable[[Dice], list[Turn]], float, str], ...] = (
    (one_object, 1.0, "image_object"),
    (counting, 1.4, "image_scene"),
    (relations, 1.6, "image_scene"),
    (several, 1.2, "image_scene"),
    (as_json, 0.3, "json"),
    (reading, 3.0, "image_print"),
)
SIDES: tuple[tuple[Callable[[Dice], list[Turn]], float, str], ...] = ((sided, 1.0, "image_sided"),)
