"""Plots: an image of panels with lines or points, drawn with Pillow, so that the bench needs no plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from server.bench.processes import Outcome
from server.bench.summary import times_of

PANEL, MARGIN = (560, 340), (64, 34, 20, 44)  # width, height; left, top, right, bottom
COLOURS = ("#1f6fb4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#666666")
TICKS = 5


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `lines`: name -> x and y of its points."""

    title: str
    x_title: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    points: bool = False


def draw_panels(path: str, panels: Sequence[Panel]) -> None:
    """Draw the panels, two in a row, into a PNG file."""
    rows = -(-len(panels) // 2)
    image = Image.new("RGB", (PANEL[0] * min(2, len(panels)), PANEL[1] * rows), "white")
    draw = ImageDraw.Draw(image)
    for number, panel in enumerate(panels):
        draw_panel(draw, panel, PANEL[0] * (number % 2), PANEL[1] * (number // 2))
    image.save(path, "PNG")


def draw_panel(draw: ImageDraw.ImageDraw, panel: Panel, left: int, top: int) -> None:
    font, title = ImageFont.load_default(12), ImageFont.load_default(15)
    x0, y0 = left + MARGIN[0], top + MARGIN[1]
    x1, y1 = left + PANEL[0] - MARGIN[2], top + PANEL[1] - MARGIN[3]
    draw.text((x0, top + 10), panel.title, "black", title)
    draw.text(((x0 + x1) / 2, y1 + 22), panel.x_title, "black", font, anchor="mt")
    xs = [value for x, _ in panel.lines.values() for value in x]
    ys = [value for _, y in panel.lines.values() for value in y]
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    high = high if high > low else low + 1
    most = max([*ys, 1e-9]) * 1.05
    for tick in range(TICKS + 1):
        x, y = x0 + (x1 - x0) * tick / TICKS, y1 - (y1 - y0) * tick / TICKS
        draw.line((x0, y, x1, y), "#dddddd")
        draw.text((x0 - 6, y), f"{most * tick / TICKS:.3g}", "black", font, anchor="rm")
        draw.text((x, y1 + 6), f"{low + (high - low) * tick / TICKS:.3g}", "black", font, anchor="mt")
    draw.rectangle((x0, y0, x1, y1), outline="#888888")
    for number, (name, (x_values, y_values)) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (x0 + (x1 - x0) * (x - low) / (high - low), y1 - (y1 - y0) * y / most) for x, y in zip(x_values, y_values)
        ]
        if len(places) > 1 and not panel.points:
            draw.line(places, colour, 2)
        for x, y in places if panel.points or len(places) < 30 else ():
            draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=colour)
        if len(panel.lines) > 1:
            draw.text((x1 - 8, y0 + 6 + 16 * number), name, colour, font, anchor="ra")


def draw_run(path: str, outcome: Outcome) -> None:
    """Plot one run of bench serve: first tokens and gaps as shares, times over the run, rate and open requests."""
    good = [answer for answer in outcome.answers if not answer.error]
    times = [(answer.sent - outcome.start, times_of(answer)) for answer in good]
    gaps = sorted(gap * 1e3 for answer in good for gap in answer.gaps)
    ends = sorted((answer.end - outcome.start, answer.tokens) for answer in good)
    until = ends[-1][0] if ends else 1.0
    edges = np.linspace(0, until, 41)
    rate = np.histogram([at for at, _ in ends], edges, weights=[count for _, count in ends])[0] / (edges[1] or 1)
    opened = [sum(a.sent - outcome.start <= at < a.end - outcome.start for a in outcome.answers) for at in edges]
    waits = {
        name: ([at for at, each in times if name in each], [each[name] for _, each in times if name in each])
        for name in ("ttft", "e2e")
    }
    panels = [
        shares("share of first tokens within", waits["ttft"][1]),
        shares("share of gaps between tokens within", gaps),
        Panel("time to first token and end-to-end latency, ms", "start, s", waits, points=True),
        Panel("tokens of ended answers per second", "s", {"tokens/s": (edges[1:].tolist(), rate.tolist())}),
        Panel("open requests", "s", {"open": (edges.tolist(), opened)}),
    ]
    draw_panels(path, panels)


def shares(title: str, values: Sequence[float]) -> Panel:
    """The cumulative distribution of times in milliseconds."""
    ordered = sorted(values)[:: max(1, len(values) // 500)]
    return Panel(title, "ms", {"": (ordered, [(at + 1) / len(ordered) for at in range(len(ordered))])})
