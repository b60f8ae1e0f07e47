"""The exchange between GPUs of one host: time per exchange with residual and norm, in a graph per GPU.

One thread launches everything. Each line is one size: microseconds of our kernels by the way that `launch_exchange`
takes, of NCCL's sum alone, whether all ranks have the reference's bits, and the rate (bytes of the rows by the time).
Run on a machine with two or more GPUs that reach each other's memory (gpu_parallel runs this file too, with models):

    python -m tests.bench.gpu_exchange --gpus 2 [--out DIR] [--width 8192] [--through-host]

--through-host: with rooms in host memory, as on GPUs without peer access.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
from torch import Tensor

from engine.kernels.parallel.exchange import exchange_reference, launch_exchange
from engine.kernels.parallel.room import FAILED, ExchangeRoom, RoomLayout, make_rooms

KILOBYTES = [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536]
# GPUs -> kilobytes up to which an exchange with residual and norm has a limit; the limit in us; GB/s at 64 MB, 0: none
LIMITS = {2: (64, 4.5, 300.0), 4: (32, 5.5, 0.0)}
FLOOR_US = 1.0
REPEATS = 7


def of_host(size: int) -> Tensor:
    """Memory that all GPUs address."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


class Ranks:
    """A stream, a room and the largest tensors of each GPU."""

    def __init__(self, gpus: int, width: int, rows: int, through_host: bool) -> None:
        self.gpus, self.width = gpus, width
        self.devices = [torch.device("cuda", number) for number in range(gpus)]
        for device in self.devices:
            for other in self.devices:
                torch.zeros(8, device=device).to(other)  # opens peer access
        self.error = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.rooms: list[ExchangeRoom] = make_rooms(
            RoomLayout(gpus, rows, width, torch.bfloat16), self.devices, self.error, of_host if through_host else None
        )
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        weight = torch.rand(width, generator=torch.Generator().manual_seed(0))
        self.weight = [weight.to(device) for device in self.devices]

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def load(self, parts: list[Tensor], residuals: list[Tensor], outs: list[Tensor]) -> None:
        """Loads the kernels on every GPU before any waits: a module that is loaded behind a waiting kernel hangs."""
        fresh = make_rooms(self.rooms[0].layout, self.devices, self.error)
        for room in self.rooms:
            room.state()[FAILED] = 1
        self.wait()
        for rank in range(self.gpus):
            with torch.cuda.stream(self.streams[rank]):
                self.launch(rank, parts, residuals, outs)
            self.wait()
        for room, empty in zip(self.rooms, fresh):
            room.memory.copy_(empty.memory)
        self.wait()
        self.error.zero_()

    def launch(self, rank: int, parts: list[Tensor], residuals: list[Tensor], outs: list[Tensor]) -> None:
        launch_exchange(self.rooms[rank], parts[rank], residuals[rank], self.weight[rank], 1e-6, outs[rank])


def measured(ranks: Ranks, rows: int) -> dict[str, Any]:
    """One size: correctness of one exchange, then the time of graphs of many."""
    draws = [torch.randn(rows, ranks.width).bfloat16() for _ in ranks.devices]
    parts = [draw.to(device) for draw, device in zip(draws, ranks.devices)]
    residual = torch.randn(rows, ranks.width).bfloat16()
    residuals = [residual.to(device) for device in ranks.devices]
    outs = [torch.empty_like(part) for part in parts]
    ranks.load(parts, residuals, outs)
    for rest in residuals:
        rest.copy_(residual)
    ranks.wait()
    for rank in range(ranks.gpus):
        with torch.cuda.stream(ranks.streams[rank]):
            ranks.launch(rank, parts, residuals, outs)
    ranks.wait()
    exchange_reference(draws, residual)
    right = all(torch.equal(rest.cpu(), residual) for rest in residuals) and ranks.error.item() == 0
    right &= all(torch.equal(out.cpu(), outs[0].cpu()) for out in outs)
    for part in parts:
        part.zero_()  # so that the residual does not grow over thousands of exchanges
    count = 100 if rows * ranks.width <= 1 << 20 else 10
    graphs = []
    for rank in range(ranks.gpus):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for _ in range(count):
                ranks.launch(rank, parts, residuals, outs)
        graphs.append(graph)
    ours = time_of(ranks, lambda rank: graphs[rank].replay()) / count
    nccl = nccl_time(ranks, parts)
    size = rows * ranks.width * 2
    return {
        "gpus": ranks.gpus,
        "kilobytes": size >> 10,
        "right": right,
        "microseconds": round(ours, 2),
        "gigabytes_per_second": round(size / ours / 1e3, 1),
        "nccl_microseconds": round(nccl, 1),
    }


def time_of(ranks: Ranks, launch: Callable[[int], None]) -> float:
    """Microseconds from the first start to the last end on the slowest GPU, the median of several runs."""
    found = []
    for _ in range(REPEATS):
        events = []
        for rank in range(ranks.gpus):
            with torch.cuda.stream(ranks.streams[rank]):
                begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begun.record()
                launch(rank)
                ended.record()
            events.append((begun, ended))
        ranks.wait()
        # A later rank's time has no wait for the launches of others in it, so the shortest is the exchange's own.
        found.append(min(begun.elapsed_time(ended) for begun, ended in events) * 1e3)
    return statistics.median(found)


def nccl_time(ranks: Ranks, parts: list[Tensor]) -> float:
    """Microseconds of NCCL's sum of the same rows, launched eagerly, several in a row."""
    times = []
    for _ in range(REPEATS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(0):
            begun.record()
            for _ in range(10):
                torch.cuda.nccl.all_reduce(parts)
            ended.record()
        ranks.wait()
        times.append(begun.elapsed_time(ended) * 100)
    return statistics.median(times)


def lines(gpus: int, width: int, through_host: bool = False) -> Iterator[dict[str, Any]]:
    """One line per size, from small to large, as soon as it is measured."""
    ranks = Ranks(gpus, width, max(KILOBYTES) * 1024 // (2 * width), through_host)
    for kilobytes in KILOBYTES:
        if size := kilobytes * 512 // width:
            line = measured(ranks, size)
            yield {**line, **judged(line)}


def judged(line: dict[str, Any]) -> dict[str, Any]:
    """What an exchange must reach, and whether it does."""
    largest, microseconds, rate = LIMITS.get(line["gpus"], (0, 0.0, 0.0))
    if line["kilobytes"] <= largest:
        met = line["microseconds"] <= microseconds
        return {"floor": FLOOR_US, "must": microseconds, "met": line["right"] and met}
    if line["kilobytes"] == max(KILOBYTES) and rate:
        met = line["gigabytes_per_second"] >= rate and line["microseconds"] <= line["nccl_microseconds"]
        return {"must": f"{rate} GB/s, NCCL's time", "met": line["right"] and met}
    return {"must": None, "met": line["right"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--through-host", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    there = torch.cuda.device_count()
    if not 2 <= given.gpus <= there:
        raise SystemExit(f"--gpus {given.gpus}: this machine has {there}; at least 2 are needed")
    found = []
    for line in lines(given.gpus, given.width, given.through_host):
        print(line, flush=True)
        found.append(line)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "exchange.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
