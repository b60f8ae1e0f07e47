"""The cost of Ray in front: one replica of the embedded model, measured alternately alone and behind Ray.

`python -m tests.bench.behind_ray --json FILE` (needs the extra `ray`; `--proxy python` sends requests through Ray's
Python proxy instead of HAProxy). Both servers have the same flags; each is idle while the other is measured. The client
is `python -m server bench serve` with one process.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.bench.behind_haproxy import ask
from tests.end_to_end.process import ServerProcess
from tests.end_to_end.ray_replicas import SMALL
from tests.end_to_end.test_ray import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--proxy", choices=["haproxy", "python"], default="haproxy")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = [
        word
        for name, value in SMALL.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    server = ServerProcess(*flags).spawn().wait_ready()
    cluster = Cluster(args.proxy == "haproxy")
    try:
        cluster.order({"replicas": 1})
        urls = {"alone": f"http://127.0.0.1:{server.port}", "behind Ray": cluster.url}
        rows: list[dict[str, Any]] = []
        for streams in args.streams:
            requests = args.requests if streams > 1 else args.requests // 6
            for turn in range(args.turns):
                for name, url in list(urls.items())[:: 1 if turn % 2 else -1]:
                    found = ask(url, streams, requests, args.tokens)
                    print(streams, name, json.dumps(found)[:600], flush=True)
                    rows.append({"streams": streams, "name": name, "found": found})
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        cluster.close()
        server.stop()
        server.close()


if __name__ == "__main__":
    main()
