"""Pairs of a query and a document: the token ids that a reranker reads, and scores of models that compute vectors.

Owner: loop; tokenized in the pool. In: texts, and which of them form pairs. Out: an input for each pair, and where its
second text begins. A document is truncated on request, a query never.

    classifier   the tokenizer's own pair:  [CLS] query [SEP] document [SEP]; the checkpoint's prompt begins the query
    qwen3        the text that the model was trained with, hidden from clients
    chat         a conversation of the roles query and document, by the checkpoint's template (conversations)
    qwen3_vl     a conversation of the user, by the checkpoint's template
    jina_vl      plain text (written)
    vectors      cosine, or product, of the two vectors; a text in several pairs is computed once
    tokens       MaxSim: for each token of the query, the largest product with a token of the document, added up
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.base.model_config import PoolingConfig
from mm.splice import Spliced
from server.errors import ApiError, invalid, quoted
from server.pooling.conversations import JUDGE, Conversations, Parts, Seen, message, messages_of, text_part
from server.pooling.roles import PROMPTS
from server.pooling.tokens import (
    AROUND_PAIR,
    Cut,
    PooledInputs,
    counted_from,
    encoded,
    frame_of,
    framed,
    no_room,
    shaped,
    where,
)
from server.pooling.written import pairs_of
from server.render.messages import BARE_KEYS
from server.state import AppState

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_BEFORE = f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
BASE64 = re.compile("[A-Za-z0-9+/]{64,}={0,2}")  # the beginning of a picture's base64
INSTEAD = "a"  # tokenized in place of an item with media; its tokens are not used
LATER = np.zeros(1, np.int32)  # in place of the tokens of a pair with media


@dataclass(frozen=True, slots=True)
class Pairs:
    """Queries and documents, and which two of them form each pair."""

    queries: list[str]
    documents: list[str]
    of: list[tuple[int, int]]  # (query, document) of each pair
    param: str  # field name of the documents, for errors
    query_param: str = "query"
    parts: Mapping[int, Parts] = field(default_factory=dict)  # number of an item with media -> its parts

    def shows(self, query: int, document: int) -> bool:
        """Whether one of the two has media."""
        return query in self.parts or len(self.queries) + document in self.parts

    def contents(self, seen: Mapping[int, Seen]) -> Iterator[tuple[int, list[Seen], str]]:
        """Yield the number, both contents, and the path of the document of each pair with media."""
        count = len(self.queries)
        for at, (query, document) in enumerate(self.of):
            if self.shows(query, document):
                items = ((query, self.queries[query]), (count + document, self.documents[document]))
                both = [seen[number] if number in seen else Seen(text_part(text)) for number, text in items]
                yield at, both, self.document_named(document)

    def query_named(self, at: int) -> str:
        """The path of a query, for errors."""
        return where(self.query_param, at, len(self.queries))

    def document_named(self, at: int) -> str:
        """The path of a document, for errors."""
        return where(self.param, at, len(self.documents))


def sides(one: Any, other: Any, name: str, other_name: str, most: int, sees: bool) -> Pairs:
    """The pairs of a body's two sides, 1 with N or N with N; `sees`: items may have media."""
    queries, found = items(one, name, most, sees)
    documents, others = items(other, other_name, most, sees)
    parts = found | {len(queries) + at: part for at, part in others.items()}
    return replace(paired(queries, documents, other_name), query_param=name, parts=parts)


def items(given: Any, param: str, most: int, sees: bool) -> tuple[list[str], dict[int, Parts]]:
    """The text of each item, and the parts of items with media."""
    listed = given if isinstance(given, list) and not is_parts(given) else [given]
    if not listed:
        raise invalid(param, f"{param}: is empty; send at least one text", "empty_prompt")
    if len(listed) > most:
        raise invalid(param, f"{param}: got {len(listed)} texts; at most {most} are allowed")
    paths = [where(param, at, len(listed)) for at in range(len(listed))]
    found = [_with_media(item, path) if sees else None for item, path in zip(listed, paths)]
    texts = [_text_of(item, path, media is not None) for item, path, media in zip(listed, paths, found)]
    return texts, {at: media for at, media in enumerate(found) if media is not None}


def is_parts(given: list[Any]) -> bool:
    """Whether a list is the content of one item, instead of a list of items."""
    return bool(given) and all(isinstance(one, dict) and "type" in one for one in given)


def _parts_of(item: Any) -> list[Any]:
    """The content parts of an item, which may be one part, several in one object, or a message."""
    if isinstance(item, dict) and isinstance(item.get("content"), list):
        item = item["content"]
    if isinstance(item, dict) and "type" not in item:
        item = [{key: _linked(key, item[key])} for key in item if key in BARE_KEYS] or item
    return item if isinstance(item, list) else [item]


