"""Descriptions of fields for /openapi.json, and the fields that several bodies share.

A description costs no time when bodies are decoded.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


def said(description: str, *examples: Any) -> msgspec.Meta:
    """The meaning of a field, in one sentence, and examples of its values."""
    return msgspec.Meta(description=description, examples=list(examples) or None)


AddSpecialTokens = Annotated[bool | None, said("Whether the tokenizer adds its special tokens to the prompt.")]
CacheSalt = Annotated[
    str | None, said("Separates this request's entries of the prefix cache from those of other salts.")
]
ChatTemplate = Annotated[
    str | None, said("A chat template to use in place of the model's; needs --trust-request-chat-template.")
]
ChatTemplateKwargs = Annotated[dict[str, Any] | None, said("Variables for the chat template.")]
ComparedBy = Annotated[
    str | None, said("How pairs are compared by a model with both: embed (whole texts) or token_embed (tokens).")
]
DryAllowedLength = Annotated[
    int | None, said("Tokens of a repetition without a penalty of dry_multiplier, from 1 to 8192.", 2)
]
DryBase = Annotated[
    float | None, said("Factor of a repetition's penalty for each further token of it, from 1 to 100.", 1.75)
]
DryMultiplier = Annotated[
    float | None,
    said("Subtracted from the logits of tokens that continue a repetition, from 0 (off) to 100; see dry_base.", 0.8),
]
DryPenaltyLastN = Annotated[
    int | None, said("Last tokens of the text that are searched for repetitions; -1: 8192, which is the most.", -1)
]
DrySequenceBreakers = Annotated[
    list[str] | None,
    said("Texts that end repetitions; every token whose text holds one is also never punished.", ["\n", ":", '"', "*"]),
]
EndsOpen = Annotated[bool | None, said("Whether a rendered conversation ends with the beginning of an answer.")]
FrequencyPenalty = Annotated[
    float | None, said("Subtracted from the logits of generated tokens for each time they occurred, from -2 to 2.", 0.5)
]
IgnoreEos = Annotated[bool | None, said("Whether generation goes on after the model's end token.")]
IncludeStopStrInOutput = Annotated[bool | None, said("Whether the text that ended an answer is part of it.")]
Instruction = Annotated[str | None, said("A sentence about the task, for models whose template takes one.")]
Language = Annotated[
    str | None, said("The language of the recording as an ISO 639-1 code; detected where it is absent.", "de")
]
LogitBias = Annotated[
    dict[str, float] | None, said("Numbers from -100 to 100 that are added to logits, by token id.", {"50256": -100})
]
Logprobs = Annotated[int | None, said("Number of likeliest tokens to report at each place.")]
MinP = Annotated[
    float | None,
    said("Sampling takes tokens at least this many times as likely as the likeliest one, from 0 to 1.", 0.05),
]
Model = Annotated[str | None, said("The served name to answer with; the first name where it is absent.", "qwen3-8b")]
NoRoutedExperts = Annotated[bool | None, said("Refused: answers of this route have no place for experts.")]
ParallelToolCalls = Annotated[bool | None, said("Whether one answer may hold several calls.")]
PresencePenalty = Annotated[
    float | None, said("Subtracted from the logits of tokens that were generated before, from -2 to 2.", 0.5)
]
Priority = Annotated[int | None, said("Place in the queue under the priority policy: lower numbers run first.", 0)]
RepetitionPenalty = Annotated[
    float | None,
    said("Divides the logits of tokens of the prompt and the answer, above 0 and at most 2; 1 switches it off.", 1.1),
]
RequestId = Annotated[
    str | None, said("The id of the answer after its prefix, at most 128 printable ASCII characters.")
]
ReturnProgress = Annotated[
    bool | None, said("Whether a stream reports, after each step of the prompt, how many of its tokens are computed.")
]
ReturnRoutedExperts = Annotated[
    bool | None, said("Whether the answer has the experts that each token was routed to, in models with experts.")
]
Seed = Annotated[
    int | None, said("Makes sampling repeatable: the same seed and request give the same tokens; -1 means none.", 7)
]
SkipSpecialTokens = Annotated[bool | None, said("Whether special tokens are left out of the text.")]
Stop = Annotated[
    str | list[str] | None,
    said(
        "A text or texts that end the answer; they are left out of it unless include_stop_str_in_output is set. In "
        "chat they are not looked for in the reasoning.",
        ["\n\n"],
    ),
]
StopTokenIds = Annotated[list[int] | None, said("Token ids that end the answer.", [2])]
Stream = Annotated[bool | None, said("Whether the answer comes as server-sent events while it is generated.")]
StructuredOutputs = Annotated[
    dict[str, Any] | None,
    said(
        "A constraint on the answer: exactly one of json, regex, choice, grammar, json_object and structural_tag.",
        {"choice": ["yes", "no"]},
    ),
]
Temperature = Annotated[
    float | None, said("Randomness from 0 (the likeliest token, always) to 2; values below 0.01 count as 0.01.", 0.7)
]
TopK = Annotated[
    int | None, said("Sampling takes this many of the likeliest tokens; 0 and -1 switch the limit off.", 50)
]
TopNSigma = Annotated[
    float | None,
    said(
        "Sampling takes tokens at most this many standard deviations of the logits below the likeliest one; 0: all.", 1
    ),
]
TopP = Annotated[
    float | None,
    said("Sampling takes the likeliest tokens whose probabilities sum to this share, above 0 and at most 1.", 0.9),
]
XtcProbability = Annotated[
    float | None, said("How often XTC excludes the likeliest tokens, from 0 to 1; 0 switches it off.", 0.5)
]
XtcThreshold = Annotated[
    float | None,
    said("XTC excludes tokens of at least this probability, except the least likely of them; above 0.5 none.", 0.1),
]
