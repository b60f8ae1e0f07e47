"""A GGUF file: its metadata ("facts") and its tensors, under transformers' names, with a checked header.

In: a path. Out: facts by name, and tensors in the form of weights/files: quantised matrices as bytes [N, line] with
the block type as tensor kind (weights/ggml_blocks), other tensors as "weight" and "bias". Embeddings are widened to
float32 while they are read; a tied head uses the codes. In llama.cpp's files the rows of a rotary pair of Llama's
queries and keys are adjacent, so these rows are reordered, as in Mistral's own files (weights/consolidated).
Thread: any; used by one thread at a time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.weights import rows
from engine.weights.ggml_blocks import BLOCKS, codes_of, line_bytes

GGUF = "model.gguf"
MAX_HEADER_BYTES = 256 << 20
MAX_COUNT = 1 << 22  # most items of an array; vocabularies have fewer tokens
MAX_TENSORS = 1 << 16
MAX_PIECES = 1000
ALIGNMENT = 32  # bytes; of files without general.alignment
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Suffix of a fact's name -> (types, whether the fact is a list).
KINDS: dict[str, tuple[tuple[type, ...], bool]] = {
    "general.architecture": ((str,), False),
    "tokenizer.ggml.model": ((str,), False),
    "tokenizer.ggml.pre": ((str,), False),
    "_token_id": ((int,), False),
    "tokenizer.ggml.tokens": ((str,), True),
    "tokenizer.ggml.merges": ((str,), True),
    "tokenizer.ggml.token_type": ((int,), True),
    "tokenizer.ggml.scores": ((float, int), True),
}
# ggml_type -> name: supported types, and other types for the error text.
FLOATS = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
CODES = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    20: "iq4_nl", 23: "iq4_xs",
}  # fmt: skip
OTHERS = {
    10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
FREQUENCIES = "rope_freqs.weight"  # in Llama 3's files; weights/gguf_config reads it
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ROTATED = re.compile(r"self_attn\.[qk]_proj\.")
LINES = 4096  # rows of an embedding that are widened at a time


class Stored(NamedTuple):
    """A tensor in the file."""

    type: int  # ggml_type
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    piece: int = 0  # the number of its file, of a model in several files


class Entry(NamedTuple):
    """A tensor in the form of weights/files."""

    stored: Stored
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int  # bytes in the file


@dataclass(frozen=True, slots=True)
class Gguf:
    """The header of a GGUF file, or of all files of a model in several."""

    path: Path
    facts: dict[str, Any]
    tensors: dict[str, Stored]
    paths: tuple[Path, ...]  # `path`, then the other files in their order

    @property
    def architecture(self) -> str:
        return str(self.facts.get("general.architecture"))

    def fact(self, name: str, default: Any = None) -> Any:
        """A fact of the architecture, or the default; ConfigError if both are missing."""
        found = self.facts.get(f"{self.architecture}.{name}", default)
        if found is None:
            raise ConfigError(f"{self.path}: {self.architecture}.{name} is missing; convert the model again")
        return found

    def count(self, name: str, default: int | None = None) -> int:
        """A fact that is a whole number above 0."""
        found = self.fact(name, default)
        if not isinstance(found, int) or found <= 0:
            raise ConfigError(f"{self.path}: {self.architecture}.{name}={found!r}; a number above 0 is read")
        return found

    @property
    def head_dim(self) -> int:
        width = self.count("embedding_length") // self.count("attention.head_count")
        return self.count("attention.key_length", width)

    def entries(self) -> dict[str, Entry]:
        """Entries by transformers' names, in file order."""
        found: dict[str, Entry] = {}
        for name, stored in self.tensors.items():
            if name == FREQUENCIES:
                continue
            module, kind = canonical(name)
            if stored.type in FLOATS:
                found[f"{module}.{kind}"] = Entry(stored, stored.shape, FLOATS[stored.type][0], stored.num_bytes)
                continue
            line = line_bytes(CODES[stored.type], stored.shape[1])
            coded = Entry(stored, (stored.shape[0], line), "U8", stored.num_bytes)
            if module == EMBEDDING:
                found[f"{module}.weight"] = Entry(stored, stored.shape, "F32", stored.num_bytes)
                if "output.weight" not in self.tensors:
                    found[f"{HEAD}.{CODES[stored.type]}"] = coded
            else:
                found[f"{module}.{CODES[stored.type]}"] = coded
        return found

    @contextmanager
    def open(self) -> Iterator[GgufReader]:
        """Maps the files."""
        mapped = [
            torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8) for path in self.paths
        ]
        yield GgufReader(self, mapped)

    def floats(self, name: str) -> Tensor:
        """A tensor of floats, by its name in the file."""
        with self.open() as reader:
            return reader.stored(self.tensors[name]).clone()


