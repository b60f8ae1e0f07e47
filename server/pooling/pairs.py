"""Pairs of a query and a document: which token ids a reranker reads, and scores of models that make vectors.

Owner: loop; tokenized in the pool. In: texts, who is paired with whom. Out: an input for each pair, and where its
second text begins. A document is cut where that was asked for, a query never.

    classifier   the tokenizer's own pair:  [CLS] query [SEP] document [SEP]
    qwen3        the text that the model was trained with, which clients must not have to know
    chat         a conversation of the roles query and document, by the checkpoint's template (chat_pairs)
    vectors      cosine of the two vectors; a text that stands in several pairs is computed once
    tokens       MaxSim: of each token of the query the largest product with one of the document, added up
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.model_config import PoolingConfig
from server.errors import ApiError, invalid
from server.pooling.chat_pairs import ids_of_pair, renderer_of
from server.pooling.tokens import Cut, PooledInputs, counted_from, encoded, frame_of, framed, shaped, too_long, where
from server.render.prompt import id_array
from server.state import AppState

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_BEFORE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
Picture = tuple[dict[str, Any], str]  # a part of type image_url, and its path in the body
PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}  # names of the checkpoint's prompts


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts, and by pair which two of them belong together."""

    queries: list[str]
    documents: list[str]
    of: list[tuple[int, int]]  # (query, document) by pair
    param: str  # of the documents, for refusals
    pictures: Mapping[int, Picture] = field(default_factory=dict)  # that stand in the place of texts, by input


def texts_of(given: Any, param: str, most: int) -> list[str]:
    """A text or texts, each plain, as {"text"} or as parts of text."""
    listed = given if isinstance(given, list) and not _is_parts(given) else [given]
    if not listed:
        raise invalid(param, f"{param}: is empty; send at least one text", "empty_prompt")
    if len(listed) > most:
        raise invalid(param, f"{param}: got {len(listed)} texts; at most {most} are allowed")
    return [_text_of(one, where(param, at, len(listed))) for at, one in enumerate(listed)]


def _is_parts(given: list[Any]) -> bool:
    return bool(given) and all(isinstance(one, dict) and "type" in one for one in given)


def _text_of(item: Any, param: str) -> str:
    if isinstance(item, str):
        return item
    parts = item if isinstance(item, list) else [item]
    if isinstance(item, dict) and isinstance(item.get("content"), list):
        parts = item["content"]
    found = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type", "text") not in ("text", "input_text"):
            raise invalid(param, f"{param}: must be a text, an object with text, or parts of text")
        found.append(text)
    if not found:
        raise invalid(param, f"{param}: has no text")
    return "".join(found)


def paired(queries: list[str], documents: list[str], param: str) -> Pairs:
    """1 with N, or N with N."""
    if len(queries) == 1:
        return Pairs(queries, documents, [(0, at) for at in range(len(documents))], param)
    if len(queries) != len(documents):
        text = f"{param}: {len(queries)} texts cannot be paired with {len(documents)}; send one with many, or as many"
        raise invalid(param, text)
    return Pairs(queries, documents, [(at, at) for at in range(len(documents))], param)


def prepared(
    state: AppState, config: PoolingConfig, pairs: Pairs, cut: Cut, per_document: int | None, instruction: str | None
) -> PooledInputs:
    """The inputs of a model that reads both texts at once. Pool."""
    if len(config.labels) != 1:
        raise ApiError(
            501, "not_implemented", f"the served model has {len(config.labels)} classes; a score is of a model with one"
        )
    if config.template == "qwen3":
        return _with_template(state, pairs, cut, per_document, instruction or INSTRUCTION)
    if config.template == "chat":
        render, count = renderer_of(state, config, instruction), len(pairs.documents)
        found = [
            ids_of_pair(state, render, pairs.queries[query], pairs.documents[document], cut, per_document,
                        where(pairs.param, document, count))
            for query, document in pairs.of
        ]  # fmt: skip
        return PooledInputs([id_array(ids) for ids in found])
    if instruction is not None:
        raise invalid("instruction", "instruction: this model's pairs hold none; leave the field out")
    queries, documents = encoded(state, pairs.queries, "query"), encoded(state, pairs.documents, pairs.param)
    before, between, after = state.frames.pair
    ids, seconds = [], np.zeros(len(pairs.of), np.int32)
    for at, (query, document) in enumerate(pairs.of):
        lead = (*before, *queries[query], *between)
        second = _cut_document(documents[document], per_document)
        if len(lead) + len(after) >= cut.most:
            raise too_long(cut.limit, len(lead) + len(after), "query")
        ids.append(framed(second, lead, after, cut, where(pairs.param, document, len(documents))))
        seconds[at] = len(lead) if state.frames.has_types else 0
    return PooledInputs(ids, seconds if state.frames.has_types else None)


