"""The safetensors files of a checkpoint: finds the files and checks their headers before any weight is used.

In: a folder. Out: Shards, each with the names, shapes and dtypes of its tensors; tensors are views of a private memory
map. Pickled weights are never opened. With a shard index, a tensor counts only in the file that the index names.
Without one, files of any other name are the weights; Mistral's consolidated files come before them. Their tensors, and
those of a GGUF file (weights/gguf), get transformers' names.
Thread: any; used by one thread at a time.
"""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.checkpoint.files import CONFIG, POINTER, head_dim, read_json, refuse_pointer
from engine.checkpoint.pooling_tasks import FOLDERS, JINA_V3
from engine.checkpoint.pooling_tokens import COLBERT, SPARSE
from engine.weights import consolidated
from engine.weights.gguf import GGUF, Gguf, GgufReader, read_gguf
from engine.weights.names import compact
from engine.weights.table import Shape

MAX_HEADER_BYTES = 104_857_600
MAX_DIMENSIONS, MAX_SIZE = 16, 2**40  # limits of a tensor, because the file's size bounds nothing if a dimension is 0
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
OF_ADAPTERS = re.compile(r"\.lora_(embedding_)?[AB]\b")  # matches names of adapters' tensors
CONSOLIDATED = "consolidated*.safetensors"
CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"
NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
NOT_OF_THE_MODEL = (ADAPTER, *(f"{name}.safetensors" for name in (SPARSE, COLBERT)))
PICKLED = (".bin", ".pt", ".pth", ".ckpt")  # suffixes
# Dtype name of the format -> bytes per value.
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
# The supported dtypes of weights, codes and scales.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file's header describes it."""

    shape: Shape
    dtype: str  # the format's name: F32, BF16 ...
    num_bytes: int
    begin: int  # where its bytes start in the file


Header = Callable[[str], dict[str, TensorInfo]]  # file name -> the file's tensors, in file order


