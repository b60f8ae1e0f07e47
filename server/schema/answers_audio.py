"""Types of the answers of /v1/audio/transcriptions and /v1/audio/translations (API.md section 14)."""

from __future__ import annotations

from typing import Annotated, Literal

from server.schema.answers_common import ABSENT, Answer, Created, Maybe, ModelName, PromptProgress, TokenValue
from server.schema.fields import said

Seconds = Annotated[float, said("Seconds since the recording began.", 1.5)]
SpokenLogprobs = Annotated[Maybe[list[TokenValue]], said("Log-probabilities of the text's tokens, where included.")]


class DurationUsage(Answer):
    """The length of a recording."""

    type: Annotated[Literal["duration"], said("The kind of the count.")]
    seconds: Annotated[int, said("Seconds of the recording, rounded up.", 4)]


class SpokenWord(Answer):
    """A word and its times."""

    word: Annotated[str, said("The word.", "hello")]
    start: Seconds
    end: Seconds


class SpokenSegment(Answer):
    """A piece of the text and its times."""

    id: Annotated[int, said("The number of the segment, from 0.", 0)]
    seek: Annotated[int, said("Where its window begins, in hundredths of a second.", 0)]
    start: Seconds
    end: Seconds
    text: Annotated[str, said("The text of the segment.", " Hello.")]
    tokens: Annotated[list[int], said("The tokens of the segment.")]
    temperature: Annotated[float, said("The temperature that was used.", 0.0)]
    avg_logprob: Annotated[float | None, said("The mean log-probability of its tokens.", -0.2)]
    compression_ratio: Annotated[float, said("How often its text repeats itself: bytes before and after zlib.", 1.1)]
    no_speech_prob: Annotated[float | None, said("The probability of silence; null where the model has none.")]


class Transcription(Answer):
    """The text of a recording: json has text and usage, verbose_json the other fields too."""

    text: Annotated[str, said("The text.", "Hello.")]
    usage: Annotated[DurationUsage, said("The length of the recording.")]
    task: Annotated[Maybe[Literal["transcribe", "translate"]], said("What was done.")] = ABSENT
    language: Annotated[Maybe[str], said("The name of the language.", "english")] = ABSENT
    duration: Annotated[Maybe[float], said("Seconds of the recording.", 3.2)] = ABSENT
    words: Annotated[Maybe[list[SpokenWord]], said("Words with their times.")] = ABSENT
    segments: Annotated[Maybe[list[SpokenSegment]], said("Segments with their times.")] = ABSENT
    logprobs: SpokenLogprobs = ABSENT


class SpokenDelta(Answer):
    """A delta of the text; empty at the end of the stream."""

    content: Annotated[Maybe[str], said("The next piece of the text.")] = ABSENT


class SpokenChoice(Answer):
    """A delta of the text in the format of chat completions."""

    index: Annotated[int, said("Always 0.", 0)]
    delta: Annotated[SpokenDelta, said("What is new.")]
    finish_reason: Annotated[Literal["stop"] | None, said("stop at the end of the text.")]


class AudioTokens(Answer):
    """Parts of the input's tokens."""

    audio_tokens: Annotated[int, said("Tokens of the recording.")]
    text_tokens: Annotated[int, said("Tokens of texts.")]


class SpeechUsage(Answer):
    """Counts of tokens under the names of both families of clients."""

    type: Annotated[Literal["tokens"], said("The kind of the counts.")]
    prompt_tokens: Annotated[int, said("Tokens of the prompts.", 100)]
    input_tokens: Annotated[int, said("The same number.", 100)]
    completion_tokens: Annotated[int, said("Generated tokens.", 8)]
    output_tokens: Annotated[int, said("The same number.", 8)]
    total_tokens: Annotated[int, said("The sum of both.", 108)]
    input_token_details: Annotated[AudioTokens, said("Parts of the input's tokens.")]


class SpeechEvent(Answer):
    """Common fields of the events of a streamed transcription."""

    id: Annotated[str, said("The id of the answer.", "trsc-5f0c")]
    object: Annotated[Literal["transcription.chunk"], said("The kind of this object.")]
    created: Created
    model: ModelName
    choices: Annotated[list[SpokenChoice], said("What is new, in the form of chat; empty in the last event.")]
    usage: Annotated[Maybe[SpeechUsage], said("The counts, where they are wanted.")] = ABSENT
    logprobs: SpokenLogprobs = ABSENT


class SpeechDeltaEvent(SpeechEvent, tag_field="type", tag="transcript.text.delta", kw_only=True):
    """An event with the next piece of the text."""

    delta: Annotated[str, said("The next piece of the text.")]


class SpeechDoneEvent(SpeechEvent, tag_field="type", tag="transcript.text.done", kw_only=True):
    """The event with the whole text; the text [DONE] after it ends the stream."""

    text: Annotated[str, said("The whole text.")]


class SpeechProgressEvent(SpeechEvent, tag_field="type", tag="transcript.prompt_progress", kw_only=True):
    """An event before the text of a window, where return_progress is set."""

    window: Annotated[int, said("The number of the piece of the recording, from 0.")]
    prompt_progress: Annotated[PromptProgress, said("How far the prompt is.")]


SpeechStreamEvent = SpeechDeltaEvent | SpeechDoneEvent | SpeechProgressEvent
