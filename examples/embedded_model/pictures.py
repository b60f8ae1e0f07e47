"""Draws shapes in colours on backgrounds, printed text, and the wear of real pictures.

In: dice and a list of `Thing`. Out: uint8 arrays [height, width, 3]. Positions and sizes are shares of the canvas:
x and y of the width and height, `size` (a radius) of the shorter side.
"""

from __future__ import annotations

import colorsys
import io
import math
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from examples.embedded_model.sample import Dice

SHAPES = ("circle", "square", "rectangle", "triangle", "diamond", "hexagon", "star", "cross", "heart", "ring")
# ranges of hue in degrees, saturation and value in percent; then the CSS colour of that name
COLOURS: dict[str, tuple[tuple[tuple[int, int], tuple[int, int], tuple[int, int]], tuple[int, int, int]]] = {
    "red": (((-9, 7), (80, 100), (70, 100)), (255, 0, 0)),
    "orange": (((22, 39), (85, 100), (90, 100)), (255, 165, 0)),
    "yellow": (((50, 61), (75, 100), (88, 100)), (255, 255, 0)),
    "green": (((95, 150), (50, 100), (42, 100)), (0, 128, 0)),
    "cyan": (((174, 190), (55, 100), (78, 100)), (0, 255, 255)),
    "blue": (((212, 244), (65, 100), (50, 100)), (0, 0, 255)),
    "purple": (((268, 300), (50, 100), (42, 82)), (128, 0, 128)),
    "pink": (((322, 350), (22, 58), (97, 100)), (255, 192, 203)),
    "brown": (((12, 30), (58, 82), (34, 58)), (139, 69, 19)),
    "black": (((0, 360), (0, 30), (0, 10)), (0, 0, 0)),
    "white": (((0, 360), (0, 3), (94, 100)), (255, 255, 255)),
    "gray": (((0, 360), (0, 6), (42, 68)), (128, 128, 128)),
}
NAMES = tuple(COLOURS)
BACKGROUNDS = ("plain", "plain", "plain", "gradient", "noise", "stripes", "checker")
HELD_BACKGROUNDS = ("plain", "dots", "radial")
HELD_FONTS = ("Lato", "Comfortaa", "FreeSerif")  # families reserved for the held-out set, like Pillow's own font
FONT_ROOTS = ("/usr/share/fonts", "/usr/local/share/fonts", "/System/Library/Fonts", "C:/Windows/Fonts")
ODD_FONTS = ("Math", "Hairline", "Thin", "Emoji", "Symbol", "TeX", "Mono-Oblique", "Light")

RGB = tuple[int, int, int]


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    shape: str
    colour: str
    x: float = 0.5
    y: float = 0.5
    size: float = 0.3
    angle: float = 0.0

    @property
    def name(self) -> str:
        """The object's name in questions and answers."""
        return f"{self.colour} {self.shape}"

    def at(self, x: float, y: float) -> Thing:
        """The same object at another place."""
        return replace(self, x=x, y=y)


def tint(dice: Dice, colour: str) -> RGB:
    """A random colour among those that people call by this name."""
    (hue, saturation, value), css = COLOURS[colour]
    if dice.chance(0.3):
        return css
    red, green, blue = colorsys.hsv_to_rgb(
        (dice.between(*hue) % 360) / 360, dice.between(*saturation) / 100, dice.between(*value) / 100
    )
    return (round(red * 255), round(green * 255), round(blue * 255))


def shade(colour: RGB, factor: float) -> RGB:
    """The same colour, a little darker or lighter."""
    return tuple(min(255, round(c * factor)) for c in colour)  # type: ignore[return-value]


