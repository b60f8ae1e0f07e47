"""Trains the embedded model in resumable pieces.

Worker processes draw, speak and encode; this process only computes. The learning rate depends on the minutes trained so
far, as a share of `--total-minutes`: a short warm-up, a constant part, and a linear decay over the last third. Every
piece ends with held-out accuracies (every token of an answer must be the most likely one) and a checkpoint.

    python -m examples.embedded_model.train --minutes 8.5 --total-minutes 50 --state build/embedded_model [--resume]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from examples.embedded_model import blueprint as bp
from examples.embedded_model.encode import MAX_AUDIO, ROWS, Encoder, pack
from examples.embedded_model.mixture import Mixture, stream
from examples.embedded_model.model import Packed
from examples.embedded_model.optim import Optimizer

SHARD_BYTES = 15 * 1024 * 1024


class Batches(IterableDataset):
    """Packed batches of about `tokens` tokens; every worker generates its own share of the samples."""

    def __init__(
        self, seed: str, tokens: int, held: bool, weights: dict[str, float], repeat: int = 0, skip: int = 0
    ) -> None:
        self.seed, self.tokens, self.held, self.weights, self.repeat, self.skip = (
            seed,
            tokens,
            held,
            weights,
            repeat,
            skip,
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        torch.set_num_threads(1)
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        encoder = Encoder()
        samples = stream(self.seed, self.held, Mixture(self.weights), self.skip + start, step)
        made = 0
        while not self.repeat or made < self.repeat:
            rows, size = [], 0
            while size < self.tokens:
                row = encoder.row(next(samples))
                if len(row.ids) > 1500 or any(len(d) > MAX_AUDIO for d, _ in row.sounds):
                    continue
                rows.append(row)
                size += len(row.ids)
            made += 1
            yield pack(rows)


def loader(batches: Batches, workers: int) -> DataLoader:
    """A loader whose workers pass batches through shared memory."""
    extra = {"prefetch_factor": 4, "persistent_workers": False} if workers else {}
    return DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available(), **extra)


def to_device(batch: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Copies arrays to the device; single numbers stay on the host, because launches need them."""
    return {n: t if t.dim() == 0 else t.to(device, non_blocking=True) for n, t in batch.items()}


class Feeder:
    """Copies batches to the device on a thread of its own; repeats old batches while no new one is ready."""

    def __init__(self, source: Iterator[dict[str, torch.Tensor]], device: str, keep: int) -> None:
        self.source, self.device, self.keep = source, device, keep
        self.ready: queue.Queue[dict[str, torch.Tensor]] = queue.Queue(maxsize=8)
        self.old: list[dict[str, torch.Tensor]] = []
        self.chance, self.fresh, self.ended = random.Random(0), 0, False
        self.thread = threading.Thread(target=self._move, daemon=True)
        self.thread.start()

    def _move(self) -> None:
        for batch in self.source:
            moved = to_device(batch, self.device)
            while not self.ended:
                try:
                    self.ready.put(moved, timeout=0.5)
                    break
                except queue.Full:
                    continue
            if self.ended:
                return

    def next(self) -> dict[str, torch.Tensor]:
        """A new batch if one is ready, else an old one."""
        if self.ready.empty() and len(self.old) >= min(20, self.keep) and self.keep:
            return self.chance.choice(self.old)
        batch = self.ready.get()
        self.fresh += 1
        if self.keep:
            if len(self.old) < self.keep:
                self.old.append(batch)
            else:
                self.old[self.fresh % self.keep] = batch
        return batch

    def stop(self) -> None:
        """Stops the thread; the workers end with their loader."""
        self.ended = True
        self.thread.join()


