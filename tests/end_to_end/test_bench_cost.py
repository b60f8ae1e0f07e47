"""bench serve costs less than a fast server does: 256 streams, by the kernel's count of CPU seconds."""

from __future__ import annotations

from server.bench import serve
from server.bench.options import ServeOptions
from server.bench.output import on_loop
from tests import tiny
from tests.bench.served import cpu_of_process
from tests.end_to_end.process import serving

FLAGS = ("--num-threads", "1", "--max-num-seqs", "256", "--num-gpu-blocks-override", "2048", "--disable-access-log")


def test_256_streams_cost_the_clients_less_than_the_server():
    with serving("--model", str(tiny.checkpoint("qwen3")), *FLAGS) as process:
        asked = ServeOptions(
            url=f"http://127.0.0.1:{process.port}",
            endpoint="completions",
            num_prompts=256,
            max_concurrency=256,
            vocab_size=320,
            input_len=8,
            output_len=64,
            ignore_eos=True,
            temperature=0.0,
        )
        before = cpu_of_process(process.pid)
        found, _ = on_loop(serve.measure(asked))
        server_s = cpu_of_process(process.pid) - before
    assert found["output_tokens"] == 256 * 64, found["failures"]
    assert 0 < found["client_cpu_s"] < server_s
