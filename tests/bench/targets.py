"""The targets for one card: the floor, the peer's number and our aim per case, and the table that compares a run.

The numbers are for one H100 (80 GB), bfloat16. The floor is computed; the peer is vLLM 0.26 on a card of this kind,
measured with vLLM's own client (results/peer_h100.json); the aim is the project's own target. Run: python -m
tests.bench.targets DIR prints again the results that gpu_offline and gpu_serve have written there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """Numbers to compare with; None or "" where there is none. Less is better, unless the unit is a rate."""

    unit: str
    floor: float | None = None
    peer: str = ""
    aim: float | None = None

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")


def steps(unit: str, floor: tuple, peer: tuple, aim: tuple, context: str) -> dict[str, Target]:
    """Targets of decode steps of 1, 32 and 256 rows."""
    return {
        f"step, {rows} rows at {context}": Target(unit, *numbers)
        for rows, *numbers in zip((1, 32, 256), floor, peer, aim)
    }


EVERY = {  # for every shape; the host's part does not depend on the model
    "host work per step, 256 rows": Target("us", aim=60),
    "device idle between steps, 256 rows, p50": Target("us", 0, aim=30),
    "device idle between steps, 256 rows, p99": Target("us", 0, aim=100),
    "prefix cache on, 0 % hits: share lost": Target("%", 0, aim=1),
}
OFFLINE = {
    "8b": {
        "ready, kernels cached": Target("s", peer="79/95", aim=15),
        "ready, nothing compiled": Target("s", peer="79/95", aim=25),
        # The mean context of the peer's measurement.
        **steps("ms", (5.1, 5.95, 12.1), ("6.79", "7.75", "16.6"), (6.0, 7.0, 15.0), "576"),
        **steps("ms", (5.1, 6.66, 17.9), ("", "", ""), (6.0, 8.3, 22.0), "1024"),
        "TTFT idle, 256 tokens": Target("ms", 4.6, aim=12),
        "prefill 1 x 8192": Target("ms", 167, aim=230),
        "prefill 16 x 1024": Target("tok/s", 55_000, "42300", 44_000),
        "offline 256 x (512 in, 128 out)": Target("tok/s", 7_700, "6361", 7_000),
        **EVERY,
    },
    "0.6b": {
        "ready, kernels cached": Target("s", peer="86/83", aim=15),
        "ready, nothing compiled": Target("s", peer="86/83", aim=25),
        **steps("ms", (0.42, 1.1, 6.0), ("2.27", "2.57", "8.1"), (1.3, 1.8, 7.6), "576"),
        **steps("ms", (0.44, 1.65, 10.4), ("", "", ""), (1.3, None, None), "1024"),
        "TTFT idle, 128 tokens": Target("ms", 0.45, aim=6),
        **EVERY,
    },
}
OFFLINE["vl-7b"] = {  # text only
    "ready, kernels cached": Target("s", peer="149", aim=15),
    "ready, nothing compiled": Target("s", peer="149", aim=25),
    **steps("ms", (4.73, 5.34, 9.7), ("", "", ""), (None, None, None), "1024"),
    **EVERY,
}
SERVE = {
    "8b": {
        "ready": Target("s", peer="79 to 95", aim=15),
        "1 streams, TTFT p50": Target("ms", 9.3, "18.5", 13),
        "1 streams, TPOT": Target("ms", 5.1, "6.80", 6.0),
        # The peer's numbers of these two are from another card.
        "4 streams of 230 tokens, TTFT p50": Target("ms", 4.6, "60", 18),
        "4 streams of 230 tokens, TPOT": Target("ms", 5.1, "7.4", 6.3),
        "4 streams of conversations, TTFT p50": Target("ms", 4.6, "27/60", 18),  # SGLang and vLLM, on another card
        "4 streams of conversations, TPOT": Target("ms", 5.1, "7.14/7.40", 6.3),
        "16 streams, output": Target("tok/s", 2_420, "1808", 2_050),
        "64 streams, output": Target("tok/s", 5_500, "4277", 4_800),
        "64 streams, ITL p99": Target("ms", None, "173", 40),
        "256 streams, output": Target("tok/s", 7_700, "6389", 6_500),
        "256 streams, TTFT p50": Target("ms", None, "587", 550),
    },
    "0.6b": {
        "ready": Target("s", peer="83 to 86", aim=15),
        "1 streams, TTFT p50": Target("ms", 0.9, "11.4", 6),
        "1 streams, TPOT": Target("ms", 0.44, "1.78", 1.3),
        "16 streams, output": Target("tok/s", 21_000, "5244", 9_000),
        "256 streams, output": Target("tok/s", 32_000, "19208", 22_000),
        "256 streams, TTFT p50": Target("ms", None, "274", 250),
    },
}
SERVE["vl-7b"] = {  # pictures of 1024 x 1024 unless named otherwise, 64 tokens out; the peer got PNG
    "ready": Target("s", peer="149", aim=15),
    "1 streams, TTFT p50": Target("ms", 33, aim=52),
    "1 streams of PNG, TTFT p50": Target("ms", 33, "166", 70),
    "1 streams of one prefix-cached picture, TTFT p50": Target("ms", aim=15),
    "1 streams of 1080p, TTFT p50": Target("ms", 67, "293", 110),
    "8 streams of PNG, output": Target("tok/s", peer="517", aim=700),
    "32 streams of PNG, output": Target("tok/s", 1_400, "842", 1_050),
}


def coded(first: tuple, token: tuple, rates: dict[int, tuple]) -> dict[str, Target]:
    """Aims of quantised models and of experts, as (floor, aim): first token, time per token, rates by streams."""
    alone = {} if not first else {
        "1 streams, TTFT p50": Target("ms", first[0], aim=first[1]),
        "1 streams, TPOT": Target("ms", token[0], aim=token[1]),
    }  # fmt: skip
    return alone | {f"{count} streams, output": Target("tok/s", low, aim=aim) for count, (low, aim) in rates.items()}


FEWER_BITS = {16: (4_120, 3_400), 64: (8_700, 6_900), 256: (12_000, 8_800)}
SERVE |= {
    "8b, fp8": coded((5.6, 9), (2.76, 3.6), FEWER_BITS),
    "8b, fp8-blocks": coded((5.6, 9), (2.76, 3.6), FEWER_BITS),
    "8b, fp8, --kv-cache-dtype fp8": coded((), (), {16: (4_370, 3_550), 64: (9_900, 7_600), 256: (14_500, 10_200)}),
    "8b, w4": coded((9.3, 16), (1.64, 2.6), {16: (4_960, 2_900), 64: (7_900, 4_600), 256: (9_300, 5_800)}),
    "30b-a3b": coded((20, 27), (2.06, 3.1), {16: (1_110, 850), 64: (2_980, 2_250), 256: (10_200, 6_000)}),
    "30b-a3b, fp8-blocks": coded((10, 16), (1.15, 2.3), {16: (2_140, 1_500), 64: (5_600, 3_700), 256: (17_000, 9_000)}),
    "gpt-oss-20b": coded((4.7, 9), (1.25, 2.0), {16: (3_650, 2_400), 64: (9_300, 6_000), 256: (17_000, 8_800)}),
}
HOST = {  # for each case of serving
    "loop stall p99": Target("ms", aim=5),
    "written p50": Target("ms", aim=0.3),
}


def number(value: float | None) -> str:
    """The number with three significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def verdict(seen: float, target: Target) -> str:
    """The ratio to the aim; above 1 the result is better than the aim."""
    if not target.aim or not seen:
        return ""
    ratio = seen / target.aim if target.more_is_better else target.aim / seen
    return f"{'met' if ratio >= 1 else 'MISSED'} {ratio:.2f}x"


