"""Transcripts of recordings, with their segments and words, and the formats in which clients read them.

Pure values and functions. A Segment's times count from the recording's beginning, in seconds. The numbers of
`verbose_json` are computed as OpenAI's whisper computes them.

    text | json | srt | vtt | verbose_json
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from server.speech.languages import name_of

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
MEDIA_TYPES = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text and its times."""

    start: float
    end: float
    text: str
    token_ids: Sequence[int] = ()
    seek: int = 0  # hundredths of a second: where the window begins
    temperature: float = 0.0
    avg_logprob: float | None = None
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None  # None: the model does not report it


@dataclass(frozen=True, slots=True)
class Word:
    """A word and its times."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """The transcript of a whole recording."""

    task: str  # transcribe | translate
    language: str  # code; "" if unknown
    duration: float
    text: str
    segments: Sequence[Segment] | None  # None: not requested
    words: Sequence[Word] | None = None


def average_logprob(logprobs: Sequence[float], num_text_tokens: int) -> float:
    """The sum over all tokens, including the one that ends the text, divided by one more than the number of
    text tokens.
    """
    return sum(logprobs) / (num_text_tokens + 1)


def compression_ratio(text: str) -> float:
    """How repetitive a text is: its bytes divided by its bytes after zlib."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def body(transcript: Transcript, form: str) -> str | dict[str, Any]:
    """The response body in one of FORMATS: a dict is sent as JSON, a string as text."""
    match form:
        case "text":
            return transcript.text + "\n"
        case "srt":
            return "".join(
                f"{number}\n{clock(part.start, ',')} --> {clock(part.end, ',')}\n{cue(part.text)}\n\n"
                for number, part in enumerate(transcript.segments or (), 1)
            )
        case "vtt":
            return "WEBVTT\n\n" + "".join(
                f"{clock(part.start, '.')} --> {clock(part.end, '.')}\n{cue(part.text)}\n\n"
                for part in transcript.segments or ()
            )
        case "verbose_json":
            return verbose(transcript)
    return {"text": transcript.text, "usage": duration_usage(transcript.duration)}


def verbose(transcript: Transcript) -> dict[str, Any]:
    """The object of the format `verbose_json`."""
    found: dict[str, Any] = {
        "task": transcript.task,
        "language": name_of(transcript.language),
        "duration": transcript.duration,
        "text": transcript.text,
    }
    if transcript.words is not None:
        found["words"] = [
            {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)} for word in transcript.words
        ]
    if transcript.segments is not None:
        found["segments"] = [
            {
                "id": number,
                "seek": part.seek,
                "start": round(part.start, 3),
                "end": round(part.end, 3),
                "text": part.text,
                "tokens": list(part.token_ids),
                "temperature": part.temperature,
                "avg_logprob": part.avg_logprob,
                "compression_ratio": part.compression_ratio,
                "no_speech_prob": part.no_speech_prob,
            }
            for number, part in enumerate(transcript.segments)
        ]
    found["usage"] = duration_usage(transcript.duration)
    return found


def duration_usage(seconds: float) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(seconds)}


def cue(text: str) -> str:
    """A segment's text for subtitles, in which an empty line would end it and an arrow would begin another."""
    return "\n".join(line for line in re.split("[\r\n]+", text.strip()) if line.strip()).replace("-->", "->")


def clock(seconds: float, point: str) -> str:
    """Formats seconds as 00:00:00,000; `point` is the last separator."""
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def joined(texts: Iterable[str], space: str) -> str:
    """The windows' texts as one text."""
    return space.join(text.strip() for text in texts if text.strip())
