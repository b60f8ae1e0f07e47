"""Writes the checkpoint folder from a training state: bf16 weights under transformers' names, and every config file.

    python -m examples.embedded_model.export --state build/embedded_model [--between OLD.safetensors 0.9 0.5]

`--between` writes weights on the straight line between older weights and trained ones. Such weights forget less of the
older skills and have nearly all of the new ones (Wortsman et al., 2022, "Robust fine-tuning of zero-shot models").
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.embedded_model.blueprint import MODEL_DIR, write_folder

LIMIT = 24_000_000  # most bytes of the folder


@dataclass(frozen=True)
class Between:
    """Shares of the state's weights in the mixture: 0 gives the older weights, 1 the state's."""

    older: Path  # a model.safetensors
    text: float
    towers: float  # vision and audio

    def mixed(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The mixed weights in float32, by name."""
        older = load_file(self.older)
        shares = {name: self.towers if name.startswith(("visual.", "audio_tower.")) else self.text for name in weights}
        return {name: torch.lerp(older[name].float(), tensor.float(), shares[name]) for name, tensor in weights.items()}


def state_weights(state: Path) -> dict[str, torch.Tensor]:
    """The trained weights of a state, float32 or bf16, by name."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(state.glob("weights-*.safetensors")):
        weights |= load_file(path)
    if not weights:
        raise SystemExit(f"{state}: no weights-*.safetensors there; train first, or name the folder with --state")
    return weights


def export(state: Path, folder: Path, between: Between | None = None) -> int:
    """Writes the folder; returns its size in bytes."""
    weights = state_weights(state)
    weights = between.mixed(weights) if between else weights
    weights = {name: weights[name].to(torch.bfloat16).contiguous() for name in sorted(weights)}
    write_folder(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return sum(path.stat().st_size for path in folder.iterdir())


def between_of(words: Sequence[str] | None) -> Between | None:
    """The mixture that the words of --between describe."""
    return Between(Path(words[0]), float(words[1]), float(words[2])) if words else None


def main() -> None:
    """Parses the command line and exports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("build/embedded_model"))
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--between", nargs=3, metavar=("OLDER", "TEXT", "TOWERS"), help="see above")
    args = parser.parse_args()
    size = export(args.state, args.out, between_of(args.between))
    print(f"{args.out}: {size / 1e6:.2f} MB (at most {LIMIT / 1e6:.0f})")
    if size > LIMIT:
        raise SystemExit("too heavy: make the model smaller in blueprint.py")


if __name__ == "__main__":
    main()
