"""The cases of gpu_parallel: what is measured of which model on how many GPUs, and what it must reach.

A case is "exchange on RANKS"; "answers on RANKS"; "chaos on RANKS"; or a shape of shapes.py, a form of its weights or
"files", "experts" for whole experts per rank, and "on RANKS": "llama-70b fp8 on 2", "30b-a3b experts on 2".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.base.config import RanksConfig
from tests.bench.gpu_offline import TINY_ENGINE
from tests.bench.gpu_rank_answers import MOST, ROWS, differing
from tests.bench.shapes import SHAPES

Line = dict[str, Any]

TABLES = {  # GPUs -> cases
    2: "exchange on 2,8b on 1,8b on 2,32b on 2,llama-70b fp8 on 2,llama-70b on 2",
    4: (
        "exchange on 4,8b on 4,llama-70b fp8 on 4,235b fp8-blocks on 4,8b on 1,answers on 1,answers on 2,"
        "235b fp8-blocks experts on 4,mixtral-8x22b on 4,answers on 4,chaos on 4,8b files on 4"
    ),
    8: (
        "exchange on 8,8b on 1,8b on 2,8b on 4,8b on 8,llama-70b fp8 on 8,235b fp8-blocks on 8,"
        "235b fp8-blocks experts on 8,mixtral-8x22b on 8,chaos on 8"
    ),
}
FURTHER = (
    "gpt-oss-120b on 1,gpt-oss-120b experts on 2,30b-a3b on 1,30b-a3b on 2,30b-a3b experts on 2,"
    "qwen-27b on 1,qwen-27b on 2,qwen-35b-a3b on 1,qwen-35b-a3b on 2,nano on 1,nano on 2"
)
WIDTH = 8192  # of the exchanges
PROMPT = 8192
WHAT = {  # shape -> its measurements
    "8b": ("1x576", "host", "prompt", "256x1024"),
    "32b": ("1x576",),
    "llama-70b": ("1x576", "prompt"),
    "gpt-oss-120b": ("1x576", "64x1536"),
    **dict.fromkeys(("30b-a3b", "235b"), ("1x576", "64x576", "256x576")),
    "mixtral-8x22b": ("1x576", "prompt"),
    **dict.fromkeys(("qwen-27b", "qwen-35b-a3b", "nano"), ("1x576", "prompt", "64x576")),  # with states
    "tiny": ("1x96", "host", "prompt", "4x96"),
    "tiny-sparse": ("1x96",),
    **dict.fromkeys(("exchange", "answers", "chaos"), ()),
}
ONE_ROW = "1 rows at 576"
MUSTS = {  # case and measurement -> milliseconds: floor, must
    ("32b on 2", ONE_ROW): (10.8, 12.5),
    ("llama-70b on 2", ONE_ROW): (23.3, 26.0),
    ("llama-70b fp8 on 2", ONE_ROW): (11.9, 14.8),
    ("llama-70b fp8 on 4", ONE_ROW): (6.0, 8.8),
    ("235b fp8-blocks on 4", ONE_ROW): (2.0, 5.2),
    ("mixtral-8x22b on 4", ONE_ROW): (6.6, None),
}
RATIOS = {  # of the 8b: ranks and measurement -> floor, must of the ratio to one GPU
    (2, ONE_ROW): (0.50, 0.62),
    (2, "256 rows at 1024"): (0.50, 0.60),
    (2, f"prompt of {PROMPT}"): (0.50, 0.62),
    (4, ONE_ROW): (0.25, 0.43),
    (4, "256 rows at 1024"): (0.25, None),
    (4, f"prompt of {PROMPT}"): (0.25, None),
}
# Microseconds: for each further rank; beyond one GPU's.
MOST_US = {"launch of a graph on all ranks": 10.0, "idle between steps": 3.0}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on ranks."""

    shape: str
    form: str
    experts: bool  # whole experts per rank
    ranks: int

    @classmethod
    def of(cls, name: str) -> Case:
        """Raises SystemExit for names that have no shape or no number of ranks."""
        model, _, ranks = name.partition(" on ")
        shape, *words = model.split() or [""]
        if shape not in WHAT or not ranks.isdigit():
            raise SystemExit(f"--cases {name}: a case is SHAPE [FORM] [experts] on RANKS; {', '.join(WHAT)}")
        form = " ".join(word for word in words if word != "experts")
        return cls(shape, form, "experts" in words, int(ranks))

    @property
    def settings(self) -> dict[str, Any]:
        """Of the engine."""
        what = WHAT[self.shape]
        rows = sorted({int(name.partition("x")[0]) for name in what if name[0].isdigit()})
        found: dict[str, Any] = {"tensor_parallel": self.ranks, "max_num_seqs": rows[-1]}
        found["ranks"] = RanksConfig(whole_experts=self.experts)
        if self.form == "files":
            found["load_format"] = "auto"
        if self.shape.startswith("tiny"):
            return {**TINY_ENGINE, **found}
        return {**found, "cudagraph_capture_sizes": tuple(rows)}


