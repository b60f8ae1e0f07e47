"""Command lines of other servers: each flag starts here, or is named with what does the same; all at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server import cli
from server.cli import parse
from server.flags.arguments import Arguments
from server.flags.command_line import UsageError, all_flags
from server.flags.foreign_flags import FOREIGN, long_name

FORMS = [
    line for line in (Path(__file__).parent / "foreign_forms.txt").read_text().splitlines() if line.startswith("-")
]
OURS = ("-v",)  # prints the version here


def words_of(form: str) -> list[str]:
    name, _, value = form.partition(" ")
    return [name, *([value] if value[:1] in ("{", "[") else value.split())]


def refusal(*words: str) -> str:
    try:
        parse(words)
    except UsageError as error:
        return str(error)
    return ""


def name_of(form: str) -> str:
    """The flag's name in errors."""
    name = words_of(form)[0]
    name = name[2:] if name.startswith("--") else long_name(name[1:])
    return "--" + re.split("[=]", name.replace("_", "-"))[0]


def test_the_forms_are_those_of_three_servers():
    assert len(FORMS) > 260
    assert {"--omni", "--tp 1", "-ngl 99"} <= {*FORMS}


@pytest.mark.parametrize("form", [form for form in FORMS if form not in OURS])
def test_a_form_starts_or_is_answered_with_advice(form, capsys):
    said = refusal(*words_of(form))
    assert "unknown flag" not in said
    assert "\n" not in said
    if said:
        assert said.startswith(name_of(form)), said
        assert len(said) > len(form) + 10
        return
    printed = capsys.readouterr().err
    assert printed.count("\n") <= 2
    for line in printed.splitlines():
        assert line.startswith("omniloop: --")
        assert line.endswith("the flag changes nothing") or "taken as " in line


@pytest.mark.parametrize("first", range(0, len(FORMS), 10))
def test_lines_of_ten_forms_name_every_flag_that_stops_them(first, capsys):
    forms = [form for form in FORMS[first : first + 10] if form not in OURS]
    alone = {form: refusal(*words_of(form)) for form in forms}
    words = [word for form in forms for word in words_of(form)]
    expected = {said for said in alone.values() if said}
    capsys.readouterr()
    if not expected:
        parse(words)
        return
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert {f"omniloop: {said}" for said in expected} <= set(lines)
    others = [line for line in lines if line.removeprefix("omniloop: ") not in expected]
    assert all(line.endswith("the flag changes nothing") or "taken as " in line for line in others), others


TAKEN = [
    ("--context-length 8192", ("model", "max_model_len", 8192)),
    ("-c 4096", ("model", "max_model_len", 4096)),
    ("-c 0", ("model", "max_model_len", 0)),
    ("-m x.gguf", ("model", "model", "x.gguf")),
    ("-hf ORG/NAME:Q8_0", ("model", "model", "ORG/NAME:Q8_0")),
    ("-s 7", ("model", "seed", 7)),
    ("-ngl 0", ("model", "device", "cpu")),
    ("-ngl 99", ("model", "device", "auto")),
    ("--mem-fraction-static 0.85", ("cache", "gpu_memory_utilization", 0.85)),
    ("--page-size=32", ("cache", "block_size", 32)),
    ("-ctk bf16", ("cache", "kv_cache_dtype", "bfloat16")),
    ("--disable-radix-cache", ("cache", "enable_prefix_caching", False)),
    ("--disable-radix-cache=false", ("cache", "enable_prefix_caching", True)),
    ("--no-disable-radix-cache", ("cache", "enable_prefix_caching", True)),
    ("--disable-cuda-graph", ("scheduler", "enforce_eager", True)),
    ("--cuda-graph-bs 1 2 4", ("scheduler", "cudagraph_capture_sizes", (1, 2, 4))),
    ("-np -1", ("scheduler", "max_num_seqs", 0)),
    ("-t 4", ("model", "num_threads", 4)),
    ("--alias a,b", ("server", "served_model_name", ("a", "b"))),
    ("--is-embedding", ("pooling", "runner", "pooling")),
    ("--task embed", ("pooling", "runner", "pooling")),
    ("--pooling mean", ("pooling", "pooler_config", {"pooling_type": "MEAN"})),
    ("--temp 0.5 --top-k 20", ("model", "override_generation_config", {"temperature": 0.5, "top_k": 20})),
    ("-n 512", ("model", "override_generation_config", {"max_new_tokens": 512})),
    ("-n -1", ("model", "override_generation_config", {})),
    ("--reasoning-budget 0", ("chat", "default_chat_template_kwargs", {"enable_thinking": False})),
    ("--reasoning-format none", ("chat", "reasoning_parser", "none")),
    ("--structured-outputs-config.backend xgrammar", ("model", "structured_outputs_backend", "auto")),
    ("--uvicorn-log-level trace", ("server", "log_level", "debug")),
    ("-fa --port 8000", ("server", "port", 8000)),
    ("-fa on --port 8000", ("server", "port", 8000)),
    (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path x --speculative-num-steps 3"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ("scheduler", "speculative_config", {"method": "eagle3", "model": "x", "num_speculative_tokens": 3}),
    ),
    (
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 65",
        ("scheduler", "speculative_config", {"method": "ngram", "num_speculative_tokens": 64}),
    ),
    (
        "--spec-type draft-mtp --spec-draft-n-max 2",
        ("scheduler", "speculative_config", {"method": "mtp", "num_speculative_tokens": 2}),
    ),
    (
        "-md x --draft-max 5",
        ("scheduler", "speculative_config", {"model": "x", "num_speculative_tokens": 5}),
    ),
    ("--spec-draft-model x --spec-type none", ("scheduler", "speculative_config", {"model": "x"})),
    ("--any-model-name", ("server", "any_model_name", True)),
]


