"""litellm talks to a server: `python talk_litellm.py URL PICTURE` prints litellm's results as one JSON object.

Runs in an environment of its own (tests/end_to_end/installed.py), so it imports nothing of ours.
"""

import asyncio
import json
import sys

import litellm

URL, PICTURE = sys.argv[1:]
HI = [{"role": "user", "content": "hi"}]
OPENAI = {"model": "openai/omniloop", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
VLLM = {**OPENAI, "model": "hosted_vllm/omniloop"}
ANTHROPIC = {**OPENAI, "model": "anthropic/omniloop", "api_base": URL}
SHORT = {"max_tokens": 6, "temperature": 0}


def counts(usage):
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]


def whole(**options):
    answer = litellm.completion(messages=HI, **options, **SHORT)
    choice = answer.choices[0]
    return {"text": choice.message.content, "end": choice.finish_reason, "usage": counts(answer.usage)}


def streamed(**options):
    chunks = list(litellm.completion(messages=HI, **options, **SHORT, stream=True))
    usage = [counts(chunk.usage) for chunk in chunks if getattr(chunk, "usage", None)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    return {"text": text, "end": ends[-1], "usage": usage[-1] if usage else None}


def logprobs():
    answer = litellm.completion(messages=HI, **VLLM, **SHORT, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    return [[entry.token, len(entry.top_logprobs)] for entry in entries]


def picture():
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    answer = litellm.completion(messages=[{"role": "user", "content": parts}], **OPENAI, **SHORT)
    return counts(answer.usage)


def refusal(kind, **options):
    try:
        litellm.completion(**{**OPENAI, "messages": HI, **options})
    except kind as error:
        return [type(error).__name__, error.status_code]
    return "not refused"


async def parallel():
    answers = await asyncio.gather(*(litellm.acompletion(messages=HI, **OPENAI, **SHORT) for _ in range(8)))
    return [answer.choices[0].message.content for answer in answers]


def text():
    options = {**OPENAI, "model": "text-completion-openai/omniloop"}
    answer = litellm.text_completion(prompt=["one two", "three"], **options, **SHORT, extra_body={"ignore_eos": True})
    return {"texts": [choice.text for choice in answer.choices], "usage": counts(answer.usage)}


litellm.suppress_debug_info = True
seen = {
    "whole": whole(**OPENAI),
    "vllm": whole(**VLLM),
    "anthropic": whole(**ANTHROPIC),
    "streamed": streamed(**OPENAI, stream_options={"include_usage": True}),
    "vllm_streamed": streamed(**VLLM, stream_options={"include_usage": True}),
    "anthropic_streamed": streamed(**ANTHROPIC, stream_options={"include_usage": True}),
    "logprobs": logprobs(),
    "picture": picture(),
    "too_long": refusal(
        litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "word " * 20_000}], max_tokens=4
    ),
    "bad_value": refusal(litellm.BadRequestError, temperature=5),
    "no_model": refusal(litellm.NotFoundError, model="openai/nothing"),
    "parallel": asyncio.run(parallel()),
    "text": text(),
}
print("SEEN", json.dumps(seen))