def _with_template(state: AppState, pairs: Pairs, cut: Cut, per_document: int | None, instruction: str) -> PooledInputs:
    heads = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: " for query in pairs.queries]
    before, after = (tuple(state.tokenizer.encode(text)) for text in (QWEN3_BEFORE, QWEN3_AFTER))
    lengths = [len(ids) for ids in encoded(state, heads, "query")]
    texts = encoded(state, [heads[query] + pairs.documents[document] for query, document in pairs.of], pairs.param)
    found = []
    for (query, document), ids in zip(pairs.of, texts):
        if len(before) + lengths[query] + len(after) >= cut.most:
            raise too_long(cut.limit, len(before) + lengths[query] + len(after), "query")
        kept = ids if per_document is None else ids[: lengths[query] + per_document]
        only_right = replace(cut, side="right")  # the query stands on the left
        found.append(framed(kept, before, after, only_right, where(pairs.param, document, len(pairs.documents))))
    return PooledInputs(found)


def _cut_document(ids: list[int], per_document: int | None) -> list[int]:
    return ids if per_document is None else ids[:per_document]


def apart(state: AppState, config: PoolingConfig, pairs: Pairs, cut: Cut, per_document: int | None) -> PooledInputs:
    """The inputs of a model that makes vectors: all queries, then all documents. Pool."""
    found: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    for texts, role, param in ((pairs.queries, "query", "query"), (pairs.documents, "document", pairs.param)):
        names = [name for name in PROMPTS[role] if name in config.prompts] or [config.default_prompt or ""]
        prompt = config.prompts.get(names[0], "")
        listed = encoded(state, [prompt + text for text in texts], param)
        if role == "document" and per_document is not None:
            listed = [ids[:per_document] for ids in listed]
        frame = frame_of(state, role)
        made = [shaped(config, framed(ids, *frame, cut, where(param, at, len(texts)))) for at, ids in enumerate(listed)]
        counted = counted_from(state, prompt, frame, cut, made, param)
        starts += [] if counted is None else [counted]
        found += made
    return PooledInputs(found, pool_starts=None if config.pools_prompt else np.concatenate(starts))


def cosines(vectors: Sequence[np.ndarray], pairs: Pairs) -> list[float]:
    """Of each pair; vectors as `apart` has their inputs."""
    made = np.stack(list(vectors)).astype(np.float32)
    made /= np.maximum(np.linalg.norm(made, axis=1, keepdims=True), np.float32(1e-12))
    queries, documents = made[: len(pairs.queries)], made[len(pairs.queries) :]
    index = np.asarray(pairs.of)
    return np.einsum("pw,pw->p", queries[index[:, 0]], documents[index[:, 1]]).tolist()


def late(matrices: Sequence[np.ndarray], pairs: Pairs) -> list[float]:
    """MaxSim of each pair; matrices [tokens, width] as `apart` has their inputs. 0 where a text has no tokens."""
    queries, documents = matrices[: len(pairs.queries)], matrices[len(pairs.queries) :]
    found = []
    for query, document in pairs.of:
        products = queries[query] @ documents[document].T
        found.append(float(products.max(axis=1).sum()) if products.size else 0.0)
    return found
