"""Generates films: one or two objects that move, change colour or appear, with or without a sound track.

A film is a function of time, so it can be rendered at any frame rate: training renders only the frames that the server
would sample; evaluation renders them all and encodes them. Out: uint8 [frames, height, width, 3].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from examples.embedded_model.blueprint import VIDEO_FPS, VIDEO_MAX_FRAMES, VIDEO_MIN_FRAMES
from examples.embedded_model.picture_tasks import article, ground_for, sentence, spread, with_media
from examples.embedded_model.pictures import NAMES, SHAPES, Thing, background, look_of, place, thing, tint, wear
from examples.embedded_model.sample import Dice, Media, Turn
from examples.embedded_model.sound_tasks import command_sound, digit_sound

WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass
class Film:
    """A film's content: `scene(t)` returns the objects and their looks at t, from 0 (start) to 1 (end)."""

    ground: str
    seconds: float
    scene: Callable[[float], list[tuple[Thing, dict]]]
    turns: list[Turn]


def moments(seconds: float, fps: float) -> list[float]:
    """Times in seconds of the sampled frames: `VIDEO_FPS` a second, an even number of frames."""
    total = max(1, round(seconds * fps))
    wish = min(max(total / fps * VIDEO_FPS, VIDEO_MIN_FRAMES), VIDEO_MAX_FRAMES, total)
    count = max(1, int(wish) // 2 * 2)
    step = total / count
    return [int(i * step) / fps for i in range(count)]


def render(dice: Dice, film: Film, times: list[float], size: tuple[int, int]) -> np.ndarray:
    """Renders the film at the given times; frames share the background, and each has wear of its own."""
    width, height = size
    ground = background(dice, width, height, film.ground)
    frames = []
    grain, quality = dice.chance(0.2), dice.chance(0.5)
    for t in times:
        canvas = ground.copy()
        for item, look in film.scene(min(1.0, t / film.seconds)):
            place(dice, canvas, item, look)
        frames.append(wear(dice, canvas) if grain or quality else np.array(canvas))
    return np.stack(frames)


def film_size(dice: Dice) -> tuple[int, int]:
    """A small width and height, as usual in films for this model; training renders near the sampled size."""
    long = dice.pick((160, 240, 320, 480)) if dice.held else round(2 ** dice.between(6.8, 7.9))
    short = max(64, round(long * dice.pick((1.0, 0.75, 0.5625, 0.8))))
    long, short = long // 2 * 2, short // 2 * 2  # encoders need even numbers
    return (long, short) if dice.chance(0.7) else (short, long)


def _seconds(dice: Dice) -> float:
    return dice.between(1.5, 5.0)


def _still(dice: Dice, avoid: Thing, corner: tuple[float, float]) -> Thing:
    """A second object that does not move and differs in shape and colour."""
    shape = dice.pick([s for s in SHAPES if s != avoid.shape])
    colour = dice.pick([c for c in NAMES if c != avoid.colour])
    return thing(dice, shape=shape, colour=colour, x=corner[0], y=corner[1], size=dice.between(0.1, 0.16))


def moving(dice: Dice) -> Film:
    """One object crosses the picture; sometimes there is a second object that does not move."""
    way = dice.pick(list(WAYS))
    across, down = WAYS[way]
    size = dice.between(0.1, 0.22)
    start, end = size + dice.between(0, 0.15), 1 - size - dice.between(0, 0.2)
    if dice.chance(0.2):
        end = start + dice.between(0.3, max(0.31, end - start))
    lane = dice.between(size, 1 - size)
    with_still = dice.chance(0.5)
    if with_still:
        lane = dice.between(0.25, 0.35) if dice.chance(0.5) else dice.between(0.65, 0.75)
        size = min(size, 0.18)
    mover = thing(dice, size=size)
    away = 0.8 if lane < 0.5 else 0.2
    corner = (dice.between(0.2, 0.8), away) if across else (away, dice.between(0.2, 0.8))
    still = _still(dice, mover, corner) if with_still else None
    looks = [look_of(dice, mover), look_of(dice, still) if still else {}]
    wait = dice.between(0, 0.15) if dice.chance(0.3) else 0.0
    spin = (
        dice.between(-90, 90)
        if dice.chance(0.1) and mover.shape in ("circle", "star", "cross", "triangle", "hexagon")
        else 0.0
    )

    def scene(t: float) -> list[tuple[Thing, dict]]:
        share = min(1.0, max(0.0, (t - wait) / (1 - 2 * wait))) if wait else t
        along = start + (end - start) * (share if across + down > 0 else 1 - share)
        here = mover.at(along, lane) if across else mover.at(lane, along)
        here = Thing(here.shape, here.colour, here.x, here.y, here.size, here.angle + spin * t)
        shown = [(here, looks[0])]
        return [(still, looks[1]), *shown] if still else shown

    objects = [mover, still] if still else [mover]
    call = dice.pick((mover.shape, mover.name))
    motion = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}[way]
    turns = [Turn([dice.ask("direction", what=call)], sentence(way)),
             Turn([dice.ask("describe_film")], sentence(f"{article(mover.name)} moves {motion}")),
             Turn([dice.ask("moves")], sentence(f"the {mover.name}"))]  # fmt: skip
    return Film(ground_for(dice, [o.colour for o in objects]), _seconds(dice), scene, turns)


