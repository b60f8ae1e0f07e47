"""Descriptors: how many connections this process can hold in addition to the files that it opens (RLIMIT_NOFILE).

Owner: main thread, once, before the socket is served. In: --max-connections. Out: as many, or fewer where the system
allows fewer files; the soft limit is raised as far as the hard one lets it. What is left over is for files, fetches,
helpers and libraries that are imported late: without it, a crowd of connections makes those fail.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("omniloop")

RESERVED = 256  # descriptors that connections never take; of a small limit most


def room_for(connections: int) -> int:
    """How many connections to take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    room = soft - min(RESERVED, soft * 5 // 8)
    if room < connections:
        log.warning(
            "--max-connections %d: this process may open %d files, so it takes %d connections; raise ulimit -n to %d",
            connections,
            soft,
            room,
            needed,
        )
    return min(connections, room)
