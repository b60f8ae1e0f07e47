"""Bodies and answers of /v1/systemone, /v1/decisions and /v1/score of a model that generates.

questions.py checks what is inside of `questions`: its errors name the id and the key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from server.schema import fields
from server.schema.answers_common import ABSENT, Answer, Maybe, ModelName
from server.schema.fields import said
from server.schema.pooling import ScoreBody


class DecidingBody(msgspec.Struct, kw_only=True):
    """The fields that both routes of decisions share."""

    model: Annotated[str | None, said("Any name: the served model decides, and the answer has its name.")] = None
    return_token_ids: Annotated[
        bool | None,
        said("Whether the answer has the token ids of prompts and labels, and the labels' own probability."),
    ] = None
    cache_salt: fields.CacheSalt = None
    priority: fields.Priority = None


class SystemOneBody(DecidingBody, kw_only=True):
    """The body of /v1/systemone."""

    state: Annotated[
        str | dict[str, Any] | list[Any],
        said("The text that the questions are about; an object or a list is read as JSON.", "Where is my parcel?"),
    ]
    questions: Annotated[
        dict[str, Any],
        said("By id 1 to 64 questions: type (noul, choice or score), instructions and criteria."),
    ]


class DecisionsBody(DecidingBody, kw_only=True):
    """The body of /v1/decisions."""

    input: Annotated[
        str | list[dict[str, Any]],
        said("The text that the questions are about, or messages, calls and results of calls.", "Where is my parcel?"),
    ]
    questions: Annotated[
        list[Any],
        said("A list of 1 to 400 questions: type (predicate, choice or score), instructions, choices or levels, name."),
    ]
    prompt_cache_key: Annotated[str | None, said("Accepted without effect; cache_salt separates caches.")] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, said("Accepted without effect: every beginning of a prompt is cached.")
    ] = None
    safety_identifier: Annotated[str | None, said("Accepted without effect.")] = None


class LabelScoreBody(ScoreBody, kw_only=True):
    """The body of /score and /v1/score: pairs for a model that pools, or `query`, `items` and `label_token_ids` for a
    model that generates.
    """

    query: Annotated[
        str | list[int] | None, said("The text or token ids before each item, of a model that generates.")
    ] = None
    items: Annotated[
        str | dict[str, Any] | list[str | int | dict[str, Any] | list[int | dict[str, Any]]] | None,
        said("Another name of text_2; for a model that generates the texts or token ids that are scored."),
    ] = None  # type: ignore[assignment]  # a model that generates takes token ids too
    label_token_ids: Annotated[
        list[int] | None, said("The tokens whose probabilities behind each prompt are the scores.", [9693, 2152])
    ] = None
    apply_softmax: Annotated[
        bool | None, said("Whether the scores of an item are shares among the labels, instead of the vocabulary.")
    ] = None
    item_first: Annotated[bool | None, said("Whether the item comes before the query.")] = None


Probability = Annotated[float, said("From 0 to 1.", 0.93)]
Confidence = Annotated[float, said("From 0 (all options are as likely) to 1 (a single option is possible).", 0.9)]
Score = Annotated[float, said("The mean of the levels' numbers, weighted by their probabilities.", 1.7)]


class NoulAnswer(Answer, tag_field="type", tag="noul"):
    """The answer to a question of truth."""

    noul: Annotated[float, said("The probability that it is true.", 0.93)]


class OptionAnswer(Answer, tag_field="type", tag="choice"):
    """The answer to a choice."""

    choice: Annotated[str, said("The likeliest option.", "billing")]
    probabilities: Annotated[dict[str, float], said("The probability of each option.")]
    confidence: Confidence


class LevelAnswer(Answer, tag_field="type", tag="score"):
    """The answer to a question of degree."""

    score: Score
    legend: Annotated[dict[str, str], said("The text of each level by its number.")]
    probabilities: Annotated[dict[str, float], said("The probability of each level by its number.")]
    confidence: Confidence


class Diagnosis(Answer):
    """The tokens of a question."""

    prompt_token_ids: Annotated[list[int], said("The tokens of the prompt.", [1, 2, 3])]
    label_token_ids: Annotated[list[list[int]], said("For each option the tokens whose probabilities are added.")]
    label_mass: Annotated[float | None, said("The probability of all labels in the vocabulary; null with logits.", 0.9)]
    argmax_is_label: Annotated[bool, said("Whether the likeliest token of the vocabulary is a label.", True)]


Diagnostics = Annotated[Maybe[dict[str, Diagnosis]], said("The tokens of each question, by its id or number.")]
InputTokens = Annotated[int, said("Tokens of all prompts, with the state in each.", 180)]
OutputTokens = Annotated[int, said("Always 0: nothing is generated.", 0)]


class SystemOneUsage(Answer):
    """Counts of tokens."""

    input_tokens: InputTokens
    output_tokens: OutputTokens


class SystemOne(Answer):
    """The answers to questions about one state."""

    model: ModelName
    answers: Annotated[
        dict[str, NoulAnswer | OptionAnswer | LevelAnswer], said("The answer to each question, by its id.")
    ]
    usage: Annotated[SystemOneUsage, said("Counts of tokens.")]
    diagnostics: Diagnostics = ABSENT


Name = Annotated[str | None, said("The name of the question; null if it has none.")]


class PredicateAnswer(Answer, tag_field="type", tag="predicate"):
    """The answer to a predicate."""

    name: Name
    probability: Annotated[float, said("The probability that it is true.", 0.93)]


class ValueProbability(Answer):
    """The probability of a choice."""

    value: Annotated[str | bool, said("The value of the choice.", "billing")]
    probability: Probability


class ChoiceAnswer(Answer, tag_field="type", tag="choice"):
    """The answer to a choice."""

    name: Name
    choice: Annotated[str | bool, said("The value of the likeliest choice.", "billing")]
    probabilities: Annotated[list[ValueProbability], said("The probability of each choice.")]
    confidence: Confidence


class LevelProbability(Answer):
    """The probability of a level."""

    value: Annotated[int, said("The number of the level, from 0.", 0)]
    label: Annotated[str, said("The label of the level.", "low")]
    probability: Probability


class ScoreAnswer(Answer, tag_field="type", tag="score"):
    """The answer to a question of degree."""

    name: Name
    score: Score
    probabilities: Annotated[list[LevelProbability], said("The probability of each level.")]
    confidence: Confidence


class InputDetails(Answer):
    """Parts of the input's tokens."""

    cached_tokens: Annotated[int, said("Tokens that the prefix cache had.", 120)]
    cache_write_tokens: Annotated[int, said("Tokens that were computed, and are now cached.", 60)]


