"""Writes the checkpoint folder from a training state: bf16 weights under transformers' names, and every config file.

python -m examples.embedded_model.export --state build/embedded_model
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.embedded_model.blueprint import MODEL_DIR, write_folder

LIMIT = 24_000_000  # bytes that the folder may weigh


def export(state: Path, folder: Path, knows_tools: bool = False) -> int:
    """Write the folder; returns what it weighs in bytes. `knows_tools`: with the template that shows tools."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(state.glob("weights-*.safetensors")):
        weights |= {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in load_file(path).items()}
    if not weights:
        raise SystemExit(f"{state}: no weights-*.safetensors there; train first, or name the folder with --state")
    write_folder(folder, knows_tools)
    save_file(dict(sorted(weights.items())), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("build/embedded_model"))
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--tools", action="store_true", help="with the chat template of weights that know tools")
    args = parser.parse_args()
    size = export(args.state, args.out, args.tools)
    print(f"{args.out}: {size / 1e6:.2f} MB (at most {LIMIT / 1e6:.0f})")
    if size > LIMIT:
        raise SystemExit("too heavy: make the model smaller in blueprint.py")


if __name__ == "__main__":
    main()
