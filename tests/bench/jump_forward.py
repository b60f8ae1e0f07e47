"""What jump-forward would save: steps of answers that follow a schema, where the grammar leaves nothing to choose.

A server of the embedded model (or of --model) answers questions under the schemas of our corpus; each answer's tokens
are walked again, and at each place the grammar says which bytes must follow. A run of k forced tokens would be appended
as known in the place of k steps; the sample in flight is dropped, so k - 1 steps are saved. The same answers are walked
in tekken's 130,000 tokens too, where a property's name is one or two tokens. Prints both; results/README.md decides.
Run: python -m tests.bench.jump_forward [--model DIR] [--draws 4]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mistral_common
import openai
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from engine.grammar.compile import compile_now
from engine.grammar.spec import GrammarSpec
from engine.grammar.vocabulary import GrammarVocabulary
from examples.embedded_model.blueprint import MODEL_DIR
from examples.embedded_model.teach_tools import NAME, served
from server.config import LimitsConfig
from server.render.load_tokenizer import load_tokenizer
from server.structure import schema_text
from tests.bench.grammar_libraries import tokens as pieces
from tests.structure_corpus.written import ENFORCED

QUESTIONS = (
    "Anna is 31 years old and lives in Oslo. Answer as JSON.",
    "What is the weather in Rome? Answer as JSON.",
    "Ben, 12, is a cook in Paris and likes red boats. Extract as JSON.",
    "Give me 7 + 8 as JSON.",
)


def answers(url: str, draws: int) -> list[tuple[dict[str, Any], list[int]]]:
    """(schema, tokens) of the answers that ended by themselves."""
    found = []
    with openai.OpenAI(base_url=url, api_key="none", timeout=120) as client:
        for schema in ENFORCED:
            for at in range(draws):
                reply = client.chat.completions.create(
                    model=NAME,
                    messages=[{"role": "user", "content": QUESTIONS[at % len(QUESTIONS)]}],
                    response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
                    max_tokens=150,
                    temperature=0.7,
                    seed=at,
                    extra_body={"return_token_ids": True},
                )
                choice: Any = reply.choices[0]
                if choice.finish_reason == "stop":
                    found.append((schema, list(choice.token_ids)))
    return found


def runs(
    vocabulary: GrammarVocabulary, token_bytes: list[bytes], schema: dict[str, Any], tokens: list[int]
) -> list[int]:
    """Lengths of the runs of tokens that the grammar forces, two at least."""
    spec = GrammarSpec("schema", schema_text(schema, "schema", LimitsConfig()))
    matcher, found, at = compile_now(spec, vocabulary).matcher(), [], 0
    while at < len(tokens):
        forced, count = len(matcher.compute_ff_bytes()), 0
        while at + count < len(tokens) and 0 < len(token_bytes[tokens[at + count]]) <= forced:
            forced -= len(token_bytes[tokens[at + count]])
            count += 1
        if count > 1:
            found.append(count)
        for token in tokens[at : at + max(1, count)]:
            if not matcher.consume_token(token):
                return found
        at += max(1, count)
    return found


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--draws", type=int, default=4)
    args = parser.parse_args()
    with served(args.model) as url:
        asked = answers(url, args.draws)
    known = load_tokenizer(args.model)
    special = set(known.added_tokens.values())
    own = [b"" if token in special else known.token_bytes(token) for token in range(known.vocab_size)]
    asked = [(schema, [token for token in tokens if own[token]]) for schema, tokens in asked]
    large = Tekkenizer.from_file(str(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"))
    first = large.num_special_tokens
    again = [
        (schema, [token - first for token in large.encode(known.decode(tokens), bos=False, eos=False)])
        for schema, tokens in asked
    ]
    print(
        json.dumps(
            {"the model's own tokens": saved(own, asked), "the same texts in tekken": saved(pieces()[:-1], again)},
            indent=1,
        )
    )


def saved(token_bytes: list[bytes], asked: list[tuple[dict[str, Any], list[int]]]) -> dict[str, float]:
    """Counts of all answers in one vocabulary."""
    vocabulary = GrammarVocabulary(token_bytes.__getitem__, lambda token: not token_bytes[token], len(token_bytes))
    steps = sum(len(tokens) for _, tokens in asked)
    found = [length for schema, tokens in asked for length in runs(vocabulary, token_bytes, schema, tokens)]
    return {
        "vocabulary": len(token_bytes), "answers": len(asked), "steps": steps, "runs": len(found),
        "forced": round(sum(found) / steps, 4), "saved": round((sum(found) - len(found)) / steps, 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
