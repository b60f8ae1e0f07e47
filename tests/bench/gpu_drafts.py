"""Drafts on a card: the speed of an 8B model with drafters, and of the same model without them.

Random weights of real shapes, one engine per process, without HTTP. Drafters are an EAGLE-3 head and a DFlash drafter
of the sizes published for this model; how many of their drafts are right is set (rejection_sample_method synthetic).
Verify steps alone are those of method replay with recordings that are never right. Prompts and answers are as long as
gives a mean context of 576 tokens; rates count the tokens while all streams run, the best of several runs. Cases:

    1  a verify step of one row of 4 tokens (FP8: 8 too), over a plain step
    2  one stream, bf16, EAGLE-3, 3 drafts, 3.0 tokens a step        4  64 streams, the published curve of EAGLE-3
    3  one stream, FP8, DFlash of 5 layers, 7 drafts, 5.0 tokens     5  256 streams, the same; drafts never right
    6  the n-gram kernel over 256 texts of 40,000 tokens; 64 streams whose texts have no match
    7  the host's work for a step of 256 drafted rows                8  start with the head, without reading it

Prints each number, and each of the project's requirements (made for an H100) as met or missed; gpu_drafts.json in --out
is rewritten after every measurement. A failure is printed, and the other cases run.
Run: python -m tests.bench.gpu_drafts [--cases 1,2,3,4,5,6,7,8] [--ranks 2] [--limit 400] [--out DIR]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.bench.drafted_engines import AGAIN, KERNEL, KINDS, SIZES, Sizes, cases_of, inside, prompts_of
from tests.bench.gpu_offline import device_name
from tests.bench.gpu_step import SWITCH_INTERVAL_S
from tests.bench.shapes import SHAPES, write_folder

FILE = "gpu_drafts.json"
CHILD_S = 110.0  # longest time of one engine
Found = dict[str, dict[str, Any]]  # engine -> number or measure -> value


def drafter_folder(folder: Path, kind: str, config: dict[str, Any], layers: int) -> Path:
    """The configuration of a drafter for a target, as published ones have it; the weights are random."""
    target = config["num_hidden_layers"]
    last = max(target - 3, 1)
    if kind == "eagle3":
        own = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "draft_vocab_size": min(32_000, config["vocab_size"]),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [min(2, target), max(target // 2, 1), last]},
        }  # fmt: skip
    else:
        read = [round(1 + number * (target - 4) / max(layers - 1, 1)) for number in range(layers)]
        own = {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": layers, "block_size": 16,
            "dflash_config": {
                "mask_token_id": config["vocab_size"] - 1,
                "target_layer_ids": [min(max(number, 0), target - 1) for number in read],
            },
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    return folder


def write_recording(path: Path, sizes: Sizes, vocab: int) -> None:
    """Random answers to the prompts of one stream."""
    draw = np.random.default_rng(7)
    lines = [
        {"prompt_token_ids": prompt.tolist(), "token_ids": draw.integers(2, vocab, sizes.answer).tolist()}
        for number in range(sizes.runs[0])
        for prompt in prompts_of(sizes.rows[0], number, sizes, vocab)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


class Asked(NamedTuple):
    """A requirement of the project."""

    case: str
    what: str
    value: float | None  # None: not measured
    limit: float
    least: bool = False  # the value must not be below the limit

    @property
    def line(self) -> str:
        if self.value is None:
            return f"case {self.case}: {self.what}: NOT MEASURED"
        met = self.value >= self.limit if self.least else self.value <= self.limit
        word = "at least" if self.least else "at most"
        return (
            f"case {self.case}: {self.what}: {self.value:.3f}, asked {word} {self.limit}: {'met' if met else 'MISSED'}"
        )


def value_of(found: Found, name: str, measure: str, number: str = "tokens/s") -> float | None:
    """A number of a measure."""
    return found.get(name, {}).get(measure, {}).get(number)


def over(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def step_of(found: Found, name: str, measure: str, tokens: int) -> float | None:
    """Milliseconds of a step, if most steps had so many tokens."""
    usual = value_of(found, name, measure, "usual step, tokens") == tokens
    return value_of(found, name, measure, "usual step, ms") if usual else None


def less(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above - below


def asked(found: Found) -> list[Asked]:
    """The requirements, with what was measured."""
    head = "bf16 eagle3"

    def verify(form: str, tokens: int) -> float | None:
        return over(step_of(found, f"{form} replay", f"{tokens} tokens", tokens), step_of(found, form, "one", 1))

    def faster(name: str, measure: str, base: str = "") -> float | None:
        return over(value_of(found, name, measure), value_of(found, name.split()[0], base or measure))

    def start(name: str) -> float | None:
        of = found.get(name + AGAIN, {})
        return less(of.get("ready, s"), of.get("reading the drafter, s"))

    drafting = less(step_of(found, head, "one", 4), step_of(found, "bf16 replay", "4 tokens", 4))
    return [
        Asked("1", "bf16, verify step of 4 tokens over a plain step", verify("bf16", 4), 1.06),
        Asked("1", "FP8, verify step of 4 tokens over a plain step", verify("fp8", 4), 1.12),
        Asked("1", "FP8, verify step of 8 tokens over a plain step", verify("fp8", 8), 1.18),
        Asked("2", "bf16, one stream, EAGLE-3, over none", faster(head, "one"), 2.1, True),
        Asked("3", "FP8, one stream, DFlash, over none", faster("fp8 dflash", "one"), 3.2, True),
        Asked("3", "FP8, one stream, DFlash, ms a token", value_of(found, "fp8 dflash", "one", "ms/token"), 1.10),
        Asked("4", "bf16, 64 streams, EAGLE-3, over none", faster(head, "many"), 1.6, True),
        Asked("5", "bf16, 256 streams, EAGLE-3, over none", faster(head, "most"), 1.2, True),
        Asked("5", "bf16, 256 streams, never right, over none", faster(head, "most never right", "most"), 0.97, True),
        Asked("6", "n-gram, 256 texts of 40,000 tokens, us", value_of(found, KERNEL, "us", "median"), 60),
        Asked("6", "n-gram, 64 streams without a match, over none", faster("bf16 ngram", "many drawn"), 0.99, True),
        Asked("7", "host's work for a step of 256 rows, us", value_of(found, head, "most", "host, us"), 80),
        Asked("8", "seconds to ready beyond those without", less(start(head), start("bf16")), 2),
        Asked("2", "EAGLE-3 drafting, 3 drafts of one row, ms", drafting, 1.1),
    ]


def child(name: str, folders: Path, args: argparse.Namespace, path: Path, longest: float) -> None:
    """Measures one engine in a separate process."""
    command = [sys.executable, "-m", "tests.bench.gpu_drafts", "--inside", name, "--folders", str(folders)]
    command += ["--device", args.device, "--shape", args.shape, "--cases", args.cases, "--into", str(path)]
    command += ["--every"] * args.every + ["--ranks", str(args.ranks)]
    subprocess.run(command, check=True, timeout=longest)


def prepare(folders: Path, shape: str) -> None:
    """Writes the folders of targets and drafters, and the recording."""
    config, sizes = SHAPES[shape], SIZES[shape]
    for form in ("", "fp8"):
        write_folder(folders / (form or "floats"), config, form)
    for kind in ("eagle3", "dflash"):
        drafter_folder(folders / kind, kind, config, sizes.layers)
    write_recording(folders / "recording.jsonl", sizes, config["vocab_size"])


def measure_all(args: argparse.Namespace, out: Path) -> tuple[Found, list[str]]:
    """All engines of the cases: their numbers, and the names of those that failed."""
    begun, cases = time.perf_counter(), set(args.cases.split(","))
    found, failed = Found(), []
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name)
        prepare(folders, args.shape)
        for kind in KINDS:
            if not cases & cases_of(KINDS[kind]):
                continue
            left = args.limit - (time.perf_counter() - begun)
            path = out / f"part {kind}.json"
            try:
                if left < 10:
                    raise TimeoutError(f"{args.limit:.0f} s are over")
                child(kind, folders, args, path, min(CHILD_S, left))
            except Exception as error:
                failed.append(kind)
                print(f"{kind}: FAILED: {error}", flush=True)
            if path.exists():
                found[kind] = json.loads(path.read_text())
                path.unlink()
                failed += [kind] * (any("error" in key for key in found[kind]) and kind not in failed)
            show(f"{kind}, {time.perf_counter() - begun:.0f} s", found.get(kind, {}))
            keep(out, args, found, cases)
    return found, failed


def show(title: str, found: dict[str, Any]) -> None:
    """Prints the numbers of an engine, a measure in each line."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {text(each)}" for name, each in value.items())
        if isinstance(value, list):
            return " ".join(map(text, value))
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    print(title, *(f"    {name}: {text(value)}" for name, value in found.items()), sep="\n", flush=True)


def keep(out: Path, args: argparse.Namespace, found: Found, cases: set[str]) -> None:
    """Writes what has been measured so far."""
    report = {"device": device_name(args.device), "ranks": args.ranks, "shape": args.shape, "found": found}
    lines = [one.line for one in asked(found) if one.case in cases]
    (out / FILE).write_text(json.dumps({**report, "asked": lines}, indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--shape", default="8b", choices=SIZES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of every engine; rank 0 has the drafter")
    parser.add_argument("--limit", type=float, default=400, help="seconds for everything")
    parser.add_argument("--every", action="store_true", help="verify every draft, whatever the budget says")
    parser.add_argument("--out", type=Path, default=Path())
    for name in ("--inside", "--folders", "--into"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
        faulthandler.dump_traceback_later(CHILD_S - 5)  # a process that hangs says where
        return inside(args.inside, Path(args.folders), args, Path(args.into))
    args.out.mkdir(parents=True, exist_ok=True)
    found, failed = measure_all(args, args.out)
    print("\n".join(one.line for one in asked(found) if one.case in args.cases.split(",")))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
