"""Flags of adapters: forms of --lora-modules, and flags that need each other."""

from __future__ import annotations

import json

import pytest

from server.cli import parse
from server.flags.command_line import UsageError
from server.flags.lora_flags import module_of

DIGEST = "AB" * 32


def lora(*words: str):
    return parse([*words, "--host", "127.0.0.1"])[1].lora


def test_modules_have_three_forms_and_repeat():
    entry = {"name": "b", "path": "/x, y", "base_model_name": "base", "sha256": DIGEST}
    found = lora("--enable-lora", "--lora-modules", "a=/data/a", json.dumps(entry), "--lora-modules", "c=org/c@v1/sub")
    assert [tuple(module_of(text)) for text in found.lora_modules] == [
        ("a", "/data/a", ""), ("b", "/x, y", DIGEST.lower()), ("c", "org/c@v1/sub", ""),
    ]  # fmt: skip
    found = lora("--enable-lora", "--lora-modules", json.dumps([{"name": "a", "path": "b"}]))
    assert module_of(found.lora_modules[0]).path == "b"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lora-modules", "a=b"], "--lora-modules: needs --enable-lora"),
        (["--lora-dir", "/tmp"], "--lora-dir: needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "NAME=FOLDER"),
        (["--enable-lora", "--lora-modules", "a b=c"], "characters"),
        (["--enable-lora", "--lora-modules", "a=b", "a=c"], "two models have this name"),
        (["--enable-lora", "--served-model-name", "a", "--lora-modules", "a=c"], "two models have this name"),
        (["--enable-lora", "--lora-modules", "{"], "not valid JSON"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "name and path"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": "b", "x": 1}'], "name and path"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": "b", "sha256": "1"}'], "64 hexadecimal"),
        (["--enable-lora", "--enable-runtime-lora"], "needs --lora-dir"),
        (["--enable-lora", "--lora-hub"], "needs --enable-runtime-lora"),
        (["--enable-lora", "--max-loras", "0"], "--max-loras"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(words, said):
    with pytest.raises(UsageError, match=said):
        lora(*words)


def test_runtime_loads_need_a_key_beyond_loopback(tmp_path):
    words = ["--enable-lora", "--enable-runtime-lora", "--lora-dir", str(tmp_path), "--host", "0.0.0.0"]
    with pytest.raises(UsageError, match="admin-api-key"):
        parse(words)
    parse([*words, "--admin-api-key", "secret"])


def test_the_engine_gets_the_settings():
    def settings(*words: str):
        return parse(["--host", "127.0.0.1", *words])[1].engine().lora

    assert settings() is None
    found = settings(
        "--enable-lora", "--max-loras", "3", "--lora-modules", "a=b", "--lora-target-modules", "q_proj,v_proj"
    )
    assert (found.max_loras, found.max_rank, found.max_cpu_loras) == (3, 16, 3)
    assert found.targets == ("q_proj", "v_proj")
    assert found.named == (("a", "b"),)
    assert settings("--enable-lora", "--lora-modules", "a=b", "--lora-dir", ".").named == ()
    assert settings("--enable-lora", "--max-cpu-loras", "9", "--lora-max-bytes", "1MiB").max_bytes == 1 << 20
