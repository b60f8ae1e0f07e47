"""The operations of decisions, and of scores of tokens, for /openapi.json."""

from __future__ import annotations

from server.dialects.decisions.schema import (
    Decisions,
    DecisionsBody,
    LabelScoreBody,
    LabelScores,
    SystemOne,
    SystemOneBody,
)
from server.openapi import Operation, work
from server.schema.answers_pooling import ScoreList

SCORES = "Scores of pairs; of a model that generates: probabilities of given tokens"
SCORED = ScoreList | LabelScores
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/systemone"): work(
        "create_systemone", "Decisions", "Answer typed questions about a state by probabilities", SystemOneBody,
        SystemOne,
    ),
    ("POST", "/v1/decisions"): work(
        "create_decision", "Decisions", "The same in OpenAI's protocol", DecisionsBody, Decisions
    ),
    ("POST", "/score"): work("score", "Embeddings", SCORES, LabelScoreBody, SCORED),
    ("POST", "/v1/score"): work("score_v1", "Embeddings", SCORES, LabelScoreBody, SCORED),
}  # fmt: skip