@pytest.mark.parametrize(("line", "expected"), TAKEN)
def test_a_flag_with_the_meaning_of_ours_is_taken_as_ours(line, expected, capsys):
    group, field, value = expected
    config = parse(line.split())[1]
    assert getattr(getattr(config, group), field) == value
    if line.split()[0] not in ("--any-model-name", "-m", "-s"):
        assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--speculative-eagle-topk 4", "drafts are chains, not trees"),
        ("--speculative-algorithm EAGLE", "takes DFLASH, DSPARK, EAGLE3, NEXTN, NGRAM, STANDALONE here"),
        ("--spec-type draft-dflash", "takes draft-eagle3, draft-mtp"),
        ("--speculative-num-draft-tokens 1", "give 2 to 65"),
        ("--speculative-token-map x", "read from its files"),
        ("--draft-p-min 0.8", "whatever their probability"),
    ],
)
def test_drafts_of_another_kind_are_refused_by_name(line, words):
    said = refusal(*line.split())
    assert said.startswith(line)
    assert words in said


def test_what_is_taken_is_reported_and_errors_name_both_flags(capsys):
    parse(["--context-length", "8k"])
    assert capsys.readouterr().err == "omniloop: --context-length 8k: taken as --max-model-len 8k\n"
    assert refusal("-c", "x") == "--ctx-size x: --max-model-len x: must be a whole number"


def test_all_wrong_flags_are_reported_at_once(tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    file.write_text("pp-size: 2\ncontext-length: 4k\nprot: 1\nblock-size: many\n")
    words = ["--prto", "8001", "--port", "x", "--config", str(file), "-pp", "4", "more", "--ssl-keyfile", "k"]
    assert cli.main(words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "taken as" not in line]
    assert [line.partition(":")[2].split()[:2] for line in lines] == [
        ["unknown", "flag"],
        ["--port", "x:"],
        ["--pipeline-parallel-size", "4:"],
        ["--pp-size", "2"],
        ["unknown", "flag"],
        ["--block-size", "many:"],
        ["--ssl-keyfile", "and"],
    ]
    assert lines[0] == "omniloop: unknown flag --prto; did you mean --port?"


def test_a_file_takes_renamed_flags_too(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("context-length: 4k\ndisable-radix-cache: true\ntemp: 0.5\nswap-space: 4\nis_embedding: false\n")
    config = parse(["--config", str(file)])[1]
    assert config.model.max_model_len == 4000
    assert not config.cache.enable_prefix_caching
    assert config.model.override_generation_config == {"temperature": 0.5}
    assert config.pooling.runner == "auto"


def test_near_names_are_our_own():
    assert refusal("--context-lenght", "1") == "unknown flag --context-lenght"
    assert refusal("--max-model-lenn", "1").endswith("did you mean --max-model-len?")


def test_every_entry_that_is_taken_names_a_flag():
    for name, entry in FOREIGN.items():
        if entry.as_:
            value = next(iter(entry.values), "1") if not entry.switch else ""
            ours = entry.as_ if entry.switch else f"{entry.as_}={entry.values.get(value, value)}"
            reader = Arguments(all_flags())
            try:
                reader.take(ours, iter(()))
            except UsageError as error:
                assert "unknown flag" not in str(error), name  # noqa: PT017