@torch.no_grad()
def right_turns(logits: torch.Tensor, targets: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether all tokens of each turn's answer are the most likely ones: bool [turns]."""
    at = (batch["labels"][1:] >= 0).nonzero().squeeze(1)
    turn = batch["turns"][1:][at].long()
    hit = (logits.argmax(-1) == targets).int()
    out = torch.ones(len(batch["tasks"]), dtype=torch.int32, device=logits.device)
    return out.scatter_reduce(0, turn, hit, "amin").bool()


@torch.no_grad()
def evaluate(
    model: Packed, device: str, seed: str, workers: int, rounds: int, tokens: int
) -> dict[str, tuple[int, int]]:
    """(right, all) turns of every row of the table, on held-out samples."""
    counts = torch.zeros(2, len(ROWS), dtype=torch.long)
    for batch in loader(Batches(seed, tokens, True, {}, repeat=rounds), workers):
        batch = to_device(batch, device)
        logits, targets = model(batch)
        right = right_turns(logits, targets, batch).cpu()
        tasks = batch["tasks"].cpu().long()
        counts[0] += torch.bincount(tasks[right], minlength=len(ROWS))
        counts[1] += torch.bincount(tasks, minlength=len(ROWS))
    return {name: (int(counts[0, i]), int(counts[1, i])) for i, name in enumerate(ROWS) if counts[1, i]}


def rate_at(progress: float, step: int, peak: float) -> float:
    """The learning rate; `progress` is the finished share of the training."""
    warm = min(1.0, (step + 1) / 200)
    return peak * warm * min(1.0, max(0.02, (1.0 - progress) / 0.35))


def save(folder: Path, optimizer: Optimizer, facts: dict, light: bool = False) -> None:
    """Writes weights (float32) and momenta in shards, and facts.json; `light` omits the momenta and writes bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to(torch.bfloat16) if light else p.detach() for n, p in optimizer.master.items()}
    for stem, tensors in (("weights", weights), ("momenta", {} if light else optimizer.state())):
        shard: dict[str, torch.Tensor] = {}
        number = size = 0
        for name, tensor in tensors.items():
            if size and size + tensor.nbytes > SHARD_BYTES:
                save_file(shard, folder / f"{stem}-{number:02d}.safetensors")
                shard, number, size = {}, number + 1, 0
            shard[name] = tensor.cpu().contiguous()
            size += tensor.nbytes
        if shard:
            save_file(shard, folder / f"{stem}-{number:02d}.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def load(folder: Path, optimizer: Optimizer) -> dict:
    """Loads weights and momenta of a state; returns its facts."""
    facts = json.loads((folder / "facts.json").read_text())
    with torch.no_grad():
        for path in sorted(folder.glob("weights-*.safetensors")):
            for name, tensor in load_file(path).items():
                optimizer.master[name].copy_(tensor)
    optimizer.publish()
    momenta = {n: t for path in sorted(folder.glob("momenta-*.safetensors")) for n, t in load_file(path).items()}
    optimizer.load(momenta, facts["step"] if momenta else 0)
    return facts


def start_from(path: Path, optimizer: Optimizer) -> None:
    """Loads weights of an exported model.safetensors; momenta start at zero."""
    with torch.no_grad():
        for name, tensor in load_file(path).items():
            optimizer.master[name].copy_(tensor)
    optimizer.publish()


def table_text(result: dict[str, tuple[int, int]]) -> str:
    """The table's rows, one per line."""
    return "\n".join(f"  {name:16s} {100 * a / b:6.2f} %  of {b}" for name, (a, b) in result.items())


class Meter:
    """Loss, accuracy and speed since the last line of the log."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Starts a new line."""
        self.steps = self.tokens = self.looks = 0
        self.wait = self.loss = 0.0
        self.right, self.asked = torch.zeros(len(ROWS)), torch.zeros(len(ROWS))
        self.since = time.time()

    def answers(self, right: torch.Tensor, tasks: torch.Tensor) -> None:
        """Adds the turns' answers to the counts."""
        self.right += torch.bincount(tasks[right].long(), minlength=len(ROWS))
        self.asked += torch.bincount(tasks.long(), minlength=len(ROWS))

    def line(self, step: int, spent: float, rate: float) -> str:
        """One line of the log."""
        now = time.time() - self.since
        short = " ".join(
            f"{n.replace('text_', 't_').replace('image_', 'i_').replace('audio_', 'a_')}={100 * a / b:.0f}"
            for n, a, b in zip(ROWS, self.right.tolist(), self.asked.tolist(), strict=True)
            if b
        )
        text = (
            f"[{spent / 60:5.1f} min] step {step} loss {self.loss / max(1, self.looks):.4f} rate {rate:.1e} "
            f"{self.tokens / now / 1e3:.0f}k tok/s {now / max(1, self.steps) * 1e3:.0f} ms/step wait {100 * self.wait / now:.0f}% | {short}"
        )
        self.clear()
        return text


def train(args: argparse.Namespace) -> None:
    """Trains one piece."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    began = time.time()
    thinker = bp.build_model(args.seed).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    model = Packed(thinker, compiled=args.compile)
    optimizer = Optimizer(thinker, args.decay)
    facts = {"step": 0, "spent": 0.0, "piece": 0, "samples": 0}
    if args.resume and (args.state / "facts.json").exists():
        facts = load(args.state, optimizer)
    elif args.init:
        start_from(args.init, optimizer)
        facts |= json.loads(args.facts or "{}")
    facts["piece"] += 1
    weights = {k: float(v) for k, v in (p.split("=") for p in args.weights.split(",") if p)}
    batches = Batches(f"{args.seed}/{facts['piece']}", args.tokens, False, weights)
    feeder = Feeder(iter(loader(batches, args.workers)), device, args.keep if device == "cuda" else 0)
    meter, deadline = Meter(), began + 60 * args.minutes
    print(
        f"{device}, {args.workers} workers, piece {facts['piece']}, step {facts['step']}, {facts['spent'] / 60:.1f} min so far",
        flush=True,
    )
    last = time.time()
    total = 60 * args.total_minutes or facts["spent"] + deadline - last
    early = began + 60 * args.early if args.early else deadline
    while time.time() < deadline:
        waited = time.time()
        batch = feeder.next()
        meter.wait += time.time() - waited
        rate = rate_at(facts["spent"] / total, optimizer.count, args.rate)
        logits, targets = model(batch)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step(rate)
        facts["step"] += 1
        meter.steps, meter.tokens = meter.steps + 1, meter.tokens + len(batch["ids"])
        if facts["step"] % 10 == 0:
            meter.loss, meter.looks = meter.loss + float(loss.detach()), meter.looks + 1
            meter.answers(right_turns(logits, targets, batch).cpu(), batch["tasks"].cpu())
        now = time.time()
        facts["spent"] += now - last
        last = now
        if now - meter.since > args.log_every:
            print(meter.line(facts["step"], facts["spent"], rate), flush=True)
        if now > early:
            save(args.state / "early", optimizer, facts, light=True)
            early = deadline
    feeder.stop()
    facts["samples"] += feeder.fresh * (len(batch["ends"]) - 1)  # approximate
    print(f"{feeder.fresh} fresh batches, {len(feeder.old)} kept", flush=True)
    del feeder
    save(args.state, optimizer, facts, args.light)  # before the evaluation, in case the machine is withdrawn
    result = evaluate(model, device, "held/0", args.workers, args.eval_rounds, args.tokens)
    facts["held"] = result
    (args.state / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"held-out after {facts['step']} steps, {facts['samples']} samples:\n{table_text(result)}")
    print(f"piece took {time.time() - began:.0f} s")


def command_line() -> argparse.ArgumentParser:
    """The parser of a piece's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="length of this piece, start-up included")
    parser.add_argument(
        "--total-minutes",
        type=float,
        default=48.0,
        help="length that the learning rate is planned for; 0: up to this piece's end",
    )
    parser.add_argument("--state", type=Path, default=Path("build/embedded_model"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--init", type=Path, help="start from this model.safetensors instead of random weights")
    parser.add_argument(
        "--facts", default="", help='with --init: {"step": 9000, "spent": 1500, "piece": 3, "samples": 1}'
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 2) - 1))
    parser.add_argument("--tokens", type=int, default=32768, help="tokens in one step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--keep", type=int, default=600, help="batches kept on the device, reused while none is ready")
    parser.add_argument("--weights", default="", help="shift the mixture: image_print=2,audio=1.5")
    parser.add_argument("--light", action="store_true", help="leave bf16 weights and no momenta, 23 MB")
    parser.add_argument(
        "--early", type=float, default=0.0, help="leave light weights in STATE/early after these minutes too"
    )
    parser.add_argument("--eval-rounds", type=int, default=1, help="held-out batches per worker")
    parser.add_argument("--log-every", type=float, default=20.0)
    parser.add_argument("--compile", action="store_true")
    return parser


def main() -> None:
    """Parses the command line and trains."""
    train(command_line().parse_args())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
