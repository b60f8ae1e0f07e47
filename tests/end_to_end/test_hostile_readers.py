"""Readers of the log or of standard output that stop reading: the server goes on and later logs what it dropped."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests import tiny
from tests.end_to_end.hostile import GAP_S, Neighbour, ask
from tests.end_to_end.process import ROOT, SMALL

COMMAND = [sys.executable, "-m", "server", "--model", str(tiny.checkpoint("omni")), "--port", "0", *SMALL]
COMMAND += ["--host", "127.0.0.1", "--no-disable-access-log", "--log-rate", "100000"]


def test_s09_a_log_without_a_reader_stops_nothing():
    reading, writing = os.pipe()
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=writing, text=True, cwd=ROOT)
    os.close(writing)
    try:
        assert process.stdout is not None
        found = re.match(r"Listening on \S+:(\d+)", process.stdout.readline())
        assert found
        port = int(found[1])
        with Neighbour(port, process.pid) as neighbour:
            for _ in range(700):  # a pipe takes 64 KiB of lines
                assert ask(port, "GET", "/version", headers=f"X-Request-Id: {'a' * 120}\r\n")[0] == 200
                assert ask(port, "GET", "/v1/models")[0] == 200
        assert neighbour.answers > 10
        assert neighbour.slowest < GAP_S
        assert b"log_lines_dropped_total 0.0" in ask(port, "GET", "/metrics")[1]
        process.terminate()
        assert process.wait(30) == 0, "the exit waits for no reader"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(reading)


def test_a_full_disk_under_standard_output_ends_no_start():
    with open("/dev/full", "w", encoding="ascii") as full, open(os.devnull) as nothing:
        process = subprocess.Popen(COMMAND, stdout=full, stderr=subprocess.PIPE, stdin=nothing, text=True, cwd=ROOT)
        try:
            assert process.stderr is not None
            while "standard output takes no lines" not in (line := process.stderr.readline()):
                assert line, "it ended"
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
