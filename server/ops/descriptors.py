"""Descriptors: how many connections this process can hold in addition to the files that it opens (RLIMIT_NOFILE).

Owner: main thread, once, before the socket is served. In: --max-connections. Out: the same number, or fewer if the
system allows fewer files; the soft limit is raised up to the hard limit. The reserved descriptors are for files,
fetches, helpers and late imports, which would otherwise fail when many connections are open.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("omniloop")

RESERVED = 256  # descriptors that connections never take; most of a small limit


def room_for(connections: int) -> int:
    """The number of connections to accept."""
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
