"""run-batch: a file of requests is answered without a server, and an interrupted run goes on."""

from __future__ import annotations

import orjson
import pytest

from engine.base.errors import ConfigError
from server.cli import main
from server.start.run_batch import answer, run_batch
from tests.server.conftest import config_of
from tests.server.routes.test_batches import ASK, CHAT, lines, same

pytestmark = pytest.mark.asyncio(loop_scope="session")
HELLO = {"messages": ASK, "temperature": 0, "max_tokens": 6}


def read(path):
    return {line["custom_id"]: line for line in map(orjson.loads, path.read_bytes().splitlines())}


async def test_a_file_is_answered_once_and_failures_have_their_own(client, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    content = lines(CHAT, [HELLO, {"messages": []}, {"messages": ASK, "max_tokens": 1}])
    source.write_bytes(content + content.replace(b'"l', b'"m'))
    said = []
    assert await answer(client.state, source, target, 6, said.append) == 1
    found, failed = read(target), read(tmp_path / "out.errors")
    assert (found.keys(), failed.keys()) == ({"l0", "l2", "m0", "m2"}, {"l1", "m1"})
    alone = await client.post(CHAT, HELLO)
    assert same(found["l0"]["response"]["body"]) == same(alone.json())
    assert failed["l1"]["response"]["status_code"] == 400
    before = target.read_bytes()
    target.write_bytes(before + b'{"custom_id": "m')  # an earlier run was cut here
    (tmp_path / "out.errors").unlink()
    source.write_bytes(content)
    assert await answer(client.state, source, target, 3, said.append) == 1
    assert (target.read_bytes(), read(tmp_path / "out.errors").keys()) == (before, {"l1"})
    assert said[-1].startswith(f"4 answers in {target}, 1 failures")


async def test_a_wrong_file_is_named_by_line_before_anything_is_loaded(tmp_path, capsys):
    source = tmp_path / "in"
    source.write_bytes(lines(CHAT, [HELLO]) + b"{\n" + lines("/metrics", [{"model": "other"}]))
    assert await run_batch(config_of(), source, tmp_path / "out", print) == 1
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2][:5] for line in printed] == ["in:2:", "in:3:", "in:3:", "in:3:"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [[], ["-i", "in"], ["-i", "in", "-o", "out", "--no-such-flag"]])
async def test_missing_files_and_wrong_flags_are_refused(words, capsys):
    assert main(["run-batch", *words]) == 2
    assert "omniloop:" in capsys.readouterr().err


async def test_files_that_cannot_be_read_or_written_are_named_before_anything_is_loaded(tmp_path):
    source = tmp_path / "in"
    with pytest.raises(ConfigError, match=r"-i .*/in: No such file or directory; name a file"):
        await run_batch(config_of(), source, tmp_path / "out", print)
    source.write_bytes(lines(CHAT, [HELLO]))
    for target in (tmp_path / "none" / "out", tmp_path):
        with pytest.raises(ConfigError, match=r"-o .*: no file can be written there"):
            await run_batch(config_of(), source, target, print)


async def test_help_names_the_files(capsys):
    assert main(["run-batch", "--help"]) == 0
    text = capsys.readouterr().out
    assert "-i IN -o OUT" in text
    assert "--output-file" in text
