"""Drafts on a card, beyond the requirements of gpu_drafts: other models, schemas, acceptance, and equal answers.

Random weights of real shapes, one engine per process, without HTTP; prompts and answers are those of gpu_drafts. An
EAGLE-3 head has one dense layer and 32,000 tokens. Cases, with the streams of each:

    9    gpt-oss-20b with EAGLE-3, 3 drafts, its published curve (synthetic), and without: 1, 16, 64
    10   the same of Qwen3-30B-A3B in FP8
    11   8B, every row under a JSON Schema: without drafts, with a random EAGLE-3 head (3 drafts, rarely right), and
         with n-grams (4 drafts, often right, since such rows repeat themselves): 1, 16
    12   acceptance by place at temperatures 0, 0.7 and 1, 16 streams: a draft model of 0.6B whose weights are those of
         the target with noise of 5 % or 20 %, that draws with the row's noise or takes the most probable token; the
         target's logits are scaled so that about six tokens are likely. No trained model: only how the two ways compare
    13   greedy bf16 answers of 0.6B, 256 tokens, one at a time: how many of 200 differ with drafts that are verified
         (recorded answers of which most are right, n-grams, a random EAGLE-3 head) and without, and how many differ
         between one row and four rows a step, and when the same is repeated.     13b  the same of 48 answers of 8B
    14   Qwen3.6-35B-A3B in FP8 with an MTP layer: a verify step of one row of 2, 3, 4 tokens, over a plain step; and
         with 1, 2, 3 drafts, the published curve (synthetic), and none: 1, 16.   14b  the same of Qwen3.5-27B in FP8

Every case stands alone, so several may run at once, each on a GPU of its own (CUDA_VISIBLE_DEVICES). A failure is
printed, and the other engines run; gpu_drafts_more_CASES.json in --out is rewritten after every engine.
Run: python -m tests.bench.gpu_drafts_more [--cases 9,10,11,12,13,13b,14,14b] [--limit 400] [--out DIR]
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
from typing import Any

from tests.bench.drafted_more import LANES, ONE, SIZES, TINY, Lane, config_of, head_of, inside
from tests.bench.gpu_drafts import Found, drafter_folder, over, show, value_of, write_recording
from tests.bench.gpu_offline import device_name
from tests.bench.gpu_step import SWITCH_INTERVAL_S
from tests.bench.shapes import write_folder

CASES = list(dict.fromkeys(lane.case for lane in LANES.values()))


def ratios(found: Found) -> list[str]:
    """Rates over those without drafts, and verify steps over a plain step."""
    lines = []
    for name, lane in LANES.items():
        for measure in lane.measures if lane.base else ():
            if measure.drafts:
                verify = usual_ms(found, name, measure.name, 1 + measure.drafts)
                value = over(verify, usual_ms(found, lane.base, ONE.name, 1))
                what = "over a plain step"
            else:
                value = over(value_of(found, name, measure.name), value_of(found, lane.base, measure.name))
                what = "tokens/s over none"
            if value is not None:
                lines.append(f"case {lane.case}: {name}, {measure.name}, {what}: {value:.3f}")
    return lines


def usual_ms(found: Found, name: str, measure: str, tokens: int) -> float | None:
    """Milliseconds of a step, if most steps had so many tokens."""
    usual = value_of(found, name, measure, "usual step, tokens") == tokens
    return value_of(found, name, measure, "usual step, ms") if usual else None


def prepare(folders: Path, lane: Lane, tiny: bool) -> None:
    """Writes the folders of a lane's target and drafter, and the recording of answers that are never right."""
    config, folder = config_of(lane.shape, tiny), folders / f"{lane.shape} {lane.weights}".strip()
    if not folder.exists():
        write_folder(folder, config, lane.weights)
    if lane.drafter == "eagle3":
        drafter_folder(folders / f"{lane.shape} eagle3", "eagle3", head_of(config), 1)
    if lane.settings.get("method") == "replay" and lane.does == "streams":
        write_recording(folders / f"{lane.shape}.jsonl", TINY if tiny else SIZES, config["vocab_size"])


def child(name: str, folders: Path, args: argparse.Namespace, path: Path, longest: float) -> None:
    """Measures one engine in a separate process."""
    command = [sys.executable, "-m", "tests.bench.gpu_drafts_more", "--inside", name, "--folders", str(folders)]
    command += ["--device", args.device, "--into", str(path), "--longest", str(longest)]
    command += ["--answers", str(args.answers), "--tokens", str(args.tokens), *["--tiny"] * args.tiny]
    subprocess.run(command, check=True, timeout=longest)


def measure_all(args: argparse.Namespace, file: Path) -> tuple[Found, list[str]]:
    """All engines of the cases: their numbers, and the names of those that failed."""
    begun, cases = time.perf_counter(), args.cases.split(",")
    found, failed = Found(), []
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name)
        for lane in (name for case in cases for name in LANES if LANES[name].case == case):
            path, seconds = folders / f"{lane}.json", args.limit - (time.perf_counter() - begun)
            try:
                if seconds < 10:
                    raise TimeoutError(f"{args.limit:.0f} s are over")
                prepare(folders, LANES[lane], args.tiny)
                child(lane, folders, args, path, min(LANES[lane].longest, seconds))
            except Exception as error:
                failed.append(lane)
                print(f"{lane}: FAILED: {error}", flush=True)
            if path.exists():
                found[lane] = json.loads(path.read_text())
                failed += [lane] * (any("error" in key for key in found[lane]) and lane not in failed)
            show(f"{lane}, {time.perf_counter() - begun:.0f} s", found.get(lane, {}))
            report: dict[str, Any] = {"device": device_name(args.device), "found": found, "ratios": ratios(found)}
            file.write_text(json.dumps({**report, "failed": failed}, indent=1))
    return found, failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for trying it out")
    parser.add_argument("--answers", type=int, default=0, help="of cases 13 and 13b; 0: 200 and 48")
    parser.add_argument("--tokens", type=int, default=256, help="of such an answer")
    parser.add_argument("--limit", type=float, default=400, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path())
    for name in ("--inside", "--folders", "--into", "--longest"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
        faulthandler.dump_traceback_later(float(args.longest) - 5)  # a process that hangs says where
        return inside(args.inside, Path(args.folders), args, Path(args.into))
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"--cases: there are {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    found, failed = measure_all(args, args.out / f"gpu_drafts_more_{args.cases.replace(',', '_')}.json")
    print("\n".join(ratios(found)))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