@cache
def outline(shape: str, variant: int) -> np.ndarray:
    """Corner points of a shape within the unit circle, [points, 2]; `variant` 0..9 changes the proportions."""
    bend = variant / 9
    turns = lambda n, start=-math.pi / 2: [start + 2 * math.pi * i / n for i in range(n)]  # noqa: E731
    if shape in ("circle", "ring"):
        points = [(math.cos(a), math.sin(a)) for a in turns(48)]
    elif shape == "square":
        points = [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    elif shape == "rectangle":
        flat = 0.36 + 0.22 * bend
        points = [(-1, -flat), (1, -flat), (1, flat), (-1, flat)]
    elif shape == "triangle":
        wide = 0.75 + 0.25 * bend
        points = [(0, -0.95), (wide, 0.75), (-wide, 0.75)]
    elif shape == "diamond":
        wide = 0.6 + 0.3 * bend
        points = [(0, -1), (wide, 0), (0, 1), (-wide, 0)]
    elif shape == "hexagon":
        points = [(math.cos(a), math.sin(a)) for a in turns(6)]
    elif shape == "star":
        inner = 0.38 + 0.1 * bend
        points = [(r * math.cos(a), r * math.sin(a)) for a, r in zip(turns(10), [1.0, inner] * 5, strict=True)]
    elif shape == "cross":
        arm = 0.26 + 0.12 * bend
        points = [(-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm), (arm, 1), (-arm, 1), (-arm, arm),
                  (-1, arm), (-1, -arm), (-arm, -arm)]  # fmt: skip
    else:  # heart
        points = []
        for a in turns(48):
            y = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
            points.append((math.sin(a) ** 3, -y / 16))
    return np.array(points)


def turn_of(dice: Dice, shape: str) -> float:
    """A rotation in degrees after which the shape still has its name."""
    if dice.chance(0.45):
        return 0.0
    limit = {"square": 14, "diamond": 9, "heart": 25, "rectangle": 90, "circle": 0, "ring": 0}.get(shape, 180)
    return dice.between(-limit, limit)


def thing(dice: Dice, **fixed) -> Thing:
    """A random object with the given attributes fixed."""
    shape = fixed.pop("shape", None) or dice.pick(SHAPES)
    colour = fixed.pop("colour", None) or dice.pick(NAMES)
    return Thing(shape, colour, angle=turn_of(dice, shape), **fixed)


def background(dice: Dice, width: int, height: int, colour: str) -> Image.Image:
    """A canvas of one named colour, in one of several styles."""
    style = dice.pick(HELD_BACKGROUNDS if dice.held else BACKGROUNDS)
    base = tint(dice, colour)
    near = shade(base, dice.between(0.8, 0.93)) if max(base) > 60 else tuple(c + 14 for c in base)
    if style == "plain":
        return Image.new("RGB", (width, height), base)
    rows, columns = np.ogrid[0:height, 0:width]
    if style == "gradient":
        slope = math.radians(dice.between(0, 360))
        mix = (rows / height * math.sin(slope) + columns / width * math.cos(slope)).astype(np.float32)
        mix = (mix - mix.min()) / max(1e-6, float(np.ptp(mix)))
    elif style == "radial":
        mix = np.hypot(rows / height - 0.5, columns / width - 0.5) * 1.4
    elif style == "noise":
        mix = dice.np.random((height, width), dtype=np.float32)
    elif style == "stripes":
        step = max(2, int(min(width, height) * dice.between(0.03, 0.15)))
        mix = ((rows + columns * dice.pick((0, 1, -1)) + (columns if dice.chance(0.3) else 0)) // step) % 2
    elif style == "checker":
        step = max(2, int(min(width, height) * dice.between(0.05, 0.2)))
        mix = (rows // step + columns // step) % 2
    else:  # dots
        step = max(4, int(min(width, height) * dice.between(0.06, 0.15)))
        mix = np.hypot(rows % step - step / 2, columns % step - step / 2) < step / 4
    mix = np.asarray(mix, np.float32)[..., None]
    pixels = np.array(base, np.float32) * (1 - mix) + np.array(near, np.float32) * mix
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def place(dice: Dice, canvas: Image.Image, item: Thing, look: dict, scale: int = 1) -> None:
    """Draws one object; `look` has the attributes that stay equal from frame to frame."""
    width, height = canvas.size
    radius = item.size * min(width, height)
    angle = math.radians(item.angle)
    spin = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    centre = np.array([item.x * width, item.y * height])
    corners = outline(item.shape, look["variant"]) @ spin * radius + centre
    points = [tuple(p) for p in corners.tolist()]
    draw = ImageDraw.Draw(canvas)
    fill = look["fill"]
    if item.shape == "ring":
        box = [centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius]
        draw.ellipse(box, outline=fill, width=max(2 * scale, round(radius * look["band"])))
        return
    if look["shaded"]:
        _shaded(canvas, points, fill)
    else:
        draw.polygon(points, fill=fill)
    if look["edge"] is not None:
        draw.line(
            [*points, points[0]], fill=look["edge"], width=max(scale, round(radius * look["edge_width"])), joint="curve"
        )


def look_of(dice: Dice, item: Thing) -> dict:
    """The tint, proportions and edge of one object."""
    fill = tint(dice, item.colour)
    edge = dice.pick(((0, 0, 0), (255, 255, 255), shade(fill, 0.6))) if dice.chance(0.2) else None
    return {"fill": fill, "variant": dice.whole(0, 9), "band": dice.between(0.22, 0.4), "edge": edge,
            "edge_width": dice.between(0.04, 0.1), "shaded": item.colour != "black" and dice.chance(0.12)}  # fmt: skip


def _shaded(canvas: Image.Image, points: list, fill: RGB) -> None:
    """Fills the polygon with a gradient from the colour to a darker one."""
    width, height = canvas.size
    mask = Image.new("L", canvas.size)
    ImageDraw.Draw(mask).polygon(points, fill=255)
    left, top, right, bottom = mask.getbbox() or (0, 0, width, height)
    slope = np.linspace(1.0, 0.85, bottom - top)[:, None, None] * np.array(fill)[None, None, :]
    patch = np.broadcast_to(slope, (bottom - top, right - left, 3)).astype(np.uint8)
    canvas.paste(Image.fromarray(np.ascontiguousarray(patch)), (left, top), mask.crop((left, top, right, bottom)))


def canvas_size(dice: Dice) -> tuple[int, int]:
    """Width and height from 64 to 1024 pixels; small ones are more frequent, because large ones make training slow."""
    if dice.held:
        long = dice.pick((64, 96, 128, 224, 256, 320, 400, 512, 640, 800, 1024))
    else:
        long = round(2 ** dice.between(6.2, 8.6)) if dice.chance(0.96) else dice.whole(400, 1024)
    ratio = 1.0 if dice.chance(0.45) else dice.between(0.6, 1.0)
    short = max(64, round(long * ratio))
    long = max(64, long)
    return (long, short) if dice.chance(0.5) else (short, long)


def paint(dice: Dice, things: list[Thing], ground: str) -> np.ndarray:
    """Paints a whole picture: background, objects, wear."""
    width, height = canvas_size(dice)
    scale = 2 if max(width, height) <= 200 or (dice.held and max(width, height) <= 512) else 1
    canvas = background(dice, width * scale, height * scale, ground)
    for item in things:
        place(dice, canvas, item, look_of(dice, item), scale)
    if scale == 2:
        canvas = canvas.reduce(2) if dice.chance(0.7) else canvas.resize((width, height), Image.Resampling.NEAREST)
    return wear(dice, canvas)


def wear(dice: Dice, canvas: Image.Image) -> np.ndarray:
    """Adds blur, noise or JPEG artefacts to about one in two pictures."""
    if dice.chance(0.12):
        canvas = canvas.filter(ImageFilter.GaussianBlur(dice.between(0.3, 1.0) * max(1.0, min(canvas.size) / 250)))
    if dice.chance(0.3):
        data = io.BytesIO()
        canvas.save(data, "JPEG", quality=dice.whole(35, 95))
        canvas = Image.open(data).convert("RGB")
    pixels = np.array(canvas)
    if dice.chance(0.2):
        grain = dice.np.standard_normal(pixels.shape[:2], dtype=np.float32)[..., None] * dice.between(2, 12)
        pixels = (pixels + grain).clip(0, 255).astype(np.uint8)
    return pixels


@cache
def fonts(held: bool) -> tuple[str, ...]:
    """Font files of this machine, split by family; if there are none, Pillow's own font is used."""
    roots = [Path(p) for p in os.environ.get("EMBEDDED_FONTS", "").split(":") if p] or [Path(p) for p in FONT_ROOTS]
    files = sorted({str(f) for root in roots if root.is_dir() for f in root.rglob("*.[to]tf")})
    files = [f for f in files if not any(odd in Path(f).name for odd in ODD_FONTS)]
    return tuple(f for f in files if any(name in Path(f).name for name in HELD_FONTS) == held)


@cache
def font(path: str, size: int) -> ImageFont.FreeTypeFont:
    """A font at a size in pixels; an empty path means Pillow's own font."""
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)  # type: ignore[return-value]


def print_text(dice: Dice, text: str, ink: str, ground: str) -> np.ndarray:
    """Text on a background, rotated by a few degrees at most."""
    width, height = canvas_size(dice)
    width, height = max(width, height, 84), min(width, max(64, height))
    canvas = background(dice, width, height, ground)
    choices = () if dice.portable else fonts(dice.held)
    path = "" if not choices or (dice.held and dice.chance(0.4)) else dice.pick(choices)
    trial = font(path, 40).getbbox(text)
    wish = dice.between(0.45, 0.92) * width / max(1, trial[2] - trial[0])
    wish = min(wish, dice.between(0.35, 0.85) * height / max(1, trial[3] - trial[1]), 1.3 * width / 84)
    face = font(path, max(12, round(40 * wish / 4) * 4 if wish > 0.5 else round(40 * wish)))
    left, top, right, bottom = face.getbbox(text)
    room_x, room_y = max(0, width - (right - left)), max(0, height - (bottom - top))
    x, y = room_x * dice.between(0.1, 0.9) - left, room_y * dice.between(0.1, 0.9) - top
    fill = tint(dice, ink)
    if dice.chance(0.3):
        layer = Image.new("L", canvas.size)
        ImageDraw.Draw(layer).text((x, y), text, font=face, fill=255)
        layer = layer.rotate(dice.between(-8, 8), Image.Resampling.BILINEAR, center=(width / 2, height / 2))
        canvas.paste(Image.new("RGB", canvas.size, fill), (0, 0), layer)
    else:
        ImageDraw.Draw(canvas).text((x, y), text, font=face, fill=fill)
    return wear(dice, canvas)