class OutputDetails(Answer):
    """Parts of the output's tokens."""

    reasoning_tokens: Annotated[Literal[0], said("Always 0: decisions are made without reasoning.")]


class DecisionsUsage(Answer):
    """Counts of tokens."""

    input_tokens: InputTokens
    output_tokens: OutputTokens
    total_tokens: Annotated[int, said("The sum of both.", 180)]
    input_tokens_details: Annotated[InputDetails, said("Parts of the input's tokens.")]
    output_tokens_details: Annotated[OutputDetails, said("Parts of the output's tokens.")]


class Decisions(Answer):
    """The answers to questions about one input."""

    model: ModelName
    answers: Annotated[
        list[PredicateAnswer | ChoiceAnswer | ScoreAnswer], said("An answer for each question, in their order.")
    ]
    usage: Annotated[DecisionsUsage, said("Counts of tokens.")]
    diagnostics: Diagnostics = ABSENT


class LabelScoresUsage(Answer):
    """Counts of tokens."""

    prompt_tokens: Annotated[int, said("Tokens of all prompts.", 24)]
    total_tokens: Annotated[int, said("The same number.", 24)]
    prompt_tokens_details: Annotated[
        dict[str, int], said("Among them cached_tokens, the tokens that the prefix cache had.")
    ]


class LabelScores(Answer, tag_field="object", tag="scoring"):
    """Probabilities of given tokens behind each item."""

    model: ModelName
    scores: Annotated[list[list[float]], said("For each item the probability of each label.", [0.9, 0.1])]
    usage: Annotated[LabelScoresUsage, said("Counts of tokens.")]
