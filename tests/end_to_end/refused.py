"""Requests that must be refused, with the status and reason that API.md 3.2 and SECURITY.md promise.

`cases()` is the table; test_bad_input.py sends each case over a socket.
"""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

from tests import tiny
from tests.end_to_end.known import MIME, data_of, part, words
from tests.mm.made import data_url, noise, picture, ramp

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTEXT = 2048
TOO_LONG = f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains "


@dataclass(frozen=True)
class Case:
    """A bad request and its answer: the message contains `words`; `param`, if given, must be equal."""

    name: str
    body: Any
    status: int
    reason: str
    path: str = CHAT
    method: str = "POST"
    param: str | None = None
    words: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts) or "hello"}], "max_tokens": 4, **fields}


def text(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, **fields}


def image(url: Any) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": url}}, words("what?"))


def image_of(url: str, count: int) -> dict[str, Any]:
    return chat(*[{"type": "image_url", "image_url": {"url": url}}] * count)


def sound(data: str, kind: str = "wav") -> dict[str, Any]:
    return chat({"type": "input_audio", "input_audio": {"data": data, "format": kind}})


def film(url: str) -> dict[str, Any]:
    return chat({"type": "video_url", "video_url": {"url": url}})


def encoded(data: bytes) -> str:
    return data_url(data).partition(",")[2]


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header gives this many pixels, followed by a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")
    )


def silence(seconds: int) -> bytes:
    """A WAV file with 8-bit silence at 8 kHz."""
    size = 8000 * seconds
    head = b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
    return head + b"data" + struct.pack("<I", size) + b"\x80" * size


@functools.cache
def cases() -> list[Case]:
    found = [*json_cases(), *field_cases(), *range_cases(), *prompt_cases(), *media_cases(), *url_cases()]
    assert len({case.name for case in found}) == len(found)
    return found


def json_cases() -> list[Case]:
    deep = b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    wide = b'{"prompt":"a","stop_token_ids":[' + b"1," * 1_000_000 + b"1]}"
    plain = {"Content-Type": "text/plain"}
    return [
        Case("cut json", b'{"messages": [{"role": "user"', 400, "invalid_json", words="ends too early"),
        Case("names in single quotes", b"{'messages': []}", 400, "invalid_json", words="near {'messages': []}"),
        Case("no json", b"hello", 400, "invalid_json"),
        Case("empty body", b"", 400, "invalid_json", headers={"Content-Type": "application/json"}, words="is empty"),
        Case("two documents", b'{"prompt":"a"}{}', 400, "invalid_json", COMPLETION),
        Case("a list", b"[]", 400, "invalid_parameter"),
        Case("a number", b"7", 400, "invalid_parameter", COMPLETION),
        Case("bytes that are not utf-8", b'{"prompt":"\xff\xfe"}', 400, "invalid_json", COMPLETION, words="UTF-8"),
        Case("nan", b'{"prompt":"a","temperature":NaN}', 400, "invalid_json", COMPLETION),
        Case("infinity", b'{"prompt":"a","temperature":-Infinity}', 400, "invalid_json", COMPLETION),
        Case("a number too large for a float", b'{"prompt":"a","top_p":1e999}', 400, "invalid_parameter", COMPLETION),
        Case("an integer of 70 bits", b'{"prompt":"a","seed":1180591620717411303424}', 400, "invalid_json", COMPLETION),
        Case("half a surrogate pair", b'{"prompt":"a\\ud800b"}', 400, "invalid_json", COMPLETION),
        Case("5,000 levels", deep, 400, "invalid_json", words="200 levels"),
        Case("a million values", wide, 400, "invalid_json", COMPLETION, words="1000000 values"),
        Case("plain text", chat(), 415, "unsupported_media_type", headers=plain, words="application/json"),
        Case("gzip", chat(), 415, "unsupported_media_type", headers={"Content-Encoding": "gzip"}),
        Case("64 MiB and one byte", b"{", 413, "request_too_large", headers={"Content-Length": str((64 << 20) + 1)}),
        Case("no such path", chat(), 404, "not_found", "/v1/v1/chat/completions", words="mean /v1/chat/completions?"),
        Case("no path that is near", chat(), 404, "not_found", "/a/path/of/nothing", words="/docs/api lists"),
        Case("a path without a method", None, 405, "method_not_allowed", method="GET", words="POST"),
        Case("an endpoint of other models", {"input": "a"}, 501, "not_implemented", "/v1/embeddings"),
        Case("no body of ids", {}, 400, "invalid_parameter", "/abort_requests", param="request_ids"),
        Case("tokens as text", {"tokens": "a"}, 400, "invalid_parameter", "/detokenize", param="tokens"),
        Case("token beyond the vocabulary", {"tokens": [320]}, 400, "token_id_out_of_range", "/detokenize"),
    ]


