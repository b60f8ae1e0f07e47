"""WrittenPair: a query and a document as plain text for jina-reranker-m0, and the conversation type of a reranker's
pair.

Owner: pool. In: the contents of a pair, each a text or parts. Out: token ids; the document comes first, and the model's
score is read at the token after all of it. Both are as in the model's own code (engine/models/pooling/jina_vl).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.model_config import PoolingConfig
from server.errors import invalid
from server.pooling.conversations import Content, Conversations, Seen, pair
from server.state import AppState

SCORED = 100  # a token of Qwen2's vocabulary


class WrittenPair(Conversations):
    """The plain text of a pair in place of a conversation: the model has no chat template."""

    ending = (SCORED,)

    def __init__(self, state: AppState) -> None:
        self._state = state

    def rendered(self, contents: Sequence[Content]) -> str:
        query, document = map(self.plain, contents)
        return f"**Document**:\n{document}\n**Query**:\n{query}"

    def in_order_of_template(self, items: Sequence[Seen]) -> Sequence[Seen]:
        return items[::-1]


def pairs_of(state: AppState, config: PoolingConfig, instruction: str | None) -> Conversations:
    """The Conversations object that makes the pairs of a reranker with its own text format."""
    if config.template != "jina_vl":
        return Conversations(state, pair(config, instruction), 2, config.template_opens_answer)
    if instruction is not None:
        raise invalid("instruction", "instruction: this model takes none; leave the field out")
    return WrittenPair(state)
