"""Compares older weights with mixtures of older and newly trained weights, on the same held-out items.

An answer is right if each of its tokens is the most likely one after the right tokens before it, so that greedy
decoding would emit it; no media files, no server. For every row: items, right before, right with each pair of shares.

    python -m examples.embedded_model.compare --state build/embedded_tools --shares 1,1 0.9,0.5 0.8,0.5 --each 100
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.embedded_model import blueprint as bp
from examples.embedded_model.encode import ROWS, Encoder, pack
from examples.embedded_model.export import Between, state_weights
from examples.embedded_model.heldout import samples
from examples.embedded_model.model import Packed, canonical
from examples.embedded_model.train import right_turns

PER_BATCH = 16


def batches(each: int, seed: int, rows: Sequence[str]) -> Iterator[tuple[str, dict[str, torch.Tensor], list[int]]]:
    """(row, arrays, indices of the turns that count) of `each` items of every row; in tool_call only calls count."""
    encoder = Encoder()
    for row in rows:
        wanted = [sample for _, sample, _ in samples(each, seed, tasks=(row,))]
        if row == "tool_call":
            wanted = [sample for sample in wanted if sample.turns[-1].check == "call"]
        for start in range(0, len(wanted), PER_BATCH):
            part = wanted[start : start + PER_BATCH]
            ends = torch.tensor([len(sample.turns) for sample in part]).cumsum(0) - 1
            yield row, pack([encoder.row(sample) for sample in part]), ends.tolist()


def write(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Writes the weights into the model, rounded to bf16 as in the export."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lm_head" not in name:  # tied to the embeddings
                parameter.copy_(weights[canonical(name)].to(torch.bfloat16))


@torch.no_grad()
def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("build/embedded_tools"))
    parser.add_argument("--older", type=Path, default=bp.MODEL_DIR / "model.safetensors")
    parser.add_argument("--shares", nargs="+", default=["1,1", "0.9,0.5"], help="TEXT,TOWERS as in export.py")
    parser.add_argument("--each", type=int, default=100, help="items of every row")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--json", type=Path, help="write the counts here too")
    args = parser.parse_args()
    after, names = state_weights(args.state), ["before", *args.shares]
    models = []
    for shares in names:
        text, towers = (0.0, 0.0) if shares == "before" else map(float, shares.split(","))
        mixed = Between(args.older, text, towers).mixed(after) if shares != "before" else load_file(args.older)
        models.append(Packed(bp.build_model().eval()))
        write(models[-1].thinker, mixed)
    counts: dict[str, list[int]] = {}
    for row, batch, ends in batches(args.each, args.seed, args.rows.split(",")):
        line = counts.setdefault(row, [0] * (len(models) + 1))
        line[0] += len(ends)
        for number, model in enumerate(models, 1):
            line[number] += int(right_turns(*model(batch), batch)[ends].sum())
    print(f"{'row':16s} items  " + "  ".join(f"{name:>9s}" for name in names))
    for row, (asked, *right) in counts.items():
        print(f"{row:16s} {asked:5d}  " + "  ".join(f"{100 * n / asked:9.1f}" for n in right))
    if args.json:
        args.json.write_text(json.dumps({"shares": names, "rows": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
