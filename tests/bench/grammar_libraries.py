"""llguidance and xgrammar on our corpus of schemas, with the 150,000 tokens of tekken: speed and soundness.

Each library gets the schemas as they arrive in requests (without the server's checks and rewrites), compiles them, and
makes masks along random answers. jsonschema checks the answers that end. xgrammar is no dependency: install xgrammar
into a folder, and name the folder in PYTHONPATH. Prints a line per library; writes grammar_libraries.json. Run:
[PYTHONPATH=DIR] python -m tests.bench.grammar_libraries [--schemas 440] [--library NAME] [--out DIR]
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import mistral_common
import numpy as np
import psutil

from tests.bench import targets
from tests.structure_corpus.generate import schema
from tests.structure_corpus.written import ENFORCED, REFUSED

FILE = "grammar_libraries.json"
STEPS, DRAWS = 120, 2


def tokens() -> list[bytes]:
    """The tokens of tekken, followed by an end token."""
    file = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    return [*(base64.b64decode(entry["token_bytes"]) for entry in json.loads(file.read_text())["vocab"]), b"<end>"]


class Llguidance:
    """llguidance, used as in the server."""

    def __init__(self, pieces: list[bytes]) -> None:
        from engine.grammar.vocabulary import GrammarVocabulary

        self.end = len(pieces) - 1
        self.vocabulary = GrammarVocabulary(pieces.__getitem__, lambda number: False, self.end)

    def begin(self, asked: Any) -> Any:
        from engine.grammar.lark import OPTIONS

        matcher = self.vocabulary.matcher(f"{OPTIONS}start: %json {json.dumps(asked)}")
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def mask(self, matcher: Any) -> np.ndarray:
        found = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return found

    def take(self, matcher: Any, token: int) -> bool:
        """Whether the answer continues."""
        assert matcher.consume_token(token)
        return not matcher.is_stopped()


class Xgrammar:
    """xgrammar with its default settings, except strict_mode, which would change the meaning of schemas."""

    def __init__(self, pieces: list[bytes]) -> None:
        try:
            import xgrammar
        except ImportError:
            raise SystemExit("xgrammar is not there: install it into a folder, and name that in PYTHONPATH") from None

        self.end, self.library = len(pieces) - 1, xgrammar
        info = xgrammar.TokenizerInfo(pieces, vocab_size=len(pieces), stop_token_ids=[self.end])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bits = xgrammar.allocate_token_bitmask(1, len(pieces))

    def begin(self, asked: Any) -> Any:
        made = self.compiler.compile_json_schema(json.dumps(asked), any_whitespace=False, strict_mode=False)
        return self.library.GrammarMatcher(made)

    def mask(self, matcher: Any) -> np.ndarray:
        matcher.fill_next_token_bitmask(self.bits)
        return self.bits.numpy().view(np.uint8)[0]

    def take(self, matcher: Any, token: int) -> bool:
        assert matcher.accept_token(token)
        return not matcher.is_terminated()


LIBRARIES: dict[str, Callable[[list[bytes]], Any]] = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def draw(library: Any, matcher: Any, pieces: list[bytes], rng: np.random.Generator, times: list[float]) -> bytes | None:
    """A random answer that tends to end soon; None if it does not end."""
    answer = b""
    for at in range(STEPS):
        begun = time.perf_counter()
        mask = library.mask(matcher)
        times.append(time.perf_counter() - begun)
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: len(pieces)])
        short = ids[ids < 256] if rng.random() < 0.7 else ids  # single bytes reach more states than words do
        closing = [token for token in ids.tolist() if token == library.end or pieces[token] in (b'"', b"}", b"]")]
        hurry = closing and rng.random() < 0.3 + at / STEPS
        token = int(rng.choice(closing if hurry else short if len(short) else ids))
        if token == library.end or not library.take(matcher, token):
            return answer if token == library.end else answer + pieces[token]
        answer += pieces[token]
    return None


def measure(name: str, count: int) -> dict[str, Any]:
    """Measures one library in this process."""
    before = psutil.Process().memory_info().rss
    begun = time.perf_counter()
    pieces = tokens()
    read = time.perf_counter()
    library = LIBRARIES[name](pieces)
    ready = time.perf_counter()
    firsts: list[float] = []
    masks: list[float] = []
    found: Counter[str] = Counter()
    rng = np.random.default_rng(0)
    asked = [*ENFORCED, *(entry for entry, _ in REFUSED), *map(schema, range(count - len(ENFORCED) - len(REFUSED)))]
    formats = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "ipv6", "uuid"])
    for one in asked:
        begun = time.perf_counter()
        try:
            library.mask(library.begin(one))
            firsts.append(time.perf_counter() - begun)
            judge = jsonschema.Draft202012Validator(one, format_checker=formats)
            found[verdict(library, one, judge, pieces, rng, masks)] += 1
        except (ValueError, RuntimeError):
            found["refused"] += 1
    compile_ms, mask_us = np.array(firsts) * 1e3, np.array(masks) * 1e6
    return {
        "schemas": len(asked), **found,
        "first mask ms": {part: round(float(np.percentile(compile_ms, part)), 2) for part in (50, 99)},
        "mask us": {"mean": round(float(mask_us.mean()), 1)}
        | {part: round(float(np.percentile(mask_us, part)), 1) for part in (50, 99)},
        "vocabulary s": round(ready - read, 2),
        "imports transformers": "transformers" in sys.modules,
        "RSS MiB": (psutil.Process().memory_info().rss - before) >> 20,
    }  # fmt: skip


def verdict(
    library: Any, asked: Any, judge: Any, pieces: list[bytes], rng: np.random.Generator, masks: list[float]
) -> str:
    """ "enforced", or "wrong" if an ended answer violates the schema."""
    for _ in range(DRAWS):
        answer = draw(library, library.begin(asked), pieces, rng, masks)
        try:
            if answer is not None and next(judge.iter_errors(json.loads(answer)), None) is not None:
                return "wrong"
        except OverflowError:  # a number beyond the range of floats cannot be checked
            continue
        except Exception:  # the answer is no JSON, or the library should have refused the schema
            return "wrong"
    return "enforced"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", default="llguidance,xgrammar")
    parser.add_argument("--schemas", type=int, default=440)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(measure(args.library, args.schemas)))
        return 0
    for name in args.library.split(","):
        command = [sys.executable, "-m", "tests.bench.grammar_libraries", "--inside", "--library", name]
        done = subprocess.run(
            [*command, "--schemas", str(args.schemas)], stdout=subprocess.PIPE, text=True, check=False
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"crashed": done.returncode}
        print(f"{name}: {found}", flush=True)
        targets.keep(args.out, FILE, name, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
