"""Types of llama.cpp's answers: documentation that tests enforce, as server/schema/answers_common.py describes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from server.schema.answers_common import ABSENT, Answer, Maybe, Progressing
from server.schema.fields import said


class LlamaTop(Answer):
    """One of the likeliest tokens of a place."""

    id: Annotated[int, said("The token's id.")]
    token: Annotated[str, said("The token's text.")]
    bytes: Annotated[list[int], said("The token's bytes.")]
    logprob: Annotated[float, said("Its log-probability; -9999 in place of minus infinity.", -0.25)]


class LlamaProbability(LlamaTop, kw_only=True):
    """A generated token."""

    top_logprobs: Annotated[list[LlamaTop], said("The likeliest tokens of its place, best first.")]


class LlamaTimings(Answer):
    """Counts of tokens, and times."""

    cache_n: Annotated[int, said("Tokens of the prompt that the prefix cache had.", 0)]
    prompt_n: Annotated[int, said("Tokens of the prompt that were computed.", 20)]
    prompt_ms: Annotated[float, said("Milliseconds from the first step to the first token.", 12.5)]
    prompt_per_token_ms: Annotated[float, said("The same for each token of the prompt.")]
    prompt_per_second: Annotated[float, said("Tokens of the prompt in a second.")]
    predicted_n: Annotated[int, said("Generated tokens.", 3)]
    predicted_ms: Annotated[float, said("Milliseconds from the first to the last token.", 30.0)]
    predicted_per_token_ms: Annotated[float, said("The same for each token.")]
    predicted_per_second: Annotated[float, said("Generated tokens in a second.")]


class LlamaCompletion(Answer, forbid_unknown_fields=False):
    """The answer of /completion and /infill, or one event of its stream. With response_fields it has only the fields
    that they name; the name of a nested field is its path.
    """

    index: Annotated[Maybe[int], said("The number of the prompt.", 0)] = ABSENT
    content: Annotated[Maybe[str], said("The text, or its newest part.", "4 5 6")] = ABSENT
    tokens: Annotated[Maybe[list[int]], said("Ids of the tokens, where return_tokens is set, and in streams.")] = ABSENT
    id_slot: Annotated[Maybe[int], said("Always -1: the server chooses the slot.", -1)] = ABSENT
    stop: Annotated[Maybe[bool], said("Whether the answer has ended.", True)] = ABSENT
    model: Annotated[Maybe[str], said("The served name.", "qwen3-8b")] = ABSENT
    tokens_predicted: Annotated[Maybe[int], said("Generated tokens so far.", 3)] = ABSENT
    tokens_evaluated: Annotated[Maybe[int], said("Tokens of the prompt.", 20)] = ABSENT
    tokens_cached: Annotated[Maybe[int], said("Tokens of prompt and answer.", 23)] = ABSENT
    generation_settings: Annotated[Maybe[dict[str, Any]], said("The sampling options.")] = ABSENT
    prompt: Annotated[Maybe[str], said("The text of the prompt.", "1 2 3")] = ABSENT
    truncated: Annotated[Maybe[bool], said("Always false: prompts that are too long are refused.")] = ABSENT
    stop_type: Annotated[Maybe[Literal["none", "eos", "limit", "word"]], said("The cause of the end.", "eos")] = ABSENT
    stopping_word: Annotated[Maybe[str], said("The stop text that ended the answer.")] = ABSENT
    prompt_progress: Progressing = ABSENT
    timings: Annotated[Maybe[LlamaTimings], said("Counts of tokens, and times.")] = ABSENT
    completion_probabilities: Annotated[
        Maybe[list[LlamaProbability]], said("An entry for each token, where n_probs is set.")
    ] = ABSENT


class LlamaDefaults(Answer):
    """The settings of requests that set none."""

    n_ctx: Annotated[int, said("Tokens of prompt and answer.", 8192)]
    params: Annotated[dict[str, Any], said("The sampling options.", {"temperature": 1.0})]


class LlamaModalities(Answer):
    """The media that the model takes."""

    vision: Annotated[bool, said("Whether it takes images.")]
    audio: Annotated[bool, said("Whether it takes audio.")]


class LlamaProps(Answer):
    """The answer of /props."""

    default_generation_settings: Annotated[LlamaDefaults, said("The settings of requests that set none.")]
    total_slots: Annotated[int, said("Answers that one step computes.", 256)]
    model_path: Annotated[str, said("The served name; no path is disclosed.", "qwen3-8b")]
    chat_template: Annotated[str, said("The chat template, in Jinja; empty if the model has none.")]
    bos_token: Annotated[str, said("The token that begins a text; empty if there is none.", "<s>")]
    eos_token: Annotated[str, said("The token that ends a text; empty if there is none.", "</s>")]
    modalities: Annotated[LlamaModalities, said("The media that the model takes.")]
    build_info: Annotated[str, said("The program and its version.", "omniloop 0.1.0")]
    is_sleeping: Annotated[bool, said("Always false.")]


class LlamaNextToken(Answer):
    """The state of a running answer."""

    n_decoded: Annotated[int, said("Tokens generated so far.", 12)]


class LlamaSlot(Answer):
    """A row of a step, without its prompt."""

    id: Annotated[int, said("The number of the row.", 0)]
    n_ctx: Annotated[int, said("Tokens of prompt and answer.", 8192)]
    is_processing: Annotated[bool, said("Whether an answer runs in it.")]
    next_token: Annotated[LlamaNextToken, said("The state of its answer.")]


class LlamaEmbedding(Answer):
    """The vector of an input."""

    index: Annotated[int, said("The number of the input.", 0)]
    embedding: Annotated[list[list[float]], said("The vector, as the only row of a list.", [[0.6, 0.8]])]


class LlamaTemplated(Answer):
    """The answer of /apply-template."""

    prompt: Annotated[str, said("The prompt of the conversation.")]
