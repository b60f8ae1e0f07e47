"""The server of served.py without the table of other servers' fields: every name of a body counts as known.

gpu_dialects compares it with a server that has the table. Run as tests/bench/watched.py.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from server import cli
from server.http import body
from server.start import process
from tests.bench.watched import WatchedLifespan


class Every(frozenset[bytes]):
    """The names of all fields."""

    def issuperset(self, names: Collection[object]) -> bool:
        return True


if __name__ == "__main__":
    WatchedLifespan.path, WatchedLifespan.beat_s = sys.argv[1], float(sys.argv[2])
    process.Lifespan = WatchedLifespan  # type: ignore[misc]
    every = Every()
    body.known_names = lambda kind: every  # type: ignore[assignment]
    sys.exit(cli.main(sys.argv[3:]))
