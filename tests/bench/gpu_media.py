"""Speech and films: how many times faster than real time recordings are transcribed, and how fast films decode.

    python -m tests.bench.gpu_media [--only speech,film] [--shape whisper-large-v3] [--streams 8] [--out DIR]

speech: a server with a Whisper of random weights in a separate process. --streams clients post recordings of noise of
--seconds each, one after the other, --rounds times. A window of 30 seconds gets an answer of --tokens tokens, about as
many as its speech would have. The factor is the seconds of all recordings divided by the elapsed seconds. /metrics
gives the time of each part; encoder and decode times are sums over windows that run in parallel.
film: a film of H.264 of 60 seconds at 30 frames a second, 1,920 x 1,080, that this script makes; 32 of its frames are
decoded as the server decodes them. Writes gpu_media.json into --out.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mm.decode.alarm import Alarm
from mm.decode.frames import FilmPlan, sample_indices
from mm.decode.video import FilmFile
from mm.limits import MediaLimits
from mm.transform.image import Scale
from server.bench.options import ServeOptions
from server.bench.random_media import pixels, sound
from tests.bench.served import Server, ask

AIMS = {"speech, times real time": 200, "film, s": 1.2}
BOUNDARY = "----recording"
RATE, KEPT = 30, 32  # frames per second, and frames sampled from a film
PARTS = ("mm_decode_seconds", "mm_prepare_seconds", "mm_encode_seconds", "mm_encoder_seconds", "mm_encoder_calls",
         "steps", "generation_tokens")  # fmt: skip


def form(recording: bytes, tokens: int) -> bytes:
    """A multipart body. The temperature is just above 0: at 0 the server would repeat poor text six times."""
    fields = {"model": "bench", "temperature": "0.01", "max_completion_tokens": str(tokens), "language": "en"}
    heads = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'
        for name, text in fields.items()
    ]
    file = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return "".join([*heads, file]).encode() + recording + f"\r\n--{BOUNDARY}--\r\n".encode()


def transcribe(port: int, body: bytes) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    connection.request("POST", "/v1/audio/transcriptions", body, kind)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text[:600]
    return str(json.loads(text)["text"])


def counted(port: int) -> dict[str, float]:
    """The counters of /metrics for media and steps since the server's start."""
    seen: dict[str, float] = {}
    for line in ask(port, "/metrics").splitlines():
        if line and line[0] != "#":
            name = line.partition("{")[0].partition(" ")[0].removeprefix("vllm:")
            name = name.removesuffix("_total").removesuffix("_sum")
            if name in PARTS:
                seen[name] = seen.get(name, 0.0) + float(line.rpartition(" ")[2])
    return seen


def speech(args: argparse.Namespace) -> dict[str, float]:
    """The real-time factor of --streams clients, and the time of each part."""
    draw = np.random.default_rng(0)
    drawn = [sound(draw, ServeOptions(sound_seconds=args.seconds)) for _ in range(args.streams)]
    bodies = [form(base64.b64decode(one["input_audio"]["data"]), args.tokens) for one in drawn]
    flags = ("--served-model-name", "bench", "--transcription-max-seconds", str(int(args.seconds) + 10))
    with tempfile.TemporaryDirectory() as name:
        server = Server(args.shape, args.device, Path(name), flags, 0.005)
        try:
            print(f"{args.shape}: ready in {server.ready_s:.1f} s", flush=True)
            transcribe(server.port, bodies[0])
            before, begun, cpu = counted(server.port), time.perf_counter(), server.cpu()

            def client(body: bytes) -> None:
                for number in range(args.rounds):
                    # Each sound differs, so that the caches do not contain it.
                    transcribe(server.port, body[:-1000] + bytes([number]) * 200 + body[-800:])

            clients = [threading.Thread(target=client, args=(body,)) for body in bodies]
            for one in clients:
                one.start()
            for one in clients:
                one.join()
            took = time.perf_counter() - begun
            loop_s, all_s = (late - early for late, early in zip(server.cpu(), cpu))
            spent = {part: value - before.get(part, 0.0) for part, value in counted(server.port).items()}
        finally:
            server.stop()
    factor = args.streams * args.rounds * args.seconds / took
    return {"speech, times real time": factor, "seconds": took, "loop CPU s": loop_s, "all CPU s": all_s, **spent}


def made(width: int, height: int, seconds: float) -> bytes:
    """A film: a picture that moves sideways, under noise that changes with each frame."""
    import av

    draw, count = np.random.default_rng(0), round(seconds * RATE)
    wide = pixels(draw, width + count, height).astype(np.int16)
    noise = draw.integers(-16, 17, (8, height, width, 1), dtype=np.int16)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
        stream.bit_rate = 3 * width * height
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_type = "AUTO"
        for at in range(count):
            frame = (wide[:, at : at + width] + noise[at % 8]).clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def film(args: argparse.Namespace) -> dict[str, float]:
    """Seconds from a film's bytes to its frames."""
    width, height = (int(side) for side in args.film_size.split("x"))
    data = made(width, height, args.film_seconds)

    def plan(total: int, fps: float, height: int, width: int) -> FilmPlan:
        return FilmPlan(sample_indices(total, min(KEPT, total)), Scale(height, width), total / fps / KEPT)

    times = []
    for _ in range(args.runs):
        begun = time.perf_counter()
        opened = FilmFile(data, "mp4", MediaLimits(), plan, Alarm(300.0))
        frames = opened.decode(Alarm(300.0), opened.num_decoders)
        opened.close()
        times.append(time.perf_counter() - begun)
        assert frames.shape == (min(KEPT, round(args.film_seconds * RATE)), height, width, 3), frames.shape
    megabits = len(data) * 8e-6 / args.film_seconds
    return {
        "film, s": statistics.median(times),
        "slowest, s": max(times),
        "Mbit/s": megabits,
        "cores": os.cpu_count() or 0,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="speech,film")
    parser.add_argument("--shape", default="whisper-large-v3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tokens", type=int, default=110, help="of a window's answer")
    parser.add_argument("--film-size", default="1920x1080")
    parser.add_argument("--film-seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=5, help="times that the film is decoded")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    report: dict[str, dict[str, float]] = {}
    for case in args.only.split(","):
        report[case] = {"speech": speech, "film": film}[case](args)
        for what, seen in report[case].items():
            print(f"{case}: {what} {seen:,.3f} (aim {AIMS.get(what, '-')})", flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu_media.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
