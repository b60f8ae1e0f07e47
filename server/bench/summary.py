"""Summary: computes the numbers of a run, its table and JSON. Pure functions; times are in milliseconds.

TTFT: from sending to the first event with tokens. TPOT: from the first to the last such event, divided by the number of
tokens after the first. ITL: between events with tokens. E2E: from sending to the end of the answer. Rates count from
the sending of the first request to the end of the last answer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from server.bench.options import ServeOptions
from server.bench.processes import Outcome
from server.bench.reply import Reply

TIMES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency",
         "e2e": "end-to-end latency"}  # fmt: skip
LABEL, CELL = 22, 9  # columns of the table: a label and three percentiles fit into 80


def times_of(answer: Reply) -> dict[str, float]:
    """Times of one answer in milliseconds; a time that needs more events than the answer has is left out."""
    found = {"e2e": (answer.end - answer.sent) * 1e3}
    if answer.first:
        found["ttft"] = (answer.first - answer.sent) * 1e3
        if answer.tokens > 1:
            found["tpot"] = (answer.last - answer.first) / (answer.tokens - 1) * 1e3
        if answer.gaps:
            found["itl"] = float(np.mean(answer.gaps)) * 1e3
    return found


def numbers(outcome: Outcome, options: ServeOptions, counted: dict[str, float]) -> dict[str, Any]:
    """All numbers of a run; `counted`: numbers from the server's own counters."""
    ended = [answer for answer in outcome.answers if not answer.cut]
    good = [answer for answer in ended if not answer.error]
    found: dict[str, Any] = {
        "requests": len(ended),
        "completed": len(good),
        "failed": len(ended) - len(good),
        "cut_off": len(outcome.answers) - len(ended),
        "failures": dict(Counter(answer.error for answer in ended if answer.error).most_common(20)),
        "finish_reasons": dict(Counter(answer.finish for answer in good)),
        "client_processes": outcome.processes,
        "client_cpu_s": outcome.cpu_s,
        **counted,
    }
    if not good:
        return found
    seconds = max(answer.end for answer in ended) - min(answer.sent for answer in ended)
    tokens_in = sum(max(0, answer.prompt_tokens) for answer in good)
    tokens_out = sum(answer.tokens for answer in good)
    late = [answer.sent - answer.due for answer in outcome.answers if answer.due] if options.request_rate else []
    found |= {
        "duration_s": seconds,
        "input_tokens": tokens_in,
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "output_tokens": tokens_out,
        "counted_by": "usage" if all(answer.completion_tokens >= 0 for answer in good) else "events",
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": tokens_out / seconds,
        "total_tokens_per_s": (tokens_in + tokens_out) / seconds,
        "most_open": most_open(outcome.answers),
        "client_cpu_us_per_token": outcome.cpu_s / max(1, tokens_out) * 1e6,
    }
    if late:
        found["sent_late_ms_max"] = max(late) * 1e3
    found |= distribution(good, options.percentiles)
    if options.goodput:
        met = sum(all(times_of(a).get(name, 0.0) <= limit for name, limit in options.goodput.items()) for a in good)
        found |= {"goodput_requests_per_s": met / seconds, "goodput_share": met / len(ended)}
    return found


def distribution(good: list[Reply], percentiles: tuple[int, ...]) -> dict[str, float]:
    """Mean, standard deviation and percentiles of each time."""
    each = [times_of(answer) for answer in good]
    found: dict[str, float] = {}
    for name in TIMES:
        values = [times[name] for times in each if name in times]
        if name == "itl":
            values = [gap * 1e3 for answer in good for gap in answer.gaps]
        if not values:
            continue
        found |= {f"{name}_ms_mean": float(np.mean(values)), f"{name}_ms_std": float(np.std(values))}
        found |= {f"{name}_ms_p{share}": float(np.percentile(values, share)) for share in percentiles}
        found[f"{name}_ms_max"] = max(values)
    return found


def most_open(answers: list[Reply]) -> int:
    """The largest number of requests that were open at one time."""
    changes = sorted([(answer.sent, 1) for answer in answers] + [(answer.end, -1) for answer in answers])
    return int(np.cumsum([change for _, change in changes]).max())


def table(found: dict[str, Any], options: ServeOptions) -> str:
    """The numbers as a text for the terminal."""
    lines = [f"{found['completed']} of {found['requests']} requests completed"]
    if found.get("interrupted"):
        lines[0] = f"interrupted: {lines[0]}"
    if "duration_s" in found:
        lines[0] += f" in {found['duration_s']:.2f} s, at most {found['most_open']} open"
        lines += [
            f"tokens: {found['input_tokens']:,} in ({found['cached_tokens']:,} from the cache), "
            f"{found['output_tokens']:,} out, counted by {found['counted_by']}",
            f"rates: {found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:,.1f} output tokens/s, "
            f"{found['total_tokens_per_s']:,.1f} tokens/s in all",
        ]
        heads = ["mean", "std", *(f"p{share}" for share in options.percentiles), "max"]
        lines += ["", f"{'ms':<{LABEL}}" + "".join(f"{head:>{CELL}}" for head in heads)]
        for name, text in TIMES.items():
            if f"{name}_ms_mean" in found:
                cells = (found[f"{name}_ms_{head}"] for head in heads)
                lines.append(f"{text:<{LABEL}}" + "".join(f"{cell:>{CELL}.2f}" for cell in cells))
        lines.append("")
    if "goodput_share" in found:
        share, rate = found["goodput_share"], found["goodput_requests_per_s"]
        lines.append(f"goodput: {rate:.2f} requests/s within the limits, {share:.1%} of all")
    if "draft_acceptance" in found:
        lines.append(f"drafts: {found['draft_acceptance']:.1%} of {found['draft_tokens']:,.0f} tokens accepted")
    if "prefix_cache_hit_rate" in found:
        lines.append(f"prefix cache: {found['prefix_cache_hit_rate']:.1%} of the tokens looked up were found")
    client = f"clients: {found['client_processes']} process(es), {found['client_cpu_s']:.2f} s of CPU"
    if "sent_late_ms_max" in found:
        client += f", requests sent at most {found['sent_late_ms_max']:.1f} ms late"
    lines.append(client)
    if found["cut_off"]:
        lines.append(f"cut off: {found['cut_off']} requests were open at the end; the numbers leave them out")
    lines += [f"failed, {count} x: {text}" for text, count in found["failures"].items()]
    return "\n".join(lines)


def request_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Each request for --json; `start_s` counts from the start of the run."""
    return [
        {
            "number": answer.number,
            "turn": answer.turn,
            "start_s": round(answer.sent - outcome.start, 6),
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.tokens,
            "cached_tokens": answer.cached_tokens,
            "finish_reason": answer.finish,
            "error": answer.error,
            "cut": answer.cut,
            **{f"{name}_ms": round(value, 3) for name, value in times_of(answer).items()},
            "gaps_ms": [round(gap * 1e3, 3) for gap in answer.gaps],
        }
        for answer in sorted(outcome.answers, key=lambda answer: answer.sent)
    ]
