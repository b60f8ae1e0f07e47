"""Clients that need very little CPU: `python -m tests.bench.readers PORT STREAMS SECONDS [TOKENS]`.

One thread, one selector, raw sockets; events are counted by their marker and never parsed, so that the server gets the
CPU. Each client sends its next request when its last one has ended; with TOKENS 0 it sends one request for the longest
possible answer. Prints the number of events at the end.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import sys
import time

END = b"data: [DONE]"


def request(number: int, tokens: int) -> bytes:
    """A short conversation for each client; lengths differ, so that streams do not all end and begin together."""
    body = {
        "messages": [{"role": "user", "content": f"client {number} asks {random.random()}"}],
        "max_tokens": random.randint(tokens // 2, tokens + tokens // 2) if tokens else 1 << 20,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode() + data


def read(port: int, streams: int, seconds: float, tokens: int) -> int:
    """Runs the clients; returns the number of received events."""
    waiting = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    for number in range(streams):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(request(number, tokens))
        client.setblocking(False)
        tails[client] = b""
        waiting.register(client, selectors.EVENT_READ, number)
    until, events = time.monotonic() + seconds, 0
    while tails and time.monotonic() < until:
        for key, _ in waiting.select(0.2):
            client: socket.socket = key.fileobj  # type: ignore[assignment]
            data = client.recv(1 << 16)
            events += data.count(b"data: ")
            tail = tails[client] + data
            tails[client] = tail[1 - len(END) :]
            if not data:
                waiting.unregister(client)
                del tails[client]
                client.close()
            elif END in tail:
                tails[client] = b""
                client.sendall(request(key.data, tokens))
    for client in tails:
        client.close()
    return events


if __name__ == "__main__":
    print(read(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 100))