@dataclass(frozen=True, slots=True)
class Shard:
    """One file and the tensors in it, in file order."""

    path: Path
    tensors: dict[str, TensorInfo]
    names: dict[str, str] | None = None  # consolidated files: name in `tensors` -> name in the file
    rotated: dict[str, int] = field(default_factory=dict)  # consolidated files: query and key tensors -> head_dim
    gguf: Gguf | None = None  # set for a GGUF file

    def arranged(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the file with its rows in the kernels' order; a copy if rows are reordered."""
        head = self.rotated.get(name)
        return tensor if head is None else consolidated.half_split(tensor, head)

    @contextmanager
    def open(self) -> Iterator[Reader | GgufReader]:
        """Maps the file; tensors read from it stay valid as long as they are referenced."""
        if self.gguf is not None:
            with self.gguf.open() as reader:
                yield reader
            return
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:
                yield Reader(file, self)
        except SafetensorError as error:
            raise ConfigError(f"{self.path} cannot be read: {error}") from None


class Reader:
    """An open shard."""

    __slots__ = ("_file", "_shard")

    def __init__(self, file: object, shard: Shard) -> None:
        self._file = file
        self._shard = shard

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file; a copy if rows are reordered."""
        names = self._shard.names
        tensor = self._file.get_tensor(name if names is None else names[name])  # type: ignore[attr-defined]
        return self._shard.arranged(name, tensor)


def open_checkpoint(folder: str | Path) -> list[Shard]:
    """The shards of a folder, with checked headers; ConfigError if there are none or a shard is damaged."""
    folder = Path(folder)
    present = {path.name for path in folder.iterdir() if path.is_file()}
    present |= {path.relative_to(folder).as_posix() for path in folder.glob(f"*/{ADAPTER}")}
    return shards_of(folder, present, lambda file: read_header(folder / file))


def shards_of(folder: Path, present: Collection[str], header: Header) -> list[Shard]:
    """The shards of a checkpoint whose files may be elsewhere: `present`: all file names; `header`: reads a header.

    Indexes and configurations are read from `folder`.
    """
    found_adapters = adapter_files(folder, present).items()
    adapters = [_adapter(Shard(folder / file, header(file)), name) for file, name in found_adapters]
    if SINGLE in present:
        return [Shard(folder / SINGLE, header(SINGLE)), *adapters]
    if INDEX in present:
        return [*_indexed(folder, INDEX, present, header), *adapters]
    if GGUF in present:
        return [_of_gguf(folder / GGUF)]
    if CONSOLIDATED_INDEX in present:
        return _renamed(_indexed(folder, CONSOLIDATED_INDEX, present, header), folder)
    if found := sorted(name for name in present if fnmatch.fnmatchcase(name, CONSOLIDATED)):
        return _renamed([Shard(folder / name, header(name)) for name in found], folder)
    if found := unindexed(folder, present):
        return [*_separate([Shard(folder / name, header(name)) for name in found]), *adapters]
    raise ConfigError(
        f"{folder} holds no weights: neither {SINGLE}, {INDEX}, {CONSOLIDATED} nor another .safetensors file"
        f"{_instead(folder)} (--load-format dummy draws random weights)"
    )


def unindexed(folder: Path, present: Collection[str]) -> list[str]:
    """The weight files of a folder without an index: numbered shards, which must be complete, or files of any name."""
    files = sorted(
        name for name in present if name.endswith(".safetensors") and "/" not in name and name not in NOT_OF_THE_MODEL
    )
    numbered = [match for name in files if (match := NUMBERED.fullmatch(name))]
    if len(numbered) < len(files) or not files:
        return files
    count = int(numbered[0]["count"])
    wanted = [f"{numbered[0]['stem']}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if missing := [name for name in wanted if name not in files]:
        raise ConfigError(f"{folder} lacks {compact(missing)} of {count} numbered files; download the checkpoint again")
    if len(files) > count:
        raise ConfigError(
            f"{folder} holds several checkpoints: {compact(files)}; leave one of them, or its {INDEX}, in the folder"
        )
    return files


def _separate(shards: list[Shard]) -> list[Shard]:
    """The shards, none of whose tensors is in two files."""
    owners: dict[str, Path] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in owners:
                raise ConfigError(
                    f"{shard.path} and {owners[name].name} both hold {name}, and no {INDEX} says which one counts; "
                    "remove the file that does not belong to the model"
                )
        owners |= dict.fromkeys(shard.tensors, shard.path)
    return shards


def adapter_files(folder: Path, present: Collection[str]) -> dict[str, str]:
    """File -> adapter's name, for the adapters that belong to the model; other adapters are not read.

    Either a single unnamed adapter is next to the weights ("has_lora_adapter"), or each adapter has a folder and a
    name.
    """
    config = read_json(folder / CONFIG, required=False)
    files = {ADAPTER: ""} if config.get("has_lora_adapter") is True else {}
    if config.get("model_type") == "phi4_multimodal":
        files = {f"{name}-lora/{ADAPTER}": name for name in ("vision", "speech")}
    elif config.get("model_type") == JINA_V3:
        files = {f"{name}/{ADAPTER}": name for name in FOLDERS.values()}
    return {file: name for file, name in files.items() if file in present}


def _adapter(shard: Shard, name: str) -> Shard:
    """The shard with the adapter's name inserted into its tensors' names: lora_A.weight -> lora_A.NAME.weight.

    An embedding table's tensors become lora_embedding_A.NAME.
    """
    if not name:
        return shard
    names = {
        OF_ADAPTERS.sub(rf"\g<0>.{name}", original.removeprefix("base_model.model.")): original
        for original in shard.tensors
    }
    return Shard(shard.path, {new: shard.tensors[original] for new, original in names.items()}, names)


def _instead(folder: Path) -> str:
    """The hint for a folder without safetensors: which files it has and how to convert them."""
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLED)
    if not pickled:
        return "; name a GGUF file itself: --model FOLDER/NAME.gguf" if any(folder.glob("*.gguf")) else ""
    return (
        f"; {', '.join(pickled)} can hold code and is never read by the server: `python -m server convert {folder}` "
        "writes safetensors from it, in a process of its own"
    )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one file; every range is checked against the file's size."""
    with path.open("rb") as file:
        return header_of(file, path)


def header_of(file: IO[bytes] | io.FileIO, path: Path) -> dict[str, TensorInfo]:
    """The same of an open file, which is read from its start; `path`: its name in errors."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        raise ConfigError(f"{path} is empty; download the checkpoint again")
    refuse_pointer(path, file.read(len(POINTER)))
    file.seek(0)
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ConfigError(
            f"{path}: the header claims {length} bytes of a file of {size}; at most {MAX_HEADER_BYTES} are read"
        )
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: the header must be a JSON object")
    header.pop("__metadata__", None)
    found = checked(path, header, 8 + length, size)
    end = max((info.begin + info.num_bytes for info in found.values()), default=8 + length)
    if end < size:
        raise ConfigError(f"{path}: {size - end} bytes lie behind the last tensor; download the checkpoint again")
    return found


def checked(path: Path, header: dict[str, Any], data_start: int, file_bytes: int) -> dict[str, TensorInfo]:
    """The entries of a header, in file order, checked to be contiguous: each tensor begins where the previous one
    ends."""
    found, end = {}, data_start
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        found[name] = info = _entry(path, name, entry, data_start, file_bytes)
        if info.begin != end:
            raise ConfigError(
                f"{path}: {name} begins at byte {info.begin - data_start} of the data, and the tensor in front ends at "
                f"{end - data_start}; download the checkpoint again"
            )
        end += info.num_bytes
    return found


def _offsets(path: Path, name: str, entry: object) -> tuple[int, int]:
    try:
        begin, end = entry["data_offsets"]  # type: ignore[index]
        return int(begin), int(end)
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        raise ConfigError(f"{path}: the header's entry of {name} is damaged") from None


def _entry(path: Path, name: str, entry: dict, data_start: int, file_bytes: int) -> TensorInfo:
    data_bytes = file_bytes - data_start
    try:
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
        dtype = str(entry["dtype"])
    except (TypeError, KeyError, ValueError, OverflowError):
        raise ConfigError(f"{path}: the header's entry of {name} is damaged") from None
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) > MAX_SIZE:
        raise ConfigError(
            f"{path}: {name} has {len(shape)} dimensions, the largest of {max(shape)}; at most {MAX_DIMENSIONS} of at "
            f"most {MAX_SIZE} are read: download the checkpoint again"
        )
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{path}: {name} has dtype {dtype}; known are {', '.join(DTYPE_BYTES)}")
    num_bytes = DTYPE_BYTES[dtype]
    for size in shape:
        num_bytes *= size
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= data_bytes or end - begin != num_bytes:
        raise ConfigError(
            f"{path}: {name} {dtype}{list(shape)} takes {num_bytes} bytes, "
            f"but its range is {begin}..{end} of {data_bytes}"
        )
    return TensorInfo(shape, dtype, num_bytes, data_start + begin)


def _of_gguf(path: Path) -> Shard:
    found = read_gguf(path)
    entries = {
        name: TensorInfo(entry.shape, entry.dtype, entry.num_bytes, entry.stored.begin)
        for name, entry in found.entries().items()
    }
    return Shard(path, entries, gguf=found)


def _renamed(shards: list[Shard], folder: Path) -> list[Shard]:
    """Consolidated shards with transformers' names."""
    shapes = {name: info.shape for shard in shards for name, info in shard.tensors.items()}
    for name in filter(consolidated.is_rotated, shapes):
        consolidated.check_lines(name, shapes)
    return [_in_our_names(shard, folder) for shard in shards]


def _in_our_names(shard: Shard, folder: Path) -> Shard:
    names = {consolidated.canonical(name): name for name in shard.tensors}
    tensors = {name: shard.tensors[original] for name, original in names.items()}
    rotated = {
        name: head_dim(folder, consolidated.is_tower(original))
        for name, original in names.items()
        if consolidated.is_rotated(original)
    }
    return Shard(shard.path, tensors, names, rotated)


def _indexed(folder: Path, index: str, present: Collection[str], header: Header) -> list[Shard]:
    path = folder / index
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        owners = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from None
    shards = []
    for file in sorted(set(owners.values())):
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise ConfigError(f"{path} names {file!r}; only .safetensors files beside it are read")
        if file not in present:
            raise ConfigError(f"{path} names {file}, which is missing; download the checkpoint again")
        tensors = header(file)
        misplaced = [name for name in tensors if owners.get(name) != file]
        absent = [name for name, owner in owners.items() if owner == file and name not in tensors]
        if misplaced or absent:
            said = [f"not in the index: {compact(misplaced)}"] if misplaced else []
            said += [f"only in the index: {compact(absent)}"] if absent else []
            raise ConfigError(f"{folder / file} and {index} disagree; {'; '.join(said)}")
        shards.append(Shard(folder / file, tensors))
    return shards
