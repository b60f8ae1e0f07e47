"""The process that reads one pickled weight file and writes its tensors as safetensors; started by `convert`.

`python -m server.start.unpickle TARGET PARENT MEMORY_BYTES SECONDS`: descriptor 0 is the pickled file, TARGET the
descriptor of a new empty file; the reply on descriptor 1 is JSON, {"tensors": n} or {"error": "..."}. Before the
process reads a byte of the file it bounds its memory and its processor time and gives up sockets, programs, other
processes and files except for reading (mm/isolation/fence). Only then torch's restricted unpickler reads the file; it
makes tensors and plain containers and calls nothing else. An archive is checked first, because torch relies on the
sizes in the archive's directory.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import zipfile
from collections import Counter
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.weights.files import DTYPES, MAX_DIMENSIONS, MAX_HEADER_BYTES
from mm.isolation import fence

SOURCE, REPLY = 0, 1  # descriptors
WRAPPED = ("state_dict", "model_state_dict", "model", "module")  # keys under which trainers store the weights
MAX_NAME = 1024
SLACK_BYTES = 1 << 20  # tied tensors are written twice, small ones for each name
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {
    torch.float64: "F64",
    torch.int16: "I16",
    torch.bool: "BOOL",
    torch.float8_e5m2: "F8_E5M2",
}


def checked_archive(source: int) -> Counter[int] | None:
    """Bytes per record -> number of such records; None: not an archive, so the format before torch 1.6.

    Refused: compressed records, records outside the file, and names that appear twice. torch.save writes none.
    """
    records: Counter[int] = Counter()
    names: set[str] = set()
    size = os.fstat(source).st_size
    with open(source, "rb", closefd=False) as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            if file.read(2) == b"PK":
                raise ConfigError("it is the beginning of an archive; download it again")
            return None
        archive = zipfile.ZipFile(file)
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ConfigError(f"its record {printable(entry.filename)} is compressed, which torch.save never does")
            if entry.filename in names:
                raise ConfigError(f"its record {printable(entry.filename)} is there twice")
            if entry.header_offset + entry.file_size > size:
                raise ConfigError(f"its record {printable(entry.filename)} lies outside the file")
            names.add(entry.filename)
            records[entry.file_size] += 1
    if any(name.partition("/")[2].startswith("code/") for name in names):
        raise ConfigError("it is a TorchScript program, not a file of weights")
    return records


def loaded(source: int, records: Counter[int] | None) -> object:
    """The object in the file. An archive is mapped, so that a wrong size can only reach bytes of the file itself."""
    left = Counter(records or {})

    def on_host(storage: Any, _location: str) -> Any:
        if records is not None:
            if not left[storage.nbytes()]:
                raise ConfigError(
                    f"a tensor claims {storage.nbytes():,} bytes, and no record of the archive has so many"
                )
            left[storage.nbytes()] -= 1
        return storage

    if records is None:
        with open(source, "rb", closefd=False) as file:
            file.seek(0)
            return torch.load(file, map_location=on_host, weights_only=True)
    return torch.load(f"/proc/self/fd/{source}", map_location=on_host, weights_only=True, mmap=True)


def tensors_of(found: object) -> dict[str, torch.Tensor]:
    """Name -> tensor, unwrapped from a trainer's checkpoint."""
    for key in WRAPPED:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not any(isinstance(value, torch.Tensor) for value in found.values()):
        raise ConfigError("it holds no dictionary of tensors; only files of weights are converted")
    tensors = {}
    for name, tensor in found.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ConfigError(
                f"a tensor has the name {printable(str(name))}; names are texts of at most {MAX_NAME} characters"
            )
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{printable(name)} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.dtype not in NAMES:
            form = f"{str(tensor.dtype).removeprefix('torch.')}, {str(tensor.layout).removeprefix('torch.')}"
            raise ConfigError(f"{printable(name)} is {form}; written are dense tensors of {', '.join(NAMES.values())}")
        if tensor.dim() > MAX_DIMENSIONS:
            raise ConfigError(f"{printable(name)} has {tensor.dim()} dimensions; at most {MAX_DIMENSIONS} are written")
        tensors[name] = tensor.detach()
    return tensors


def write(tensors: dict[str, torch.Tensor], descriptor: int, most: int) -> None:
    """Writes a safetensors file with at most `most` bytes of tensors; widest values first, so that each is aligned."""
    total = 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for name, tensor in ordered:
        end = total + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [total, end]}
        total = end
    if total > most:
        raise ConfigError(f"its tensors claim {total:,} bytes; of a file of this size at most {most:,} are written")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError(
            f"the names of its tensors take {len(text):,} bytes; at most {MAX_HEADER_BYTES:,} are written"
        )
    with open(descriptor, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def printable(text: str) -> str:
    return ascii(text[:80])


def fence_in(parent: int, memory_bytes: int, seconds: float) -> None:
    """Gives up everything that reading a file does not need; `memory_bytes` come on top of what it has mapped."""
    fence.die_with(parent)
    fence.stand_apart()
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    fence.set_limits(mapped + memory_bytes)
    fence.allow_seconds(seconds)
    if not fence.refuse_calls():
        raise ConfigError(
            "this kernel supports no filter of system calls (seccomp); convert on a Linux machine that does"
        )


def converted(target: int, parent: int, memory_bytes: int, seconds: float) -> dict[str, object]:
    """Reads and writes; the reply."""
    try:
        torch.set_num_threads(1)
        fence_in(parent, memory_bytes, seconds)
        tensors = tensors_of(loaded(SOURCE, checked_archive(SOURCE)))
        write(tensors, target, 2 * os.fstat(SOURCE).st_size + SLACK_BYTES)
        return {"tensors": len(tensors)}
    except ConfigError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"reading it takes more than {memory_bytes:,} bytes of memory"}
    except OSError as error:
        return {"error": f"writing failed: {error.strerror}"}
    except Exception as error:  # whatever torch, zipfile or pickle raise about a file
        if "allocate memory" in str(error):
            return {"error": f"reading it takes more than {memory_bytes:,} bytes of memory"}
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return {"error": f"torch cannot read it: {ascii(first[:300])[1:-1]}"}


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    os.write(REPLY, json.dumps(converted(numbers[0], numbers[1], numbers[2], numbers[3])).encode())
    os._exit(0)  # nothing that the file made is finalised