def _linked(key: str, value: Any) -> Any:
    """A picture's base64, which Jina's clients send in place of a URL, as a data: URL; other values are unchanged."""
    bare = key == "image" and isinstance(value, str) and BASE64.fullmatch(value[:256])
    return f"data:image/png;base64,{value}" if bare else value


def _is_text(part: Any) -> bool:
    named = isinstance(part, dict) and isinstance(part.get("text"), str)
    return isinstance(part, str) or (named and part.get("type", "text") in ("text", "input_text"))


def _with_media(item: Any, param: str) -> Parts | None:
    """The parts of an item that has parts other than text."""
    parts = _parts_of(item)
    return (parts, param) if any(isinstance(part, dict) and not _is_text(part) for part in parts) else None


def _named(part: Any) -> str:
    """The description of a part that is no text, for an error."""
    if not isinstance(part, dict):
        return f"a part {quoted(part)}"
    kind = part.get("type") or next((key for key in BARE_KEYS if key in part and key != "text"), None)
    if kind is None or kind in ("text", "input_text"):
        return f"an object with {', '.join(quoted(key) for key in part)}" if part else "an empty object"
    return f"a part of type {quoted(kind)}; this model takes text only"


def _text_of(item: Any, param: str, holds_media: bool) -> str:
    """The text of an item. `holds_media`: other parts are allowed, and left out."""
    if isinstance(item, str):
        return item
    parts = _parts_of(item)
    for part in parts:
        if not holds_media and not (isinstance(part, dict) and _is_text(part)):
            raise invalid(param, f"{param}: got {_named(part)}; must be a text, an object with text, or parts of text")
    if not parts:
        raise invalid(param, f"{param}: has no text")
    return "".join(part if isinstance(part, str) else part["text"] for part in parts if _is_text(part))


def paired(queries: list[str], documents: list[str], param: str) -> Pairs:
    """Pairs of 1 query with N documents, or of N with N."""
    if len(queries) == 1:
        return Pairs(queries, documents, [(0, at) for at in range(len(documents))], param)
    if len(queries) != len(documents):
        text = f"{param}: {len(queries)} texts cannot be paired with {len(documents)}; send one with many, or as many"
        raise invalid(param, text)
    return Pairs(queries, documents, [(at, at) for at in range(len(documents))], param)


def prepared(
    state: AppState, config: PoolingConfig, pairs: Pairs, cut: Cut, per_document: int | None, instruction: str | None
) -> PooledInputs:
    """The inputs of a model that reads both texts at once (pool)."""
    if len(config.labels) != 1:
        raise ApiError(
            501, "not_implemented", f"the served model has {len(config.labels)} classes; a score is of a model with one"
        )
    if config.template == "qwen3":
        return _with_template(state, pairs, cut, per_document, instruction or INSTRUCTION)
    if config.template:
        made = pairs_of(state, config, instruction)
        side = replace(cut, side="right")  # truncates the document; the query is on the left
        return PooledInputs(
            [
                LATER
                if pairs.shows(query, document)
                else made.ids(
                    (pairs.queries[query], pairs.documents[document]),
                    side,
                    per_document,
                    pairs.document_named(document),
                    pairs.query_named(query),
                )
                for query, document in pairs.of
            ]
        )
    if instruction is not None:
        raise invalid("instruction", "instruction: this model takes none; leave the field out")
    prompt = config.prompts.get(config.default_prompt or "", "")
    asked = [prompt + query for query in pairs.queries]
    queries = encoded(state, asked, pairs.query_param, cut.limit)  # longer ones are refused below
    documents = encoded(state, pairs.documents, pairs.param, *cut.needed(per_document))
    before, between, after = state.frames.pair
    ids, seconds = [], np.zeros(len(pairs.of), np.int32)
    for at, (query, document) in enumerate(pairs.of):
        opening = (*before, *queries[query], *between)
        second = _cut_document(documents[document], per_document)
        if len(opening) + len(after) >= cut.most:
            raise no_room(cut, len(opening) + len(after), pairs.query_named(query), AROUND_PAIR)
        ids.append(framed(second, opening, after, cut, pairs.document_named(document)))
        seconds[at] = len(opening) if state.frames.has_types else 0
    return PooledInputs(ids, seconds if state.frames.has_types else None)