class GgufReader:
    """An open file."""

    __slots__ = ("_entries", "_file", "_mapped")

    def __init__(self, file: Gguf, mapped: list[Tensor]) -> None:
        self._file, self._mapped, self._entries = file, mapped, file.entries()

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file; a copy if rows are reordered, and for embeddings."""
        entry = self._entries[name]
        found = self.stored(entry.stored)
        if entry.dtype == "F32" and entry.stored.type in CODES:
            kind = CODES[entry.stored.type]
            return torch.cat([codes_of(kind, some).dense().float() for some in found.split(LINES)])
        if self._file.architecture == "llama" and ROTATED.search(name):
            return rows.half_split(found, self._file.head_dim, self._file.head_dim)
        return found

    def stored(self, stored: Stored) -> Tensor:
        """The stored tensor: floats in their shape, codes as rows of bytes."""
        raw = self._mapped[stored.piece][stored.begin : stored.begin + stored.num_bytes]
        if stored.type in FLOATS:
            return raw.view(FLOATS[stored.type][1]).view(stored.shape)
        return raw.view(stored.shape[0], -1)


def canonical(name: str) -> tuple[str, str]:
    """transformers' module and kind of a tensor; an unknown name stays unchanged and is reported as left over."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}", parts[3]
    module, _, kind = name.rpartition(".")
    return WHOLE.get(module, module), kind


class _Cursor:
    """Reads the header's bytes in order."""

    def __init__(self, path: Path, raw: memoryview) -> None:
        self.path, self.raw, self.at = path, raw, 0

    def number(self, code: str) -> Any:
        (found,) = self.take(f"<{code}")
        return found

    def take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        if self.at + size > len(self.raw):
            raise self.damaged("ends inside its header")
        found = struct.unpack_from(form, self.raw, self.at)
        self.at += size
        return found

    def text(self) -> str:
        size = self.number("Q")
        if size > len(self.raw) - self.at:
            raise self.damaged(f"claims a text of {size} bytes")
        self.at += size
        return bytes(self.raw[self.at - size : self.at]).decode("utf-8", "replace")

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY or nested:
            if kind not in SCALARS:
                raise self.damaged(f"has a value of type {kind}")
            return self.number(SCALARS[kind])
        below, count = self.number("I"), self.number("Q")
        if count > MAX_COUNT:
            raise self.damaged(f"claims a list of {count} values; at most {MAX_COUNT} are read")
        if below in SCALARS:
            return list(self.take(f"<{count}{SCALARS[below]}"))
        return [self.value(below, nested=True) for _ in range(count)]

    def damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} {what}: fetch it again, or convert the model again")


