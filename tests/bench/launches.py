"""The launches of a step, by name and in order, in this checkout and in another: a plain request, one under a schema.

On a GPU the names are those of the kernels and copies in torch's profiler, graphs included; on a CPU those of the C
kernels. Random weights of a small shape, greedy tokens, one request at a time. After an answer's last token one more
step may be in flight. So checkouts differ only if neither list is a prefix of the other. Run: python -m
tests.bench.launches --baseline CHECKOUT [--device auto|cpu] [--shape tiny] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ANSWER = 12  # tokens
C_KERNELS = ("linear", "coded_linear", "norm", "point", "qkv_rope_store", "paged_attention", "dense_attention")


def record_c_kernels(names: list[str]) -> None:
    """Records each call of a C kernel. Must run before the engine is imported: it imports the functions by name."""
    from _fast import cpu

    for name in C_KERNELS:
        setattr(cpu, name, noted(getattr(cpu, name), names))


def noted(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        names.append(function.__name__)
        return function(*args, **named)

    call.__name__ = function.__name__
    return call


@contextlib.contextmanager
def gpu_names(names: list[str]) -> Iterator[None]:
    """Adds the names of what the device ran in this block, ordered by start."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        yield
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if "CUDA" in str(event.device_type)]
    names += [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


async def launched(folder: str, device: str) -> dict[str, list[str]]:
    """Case -> names of its launches."""
    names: list[str] = []
    if device == "cpu":
        record_c_kernels(names)
    from engine import Engine, EngineConfig, Request, SamplingParams

    # From this folder, whichever checkout's modules run: the other checkout may lack the file.
    grammar_of = runpy.run_path(str(Path(__file__).with_name("gpu_step.py")))["grammar_of"]
    engine = Engine(EngineConfig(folder, load_format="dummy", device=device, enable_prefix_caching=False))
    await engine.start()
    vocab = engine.limits.vocab_size
    prompt = np.random.default_rng(0).integers(2, vocab, 40, dtype=np.int32)
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    found = {}
    for case, grammar in (("plain", None), ("under a schema", grammar_of(vocab))):
        names.clear()
        with contextlib.nullcontext() if device == "cpu" else gpu_names(names):
            async for _ in engine.submit(Request(prompt, sampling, grammar=grammar)):
                pass
        found[case] = list(names)
    await engine.stop()
    return found


def names_in(checkout: Path, folder: str, device: str) -> dict[str, list[str]]:
    """Runs a separate process with the modules of `checkout`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", folder, "--device", device]
    here = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{here}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Runs both checkouts, compares and prints both lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout, its extensions built")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(asyncio.run(launched(args.inside, args.device))))
        return
    from tests.bench.shapes import SHAPES, write_folder

    here = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), SHAPES[args.shape])
        this, other = (names_in(path.resolve(), folder, args.device) for path in (here, args.baseline or here))
    summary = {}
    for case, names in this.items():
        count = min(len(names), len(other[case]))
        same = names[:count] == other[case][:count]
        summary[case] = {"launches": [len(names), len(other[case])], "same": same}
        print(f"{case}: {len(names)} and {len(other[case])} launches, {'the same' if same else 'different'}")
        if not same:
            print("\n".join(list(difflib.unified_diff(other[case], names, "baseline", "this", lineterm="", n=1))[:60]))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        lists = {"this": this, "baseline": other}
        (args.out / "launches.json").write_text(json.dumps({"summary": summary, "lists": lists}, indent=1))


if __name__ == "__main__":
    main()