def _with_template(state: AppState, pairs: Pairs, cut: Cut, per_document: int | None, instruction: str) -> PooledInputs:
    heads = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: " for query in pairs.queries]
    before, after = (tuple(state.tokenizer.encode(text)) for text in (QWEN3_BEFORE, QWEN3_AFTER))
    lengths = [len(ids) for ids in encoded(state, heads, pairs.query_param, cut.limit)]  # longer ones are refused below
    for query, length in enumerate(lengths):
        if (got := len(before) + length + len(after)) >= cut.most:
            raise no_room(cut, got, pairs.query_named(query), AROUND_PAIR)
    most, _ = cut.needed(per_document)
    joined = [heads[query] + pairs.documents[document] for query, document in pairs.of]
    texts = encoded(state, joined, pairs.param, None if most is None else most + max(lengths))
    found = []
    for (query, document), ids in zip(pairs.of, texts):
        ids = ids if per_document is None else ids[: lengths[query] + per_document]
        only_right = replace(cut, side="right")  # the query is on the left
        found.append(framed(ids, before, after, only_right, pairs.document_named(document)))
    return PooledInputs(found)


def _cut_document(ids: list[int], per_document: int | None) -> list[int]:
    return ids if per_document is None else ids[:per_document]


def apart(state: AppState, config: PoolingConfig, pairs: Pairs, cut: Cut, per_document: int | None) -> PooledInputs:
    """The inputs of a model that computes vectors: all queries, then all documents (pool)."""
    found: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    adapters: list[int] = []
    said = [INSTEAD if at in pairs.parts else text for at, text in enumerate((*pairs.queries, *pairs.documents))]
    middle = len(pairs.queries)
    for texts, role, param in ((said[:middle], "query", pairs.query_param), (said[middle:], "document", pairs.param)):
        name = _prompt_of(config, role)
        prompt = config.prompts.get(name, "")
        adapters += [config.adapter_of(name)] * len(texts)
        most = per_document if role == "document" else None
        if config.messages:
            made = Conversations(state, message(prompt), 1, config.template_opens_answer)
            found += [made.ids([text], cut, most, where(param, at, len(texts)), param) for at, text in enumerate(texts)]
            continue
        if most is not None and prompt:  # `most` counts tokens of the document only, so add the prompt's
            most += len(encoded(state, [prompt], param)[0])
        listed = [ids[:most] for ids in encoded(state, [prompt + text for text in texts], param, *cut.needed(most))]
        frame = frame_of(state, role)
        paths = [where(param, at, len(texts)) for at in range(len(texts))]
        ids_of = [shaped(config, framed(ids, *frame, cut, path)) for ids, path in zip(listed, paths)]
        counted = counted_from(state, prompt, frame, cut, ids_of, param)
        starts += [] if counted is None else [counted]
        found += ids_of
    return PooledInputs(
        found,
        pool_starts=np.concatenate(starts) if starts else None,
        adapters=np.array(adapters, np.int32) if config.adapters else None,
    )


def _prompt_of(config: PoolingConfig, role: str) -> str:
    """The name of the prompt for a role."""
    return next((name for name in PROMPTS[role] if name in config.prompts), config.default_prompt or "")


def seen_apart(
    state: AppState, config: PoolingConfig, pairs: Pairs, found: Mapping[int, Seen], cut: Cut, instruction: str | None
) -> dict[int, Spliced]:
    """The inputs of items with media, each as a message (pool)."""
    names = {at: _prompt_of(config, "query" if at < len(pairs.queries) else "document") for at in found}
    prompts = {at: config.prompts.get(name, "") for at, name in names.items()}
    return messages_of(state, config, found, pairs.parts, prompts, cut)


def seen_together(
    state: AppState, config: PoolingConfig, pairs: Pairs, found: Mapping[int, Seen], cut: Cut, instruction: str | None
) -> dict[int, Spliced]:
    """The inputs of pairs with media (pool)."""
    turns = pairs_of(state, config, instruction)
    return {at: turns.spliced(both, cut, name) for at, both, name in pairs.contents(found)}


def cosines(vectors: Sequence[np.ndarray], pairs: Pairs) -> list[float]:
    """The cosine of each pair; vectors in the order of the inputs of `apart`."""
    made = np.stack(list(vectors)).astype(np.float32)
    made /= np.maximum(np.linalg.norm(made, axis=1, keepdims=True), np.float32(1e-12))
    return products(made, pairs)


def products(vectors: np.ndarray | Sequence[np.ndarray], pairs: Pairs) -> list[float]:
    """The dot product of each pair."""
    made = np.asarray(vectors)
    queries, documents = made[: len(pairs.queries)], made[len(pairs.queries) :]
    index = np.asarray(pairs.of)
    return np.einsum("pw,pw->p", queries[index[:, 0]], documents[index[:, 1]]).tolist()


def late(matrices: Sequence[np.ndarray], pairs: Pairs) -> list[float]:
    """MaxSim of each pair; matrices [tokens, width] in the order of the inputs of `apart`. 0 if a text has no
    tokens.
    """
    queries, documents = matrices[: len(pairs.queries)], matrices[len(pairs.queries) :]
    found = []
    for query, document in pairs.of:
        products = queries[query] @ documents[document].T
        found.append(float(products.max(axis=1).sum()) if products.size else 0.0)
    return found