def field_cases() -> list[Case]:
    def wrong(name: str, param: str | None, body: Any, path: str = CHAT) -> Case:
        return Case(name, body, 400, "invalid_parameter", path, param=param)

    return [
        wrong("messages as text", "messages", {"messages": "hello"}),
        wrong("messages missing", "messages", {"max_tokens": 4}),
        wrong("no messages", "messages", {"messages": []}),
        wrong("a message that is text", "messages[0]", {"messages": ["hello"]}),
        Case(
            "no role", {"messages": [{"content": "hello"}]}, 400, "invalid_parameter", words="role is missing; it must"
        ),
        wrong("an unknown role", "messages[0].role", {"messages": [{"role": "robot", "content": "hello"}]}),
        wrong("content as a number", "messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
        wrong("a part without type", "messages[0].content[0].type", chat({"smell": "rose"})),
        wrong("an unknown part", "messages[0].content[0].type", chat({"type": "smell", "smell": "rose"})),
        wrong("text as a list", "messages[0].content[0].text", chat({"type": "text", "text": ["a"]})),
        wrong("temperature as text", "temperature", text(temperature="hot"), COMPLETION),
        wrong("max_tokens as text", "max_tokens", text(max_tokens="16"), COMPLETION),
        wrong("half a token", "max_tokens", text(max_tokens=1.5), COMPLETION),
        wrong("stream as text", "stream", chat(stream="yes")),
        wrong("stop as a number", "stop", chat(stop=7)),
        wrong("stream options without stream", "stream_options", chat(stream_options={"include_usage": True})),
        wrong("top_logprobs without logprobs", "top_logprobs", chat(top_logprobs=2)),
        wrong("a tool choice without tools", "tool_choice", chat(tool_choice="required")),
        wrong("no tools", "tools", chat(tools=[])),
        wrong("both prompts", "prompt", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "/tokenize"),
        Case("an unknown model", chat(model="gpt-9"), 404, "not_found", param="model", words="gpt-9"),
        Case("an unknown model, completions", text(model="gpt-9"), 404, "not_found", COMPLETION, param="model"),
        Case("an unknown model by path", None, 404, "not_found", "/v1/models/gpt-9", "GET", param="model"),
        Case("a template", chat(chat_template="{{ 7 }}"), 403, "override_not_trusted", param="chat_template"),
        Case("processor options", chat(mm_processor_kwargs={"max_pixels": 9}), 403, "override_not_trusted"),
    ]


def range_cases() -> list[Case]:
    def beyond(param: str, value: Any, name: str = "", **more: Any) -> Case:
        body = text(**{param: value, **more})
        return Case(name or f"{param}={value}", body, 400, "invalid_parameter", COMPLETION, param=param)

    bias = {str(number): 1 for number in range(1025)}
    return [
        *[beyond("temperature", value) for value in (-0.1, 2.1)],
        *[beyond("top_p", value) for value in (0, 1.1)],
        beyond("top_k", -2),
        beyond("min_p", 1.5),
        beyond("presence_penalty", 2.5),
        beyond("frequency_penalty", -3),
        beyond("repetition_penalty", 0),
        *[beyond("n", value) for value in (0, 129)],
        beyond("max_tokens", -1),
        beyond("min_tokens", 5),
        beyond("logprobs", 21),
        Case("an empty stop string", text(stop=""), 400, "invalid_parameter", COMPLETION, param="stop[0]"),
        beyond("stop", ["x"] * 33, "33 stop strings"),
        Case("a long stop string", text(stop="x" * 300), 400, "invalid_parameter", COMPLETION, param="stop[0]"),
        beyond("logit_bias", {"cat": 1}, "a bias on a word"),
        beyond("logit_bias", bias, "1,025 biases"),
        beyond("bad_words", ["x"] * 65, "65 bad words"),
        beyond("cache_salt", "a/b", "a salt with a slash"),
        beyond("priority", 3, "priority without the policy"),
        *[
            Case(f"{param}={value}", text(**{param: value}), 400, "token_id_out_of_range", COMPLETION)
            for param, value in (("stop_token_ids", [-1]), ("stop_token_ids", [320]), ("allowed_token_ids", [2**31]))
        ],
        Case("a bias on no token", text(logit_bias={"320": 1}), 400, "token_id_out_of_range", COMPLETION),
    ]


def prompt_cases() -> list[Case]:
    def long(name: str, body: Any, path: str, count: int) -> Case:
        return Case(name, body, 400, "context_length_exceeded", path, words=f"{TOO_LONG}{count} input tokens")

    media = sorted(tiny.IDS[mark] for mark in ("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>"))
    return [
        long("a long prompt of tokens", text([5] * 3000), COMPLETION, 3000),
        long("a prompt as long as the context", text([5] * CONTEXT), COMPLETION, CONTEXT),
        long("a long text", text("z" * 2100), COMPLETION, 2100),
        Case("a text of 8 MB", text("z " * 4_000_000), 400, "context_length_exceeded", COMPLETION, words=TOO_LONG[:36]),
        Case("a body of 9 MB", text("z" * 9_500_000), 413, "request_too_large", COMPLETION),
        Case("a long conversation", chat(words("z" * 2100)), 400, "context_length_exceeded", words=TOO_LONG),
        Case("an empty list of prompts", text([]), 400, "empty_prompt", COMPLETION, param="prompt"),
        Case("an empty prompt", text(""), 400, "empty_prompt", COMPLETION),
        Case("a mixed prompt", text(["a", 5]), 400, "invalid_parameter", COMPLETION, param="prompt"),
        *[
            Case(f"token id {token}", text([5, token]), 400, "token_id_out_of_range", COMPLETION)
            for token in (-1, 320, 2**31, 2**62)
        ],
        *[
            Case(f"media token {token} without media", text([5, token]), 400, "placeholder_mismatch", COMPLETION)
            for token in media
        ],
        Case("a placeholder as text", chat(words("see <|IMAGE|>")), 400, "placeholder_mismatch"),
        Case("a placeholder as a raw prompt", text("see <|IMAGE|>"), 400, "placeholder_mismatch", COMPLETION),
    ]


def media_cases() -> list[Case]:
    png, mp4, wav = (data_of(name)[1] for name in ("png", "mp4", "wav"))
    plain, full = picture(ramp(1)[0], "PNG"), data_url(picture(noise(224, 224), "JPEG"), "image/jpeg")
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    few = {key: data_url(data_of(key)[1], MIME[key]) for key in ("png", "mp4")}
    return [
        Case("a picture that is text", image(data_url(b"hello world, hello", "image/png")), 400, "media_unsupported"),
        Case("a drawing", image(data_url(svg, "image/svg+xml")), 400, "media_unsupported"),
        Case("postscript", image(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n", "image/png")), 400, "media_unsupported"),
        Case("half a picture", image(data_url(png[: len(png) // 2], "image/png")), 400, "media_invalid"),
        Case(
            "a broken picture", image(data_url(plain[:60] + bytes(40) + plain[100:], "image/png")), 400, "media_invalid"
        ),
        Case("a bomb", image(data_url(bomb(16000, 16000), "image/png")), 400, "media_too_large"),
        Case("a wide bomb", image(data_url(bomb(17000, 2), "image/png")), 400, "media_too_large"),
        Case("21 MiB", image(data_url(png + bytes(21 << 20), "image/png")), 400, "media_too_large"),
        Case("one pixel", image(data_url(picture(noise(1, 1), "PNG"), "image/png")), 400, "media_invalid"),
        Case("a picture called a sound", image(data_url(png, "audio/wav")), 400, "data_url_invalid"),
        Case("a film as a picture", image(data_url(mp4, "video/mp4")), 400, "media_unsupported"),
        Case("not base64", image("data:image/png;base64,@@@@"), 400, "data_url_invalid"),
        Case("base64 with spaces", image("data:image/png;base64," + encoded(png)[:40] + " ="), 400, "data_url_invalid"),
        Case("no base64", image("data:image/png,hello"), 400, "data_url_invalid"),
        Case("an empty picture", image("data:image/png;base64,"), 400, "data_url_invalid"),
        Case("an address that is a number", image(7), 400, "invalid_parameter"),
        Case("sound that is text", sound(encoded(b"hello world, hello")), 400, "media_unsupported"),
        Case("sound that is not base64", sound("@@@@"), 400, "data_url_invalid"),
        Case("sound without samples", sound(encoded(wav[:44])), 400, "media_invalid"),
        Case("ten minutes and a second", sound(encoded(silence(601))), 400, "media_too_large"),
        Case("half a film", film(data_url(mp4[: len(mp4) // 2], "video/mp4")), 400, "media_invalid"),
        Case("a film that is text", film(data_url(b"#EXTM3U\n#EXTINF:1,\n", "video/mp4")), 400, "media_unsupported"),
        Case("65 pictures", chat(*[part("png")] * 65), 400, "too_many_media"),
        Case("media beyond the context", image_of(full, 40), 400, "context_length_exceeded", words=TOO_LONG),
        Case("an object of addresses", chat({"type": "image_url", "image_url": few}), 400, "invalid_parameter"),
    ]


def url_cases() -> list[Case]:
    hidden = ["127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"]
    hidden += [
        "[::1]",
        "[fe80::1]",
        "[fd00::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "224.0.0.1",
    ]
    odd = ["http://2130706433/a.png", "http://0x7f.1/a.png", "http://127.1/a.png", "http://user@example.org/a.png"]
    odd += ["http://example.org:22/a.png", "ftp://example.org/a.png", "file:///etc/passwd", "gopher://example.org/"]
    odd += ["http://example.org\\@127.0.0.1/a.png", "//example.org/a.png", "/etc/passwd", "http://"]
    found = [
        Case(f"http://{host}/a.png", image(f"http://{host}/a.png"), 403, "media_url_not_allowed") for host in hidden
    ]
    found += [Case("an empty address", image(""), 400, "invalid_parameter")]
    found += [Case("localhost", image("http://localhost/a.png"), 422, "media_fetch_failed")]
    found += [Case(f"url {url!r}", image(url), 403, "media_url_not_allowed") for url in odd]
    return found