def changing(dice: Dice) -> Film:
    """An object changes its colour halfway; sometimes there is a second object that does not change."""
    count = dice.whole(1, 2)
    places = spread(dice, count, 0.13, 0.24)
    shapes = dice.some(SHAPES, count)
    colours = dice.some([c for c in NAMES if c not in ("gray",)], count + 1)
    things = [
        thing(dice, shape=s, colour=c, x=x, y=y, size=r)
        for s, c, (x, y, r) in zip(shapes, colours, places, strict=False)
    ]
    after = colours[-1]
    looks = [look_of(dice, t) for t in things]
    later = {**looks[0], "fill": tint(dice, after), "edge": None}
    moment = dice.between(0.35, 0.65)

    def scene(t: float) -> list[tuple[Thing, dict]]:
        first = (things[0], looks[0] if t < moment else later)
        return [first, *zip(things[1:], looks[1:], strict=True)]

    item = things[0]
    turns = [Turn([dice.ask("turns", what=item.shape)], sentence(after)),
             Turn([dice.ask("describe_film")], f"The {item.shape} turns from {item.colour} to {after}."),
             Turn([dice.ask("changes")], sentence(f"the {item.shape}"))]  # fmt: skip
    return Film(ground_for(dice, colours), dice.between(2.0, 5.0), scene, turns)


def appearing(dice: Dice) -> Film:
    """Two objects appear one after the other and remain."""
    places = spread(dice, 2, 0.12, 0.24)
    shapes, colours = dice.some(SHAPES, 2), dice.some(NAMES, 2)
    things = [
        thing(dice, shape=s, colour=c, x=x, y=y, size=r)
        for s, c, (x, y, r) in zip(shapes, colours, places, strict=True)
    ]
    looks = [look_of(dice, t) for t in things]
    start, second = dice.between(0.0, 0.05), dice.between(0.4, 0.6)

    def scene(t: float) -> list[tuple[Thing, dict]]:
        shown = [(things[0], looks[0])] if t >= start - 0.05 else []
        return shown + ([(things[1], looks[1])] if t >= second else [])

    turns = [Turn([dice.ask("first")], sentence(f"the {things[0].name}")),
             Turn([dice.ask("describe_film")], f"First {article(things[0].name)} appears, then {article(things[1].name)}.")]  # fmt: skip
    return Film(ground_for(dice, colours), dice.between(2.0, 5.0), scene, turns)


def _shoot(dice: Dice, film: Film) -> Media:
    """Renders the frames that the server would sample (training) or every frame (held-out)."""
    fps = dice.pick((5.0, 8.0, 10.0, 12.0, 15.0, 24.0, 25.0, 30.0, 50.0, 60.0))
    if dice.held:
        times = [i / fps for i in range(max(4, math.ceil(film.seconds * fps)))]
        return Media("video", render(dice, film, times, film_size(dice)), fps)
    times = moments(film.seconds, fps)
    return Media("video", render(dice, film, times, film_size(dice)), VIDEO_FPS)


def film(dice: Dice) -> list[Turn]:
    """Turns about a film of any of the three kinds."""
    made = dice.pick((moving, moving, moving, changing, appearing))(dice)
    media = _shoot(dice, made)
    order = dice.some(range(len(made.turns)), dice.whole(1, len(made.turns)))
    return with_media(dice, [media], [made.turns[i] for i in order])


def talking_film(dice: Dice) -> list[Turn]:
    """A film with speech, either as the film's sound track or as a separate sound."""
    made = dice.pick((moving, moving, changing))(dice)
    sound, said = digit_sound(dice) if dice.chance(0.5) else command_sound(dice)
    made.seconds = max(made.seconds, len(sound.data) / sound.rate)
    media = _shoot(dice, made)
    spoken = Turn(
        [
            dice.pick(
                (
                    "What is said?",
                    "What is said in the video?",
                    "What do you hear in the video?",
                    "What does the voice say?",
                )
            )
        ],
        said if said.isdigit() else sentence(said),
    )
    turns = [spoken, dice.pick(made.turns)]
    if dice.chance(0.5):
        turns.reverse()
    if dice.chance(0.6):
        media.sound = sound
        return with_media(dice, [media], turns[: dice.whole(1, 2)])
    both = [media, sound] if dice.chance(0.7) else [sound, media]
    return with_media(dice, both, turns[: dice.whole(1, 2)])


def thumbnail(frames: np.ndarray) -> Image.Image:
    """The frames as one wide picture, for viewing."""
    return Image.fromarray(np.concatenate(list(frames), axis=1))


TASKS: tuple[tuple[Callable[[Dice], list[Turn]], float, str], ...] = (
    (film, 1.0, "video"),
    (talking_film, 0.25, "video_sound"),
)