def show(
    title: str,
    seen: dict[str, float],
    targets: dict[str, Target],
    units: dict[str, str],
    ranges: dict[str, list[float]] | None = None,
) -> None:
    """Prints a line per case, including cases without a target. `ranges`: a case's smallest and largest value."""
    print(f"\n{title}\n{'case':<60}{'seen':>10} {'unit':<6}{'aim':>9}{'floor':>9}{'peer':>14}  against the aim")
    for name, value in seen.items():
        target = targets.get(name) or Target(units.get(name, ""))
        least, most = (ranges or {}).get(name) or (None, None)
        print(
            f"{name:<60}{number(value):>10} {target.unit:<6}{number(target.aim):>9}{number(target.floor):>9}"
            f"{target.peer or '-':>14}  {verdict(value, target)}"
            + (f"  {number(least)} to {number(most)}" if least is not None else ""),
            flush=True,
        )


def keep(out: Path | None, name: str, shape: str, report: dict) -> None:
    """Adds a shape's report to the JSON file `name` in the folder `out`; reports of other shapes stay."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    file = out / name
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**found, shape: report}, indent=1) + "\n")


def serve_targets(shape: str, seen: dict[str, float]) -> dict[str, Target]:
    """Targets for the measured cases of gpu_serve."""
    numbers = {name: name.rpartition(", ")[2] for name in seen}
    beside = {name: HOST[last] for name, last in numbers.items() if last in HOST}
    return beside | SERVE.get(shape, {})


def summary(out: Path) -> None:
    """Prints the results in a folder's reports for the cases that have a target."""
    for file, title in (("gpu_offline.json", "offline"), ("gpu_serve.json", "serving")):
        found = json.loads((out / file).read_text()) if (out / file).is_file() else {}
        for shape, report in found.items():
            seen = report["seen"]
            targets = OFFLINE.get(shape, {}) if title == "offline" else serve_targets(shape, seen)
            with_aim = {name: seen[name] for name in seen if name in targets}
            show(f"{shape}, {title}", with_aim, targets, {}, report.get("spread"))
            if report["failed"]:
                print(f"failed: {report['failed']}")


if __name__ == "__main__":
    summary(Path(sys.argv[1]))
