"""Shows how many bytes quantisation saves: a model as it is, and with its floats converted to FP8 during loading.

python -m examples.quantized [FOLDER] [--device cpu]    the embedded model where no folder is named

A checkpoint that is quantised already (compressed-tensors, FP8, GPTQ, AWQ, AutoRound, ModelOpt) needs no flag:

omniloop ORG/NAME-W4A16
omniloop check ORG/NAME-W4A16
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np

from engine import Engine, EngineConfig, Request, SamplingParams

EMBEDDED = Path(__file__).parents[1] / "server" / "embedded"
PROMPT = np.arange(300, 316, dtype=np.int32)


async def tokens_of(folder: str, device: str, quantization: str) -> list[int]:
    """Loads the model and returns sixteen greedy tokens."""
    engine = Engine(EngineConfig(folder, device=device, quantization=quantization, max_num_seqs=4))
    await engine.start()
    try:
        sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        async with engine.submit(Request(PROMPT, sampling)) as stream:
            return [token async for delta in stream for token in delta.token_ids]
    finally:
        await engine.stop(5)


def main() -> None:
    """Prints bytes of the matrices and tokens for both forms; a model that is quantised already has only one."""
    from engine.base.errors import ConfigError
    from engine.run.estimate import estimate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(EMBEDDED))
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for quantization in ("", "fp8"):
        try:
            found = estimate(EngineConfig(args.folder, device=args.device, quantization=quantization), None)
        except ConfigError as error:
            raise SystemExit(str(error)) from None
        named = quantization or ("codes" if found.lines else "floats")
        print(f"{named}: {found.weight_bytes / 2**20:.1f} MiB", end=" ", flush=True)
        print(asyncio.run(tokens_of(args.folder, args.device, quantization)))
        if found.lines:
            break


if __name__ == "__main__":
    main()