def read_gguf(path: Path) -> Gguf:
    """The header of a model in one file, or in several of which `path` is the first."""
    first = read_piece(path)
    count, number = first.facts.get("split.count", 1), first.facts.get("split.no", 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_PIECES or not isinstance(number, int):
        raise ConfigError(f"{path} is piece {number!r} of {count!r}; at most {MAX_PIECES} are read")
    if count <= 1:
        return first
    if number != 0:
        raise ConfigError(f"{path} is piece {number + 1} of {count}: name the first, {piece_path(path, 1, count).name}")
    tensors, paths = dict(first.tensors), [path]
    for at in range(1, count):
        other = piece_path(path, at + 1, count)
        if not other.is_file():
            raise ConfigError(f"{path} is the first of {count} pieces, and there is no {other.name} in its folder")
        piece = read_piece(other, first.facts.get("general.alignment", ALIGNMENT))
        if (piece.facts.get("split.no"), piece.facts.get("split.count")) != (at, count):
            raise ConfigError(f"{other} is not piece {at + 1} of {count}: fetch all pieces again, or split again")
        if twice := tensors.keys() & piece.tensors.keys():
            raise ConfigError(f"{other} has {min(twice)}, which an earlier piece has too: split the model again")
        tensors |= {name: stored._replace(piece=at) for name, stored in piece.tensors.items()}
        paths.append(other)
    if len(tensors) != first.facts.get("split.tensors.count", len(tensors)):
        total = first.facts["split.tensors.count"]
        raise ConfigError(f"{path}: its pieces have {len(tensors)} tensors of {total!r}: split the model again")
    return Gguf(path, first.facts, tensors, tuple(paths))


def piece_path(path: Path, number: int, count: int) -> Path:
    """The path of a piece, counted from 1, of the model whose first or only known file is `path`."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return path.with_name(f"{stem}-{number:05d}-of-{count:05d}{path.suffix}")


def read_piece(path: Path, alignment: Any = None) -> Gguf:
    """The header of one file; every range is checked against the file's size.

    `alignment`: that of a model's first piece, for a piece that does not repeat it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(path, memoryview(file.read(min(size, MAX_HEADER_BYTES))))
    magic, version = cursor.take("<4sI")
    if magic != b"GGUF" or version not in (2, 3):
        raise ConfigError(f"{path} is no GGUF file of version 2 or 3: convert the model again")
    num_tensors, num_facts = cursor.take("<QQ")
    if num_tensors > MAX_TENSORS or num_facts > MAX_TENSORS:
        raise cursor.damaged(f"claims {num_tensors} tensors and {num_facts} facts; at most {MAX_TENSORS} are read")
    facts = {}
    for _ in range(num_facts):
        name = cursor.text()
        facts[name] = _checked(cursor, name, cursor.value(cursor.number("I")))
    described = [_described(cursor) for _ in range(num_tensors)]
    alignment = facts.get("general.alignment", ALIGNMENT if alignment is None else alignment)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise cursor.damaged(f"has general.alignment={alignment!r}; a multiple of 8 is read")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: stored._replace(begin=start + stored.begin) for name, stored in described}
    for name, stored in tensors.items():
        if stored.begin % 8 or stored.begin + stored.num_bytes > size:
            raise cursor.damaged(f"has {size} bytes, and {name} at {stored.begin} takes {stored.num_bytes}")
    return Gguf(path, facts, tensors, (path,))


def _checked(cursor: _Cursor, name: str, value: Any) -> Any:
    """A fact, checked to have the type that KINDS gives for its name."""
    kind = next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)
    if kind is None:
        return value
    types, listed = kind
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) != listed or not all(isinstance(each, types) for each in values):
        said = "a list of" if listed else "one"
        raise cursor.damaged(f"has as {name} something else than {said} {' or '.join(each.__name__ for each in types)}")
    return value


def _described(cursor: _Cursor) -> tuple[str, Stored]:
    name, dims = cursor.text(), cursor.number("I")
    if not name.isprintable():
        raise cursor.damaged(f"has a tensor by the name {name!a}")
    if not 1 <= dims <= 4:
        raise cursor.damaged(f"has {name} of {dims} dimensions")
    shape = tuple(reversed(cursor.take(f"<{dims}Q")))
    kind, begin = cursor.take("<IQ")
    count = 1
    for side in shape:
        count *= side
    if kind in FLOATS:
        return name, Stored(kind, shape, begin, count * FLOATS[kind][1].itemsize)
    if kind not in CODES or dims != 2:
        read = ", ".join([*(name for name, _ in FLOATS.values()), *(each.upper() for each in BLOCKS)])
        said = f"{CODES[kind]} of {dims} dimensions" if kind in CODES else OTHERS.get(kind, f"of type {kind}")
        raise ConfigError(
            f"{cursor.path}: {name} is {said}; read are matrices in {read}: take a file in Q4_K_M, Q4_0, Q6_K or Q8_0, "
            "or convert it by llama-quantize"
        )
    return name, Stored(kind, shape, begin, shape[0] * line_bytes(CODES[kind], shape[1]))
