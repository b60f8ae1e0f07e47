"""WrittenPair: a query and a document as plain text, of jina-reranker-m0, and which conversation a reranker's pair is.

Owner: pool. In: the contents of a pair, each a text or parts. Out: token ids; the document stands first, and a token
behind all of it is the one that the model's score is read at. Both are as the model's own code has them
(engine/models/pooling/jina_vl).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.model_config import PoolingConfig
from server.errors import invalid
from server.pooling.conversations import Content, Conversations, Seen, pair
from server.state import AppState

SCORED = 100  # a token of Qwen2's vocabulary


class WrittenPair(Conversations):
    """In the place of a conversation: the model has no chat template."""

    ending = (SCORED,)

    def __init__(self, state: AppState) -> None:
        self._state = state

    def rendered(self, contents: Sequence[Content]) -> str:
        query, document = map(self.plain, contents)
        return f"**Document**:\n{document}\n**Query**:\n{query}"

    def in_order_of_template(self, items: Sequence[Seen]) -> Sequence[Seen]:
        return items[::-1]


def pairs_of(state: AppState, config: PoolingConfig, instruction: str | None) -> Conversations:
    """How a reranker with a text of its own reads pairs."""
    if config.template != "jina_vl":
        return Conversations(state, pair(config, instruction), 2, config.template_opens_answer)
    if instruction is not None:
        raise invalid("instruction", "instruction: this model takes none; leave the field out")
    return WrittenPair(state)
