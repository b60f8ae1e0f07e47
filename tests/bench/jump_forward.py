"""The savings of jump-forward: steps and seconds of answers that follow a schema, with and without it, alternately.

A server of the embedded model (or of --model) answers questions under the schemas of our corpus and under one tool's
schema, one request at a time. Where the grammar allows only one text, a server with jump-forward computes the text in
one step. Prints a line of JSON for each turn: tokens of the answers, steps, and seconds. Run: python -m
tests.bench.jump_forward [--model DIR] [--turns 3]
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai

from examples.embedded_model.blueprint import MODEL_DIR
from tests.end_to_end.process import serving
from tests.structure_corpus.written import ENFORCED

QUESTIONS = (
    "Anna is 31 years old and lives in Oslo. Answer as JSON.",
    "What is the weather in Rome? Answer as JSON.",
    "Ben, 12, is a cook in Paris and likes red boats. Extract as JSON.",
    "Give me 7 + 8 as JSON.",
)
PLAIN = {"type": "string", "maxLength": 12}
TOOL = {
    "type": "object", "additionalProperties": False, "required": ["departure_city", "arrival_city", "passenger_count"],
    "properties": {"departure_city": PLAIN, "arrival_city": PLAIN, "passenger_count": {"enum": [1, 2, 3]}},
}  # fmt: skip


def steps_of(url: str) -> int:
    """Number of the engine's steps since its start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        found = re.search(r"^vllm:steps_total\S* (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def answered(url: str, model: str, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens, steps and seconds of the answers, one answer per schema."""
    tokens, before, begun = 0, steps_of(url), time.perf_counter()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        for at, schema in enumerate(schemas):
            reply = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": QUESTIONS[at % len(QUESTIONS)]}],
                response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
                max_tokens=150,
                temperature=0.7,
                seed=at,
            )
            assert reply.usage is not None
            tokens += reply.usage.completion_tokens
    took = time.perf_counter() - begun
    return {"answers": len(schemas), "tokens": tokens, "steps": steps_of(url) - before, "seconds": round(took, 2)}


def main() -> None:
    """Runs the benchmark and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.turns):
        for mode in ("off", "on"):
            flags = ["--model", str(args.model), "--served-model-name", "m", "--structured-outputs-jump-forward", mode]
            with serving(*flags) as server:
                url = f"http://127.0.0.1:{server.port}"
                answered(url, "m", ENFORCED[:2])
                for name, schemas in (("corpus", ENFORCED), ("tool", [TOOL] * 40)):
                    print(
                        json.dumps({"jump_forward": mode, "schemas": name, **answered(url, "m", schemas)}), flush=True
                    )


if __name__ == "__main__":
    main()