def judged(name: str, line: Line) -> Line:
    """The line, with floor and limit of its measurement."""
    given = MUSTS.get((name, line.get("what", "")))
    if given is None:
        return line
    floor, must = given
    return {**line, "floor": floor} | ({} if must is None else {"must": must, "met": line["ms"] <= must})


def compared(seen: dict[str, list[Line]]) -> list[Line]:
    """What is a ratio or a difference: the 8B on several ranks against one, the exchanges' share of a step, answers."""
    one, found = numbers(seen.get("8b on 1", [])), list[Line]()
    for ranks in (2, 4, 8):
        several = numbers(seen.get(f"8b on {ranks}", []))
        for what in one:
            floor, must = RATIOS.get((ranks, what), (1 / ranks, None))
            if what in several and what not in MOST_US:
                ratio = several[what] / one[what]
                line = {"what": f"8b, {what}, {ranks} to 1", "ratio": round(ratio, 3), "floor": floor}
                found.append(line if must is None else {**line, "must": must, "met": ratio <= must})
        for what, limit in MOST_US.items():
            if what in one and what in several:
                more = (several[what] - one[what]) / (ranks - 1 if "launch" in what else 1)
                line = {"what": f"8b, {what}, {ranks} ranks, further rank", "us": round(more, 2)}
                found.append({**line, "must": limit, "met": more <= limit})
        found += exchange_share(seen.get(f"exchange on {ranks}", []), several, ranks)
    return found + differing_answers(seen)


def exchange_share(exchanges: Sequence[Line], several: dict[str, float], ranks: int) -> list[Line]:
    """The part of a step of one row of the 8B that its exchanges take."""
    times = {line["kilobytes"]: line["microseconds"] for line in exchanges if "kilobytes" in line}
    near = [times[size] for size in sorted(times) if size * 512 >= SHAPES["8b"]["hidden_size"]]
    if not near or ONE_ROW not in several:
        return []
    share = 2 * SHAPES["8b"]["num_hidden_layers"] * near[0] / 1e3 / several[ONE_ROW]
    return [{"what": f"8b, 1 row on {ranks}: the exchanges' share of a step", "ratio": round(share, 3)}]


def differing_answers(seen: dict[str, list[Line]]) -> list[Line]:
    """How many answers differ between one rank and several, and how many differ between 1 and ROWS rows."""
    found = {
        Case.of(name).ranks: line
        for name, lines in seen.items()
        for line in lines
        if name.startswith("answers") and "alone" in line
    }
    if 1 not in found:
        return []
    alone = found[1]["alone"]
    rows = differing(alone, found[1]["together"])
    lines: list[Line] = [{"what": f"of {len(alone)} answers differ between 1 and {ROWS} rows", "count": rows}]
    for ranks, line in sorted(found.items()):
        if ranks > 1:
            count = differing(alone, line["alone"])
            what = f"of {len(alone)} answers differ between 1 and {ranks} ranks"
            lines.append({"what": what, "count": count, "must": MOST * rows, "met": count <= MOST * rows})
    return lines


def numbers(lines: Sequence[Line]) -> dict[str, float]:
    """The measured numbers by name."""
    return {line["what"]: line[unit] for line in lines for unit in ("ms", "us") if line.get(unit) is not None}
