"""The command line: one Config from flags, file and environment; refusals in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.config import FailureLimits
from server import cli, docs
from server.bench.options import ServeOptions
from server.cli import parse
from server.flags.command_line import GROUPS, UsageError, all_flags, convert, flags_of
from server.flags.config import Config
from server.flags.foreign_flags import FOREIGN, SHORT, VALUES
from server.flags.help import COMMANDS, EXAMPLES, line


def config_of(*words: str) -> Config:
    return parse(words)[1]


def test_defaults_are_the_config_s_own():
    assert parse([]) == ("serve", Config())


def test_flags_take_dashes_underscores_and_equals_signs():
    for words in (["--max-model-len", "7"], ["--max_model_len", "7"], ["--max-model-len=7"]):
        assert config_of(*words).model.max_model_len == 7


@pytest.mark.parametrize(
    ("text", "tokens"), [("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("1m", 1000000), ("auto", 0), ("5", 5)]
)
def test_lengths_take_suffixes(text, tokens):
    assert config_of("--max-model-len", text).model.max_model_len == tokens


def test_sizes_in_bytes_take_suffixes_too():
    assert config_of("--kv-cache-memory-bytes", "2G").cache.kv_cache_memory_bytes == 2 << 30
    assert config_of("--max-request-bytes=10m").limits.max_request_bytes == 10_000_000
    assert config_of("--max-request-bytes", "64 MiB").limits.max_request_bytes == 64 << 20
    assert config_of("--kv-cache-memory-bytes=1.5GiB").cache.kv_cache_memory_bytes == 3 << 29


def test_booleans_switch_both_ways():
    assert config_of("--no-enable-prefix-caching").cache.enable_prefix_caching is False
    assert config_of("--enable_prefix_caching").cache.enable_prefix_caching is True
    assert config_of("--enable-prefix-caching=false").cache.enable_prefix_caching is False
    assert config_of("--no-enable-prefix-caching=true").cache.enable_prefix_caching is False
    assert config_of("--disable-access-log").server.disable_access_log is True


def test_lists_repeat_and_split():
    assert config_of("--allowed-origins", "a, b", "--allowed-origins", "c").server.allowed_origins == ("a", "b", "c")
    assert config_of("--api-key", "one", "--api-key", "two").server.api_key == ("one", "two")
    assert config_of("--media-ports", "[80, 8080]").media.media_ports == (80, 8080)
    assert config_of("--served-model-name", "a", "b", "--port", "1").server.served_model_name == ("a", "b")


def test_dicts_are_json():
    assert config_of("--limit-mm-per-prompt", '{"image": 2}').media.limit_mm_per_prompt == {"image": 2}
    longer = '{"image": {"count": 3, "width": 512}, "video": 1}'
    assert config_of("--limit-mm-per-prompt", longer).media.limit_mm_per_prompt == {"image": 3, "video": 1}
    assert config_of("--limit-mm-per-prompt", "image=2,video=0").media.limit_mm_per_prompt == {"image": 2, "video": 0}
    assert config_of("--hf-overrides", '{"a": {"b": null}}').model.hf_overrides == {"a": {"b": None}}
    words = ["--hf-overrides", '{"a": {"b": 1}}', "--hf-overrides.a.c=x", "--hf_overrides.rope_theta", "1e6"]
    assert config_of(*words).model.hf_overrides == {"a": {"b": 1, "c": "x"}, "rope_theta": 1e6}
    with pytest.raises(UsageError, match="must be a JSON object"):
        config_of("--limit-mm-per-prompt", "image")
    for wrong in ("pictures=1", "image=-1", "image=true", '{"image": {"width": 1}}'):
        with pytest.raises(UsageError, match="must be whole numbers of image, audio, video"):
            config_of("--limit-mm-per-prompt", wrong)


def test_media_that_no_prompt_may_hold_reach_the_engine():
    assert config_of().engine().without_media == ()
    assert config_of("--limit-mm-per-prompt", "image=0,audio=1").engine().without_media == ("image",)
    assert config_of("--language-model-only").engine().without_media == ("image", "audio", "video")


def test_the_model_may_stand_alone():
    assert config_of("/models/x").model.model == "/models/x"
    assert parse(["serve", "/models/x"])[1].model.model == "/models/x"
    assert parse(["info", "/models/x"])[0] == "info"
    assert config_of("/models/x/").model_names == ("/models/x",)
    assert Config().model_names == ("omniloop",)
    with pytest.raises(UsageError, match="already named"):
        config_of("/a", "/b")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--max-num-seq", "1"], "did you mean --max-num-seqs?"),
        (["--no-port"], "unknown flag --no-port"),
        (["-x"], "unknown flag"),
        (["--port.number", "1"], "unknown flag --port.number"),
        (["--tensor-paralel-size", "2"], "unknown flag --tensor-paralel-size"),
        (["--help=frog"], "--help=frog: no flag has this word; use --help=all, or a group: server, limits"),
        (["serv"], "serv: there is no such command, file or folder; did you mean serve?"),
        (["version"], "version: there is no such command, file or folder; did you mean --version?"),
        (["chek", "--port", "1"], "did you mean check?"),
        (["help"], "did you mean --help?"),
        (["docs", "modells"], "docs modells: there is no such page; use one of models, hardware"),
        (["--max-request-bytes", "64MB"], "must be a whole number, such as 64MiB"),
        (["--port", "x"], "--port x: must be a whole number"),
        (["--max-model-len", "infk"], "--max-model-len infk: must be a whole number"),
        (["--port", "70000"], "--port 70000: must be 0 to 65535"),
        (["--port"], "--port: needs a value"),
        (["--port", "--host"], "--port: needs a value"),
        (["--dtype", "int3"], "--dtype int3: must be one of auto, float32, bfloat16, float16"),
        (["--gpu-memory-utilization", "1.5"], "must be 0.01 to 1"),
        (["--gpu-memory-utilization", "nan"], "must be 0.01 to 1"),
        (["--cudagraph-capture-sizes", "1", "2", "/model"], "--cudagraph-capture-sizes /model: must be a whole number"),
        (["--cudagraph-capture-sizes", "0"], "--cudagraph-capture-sizes 0: must be at least 1"),
        (["--max-failed-steps", "0"], "must be at least 1"),
        (
            ["--mm-processor-kwargs", '{"speed": 1}'],
            "there is no option 'speed'; known are num_frames, fps, min_pixels",
        ),
        (
            ["--mm-processor-kwargs", '{"fps": 0}'],
            "fps must be a number above 0 and below 2147483648, not 0",
        ),
        (["--mm-processor-kwargs", '{"max_pixels": 1.5}'], "max_pixels must be a whole number above 0"),
        (["--mm-processor-kwargs", '{"use_audio_in_video": 1}'], "use_audio_in_video must be true or false, not 1"),
        (["--enable-prefix-caching=perhaps"], "must be true or false"),
        (["--enable-prefix-caching", "False"], "a switch takes no word; write --enable-prefix-caching=false"),
        (["--limit-mm-per-prompt", '{"image": {"width": 5}}'], "image=None: must be whole numbers"),
        (["--ssl-keyfile", "k"], "give both or neither"),
        (["--allowed-origins", "*", "--allow-credentials"], "name the origins"),
        (["--enable-dev-endpoints"], "--enable-dev-endpoints: needs --admin-api-key, or a loopback address"),
        (["--generation-config", "other"], "must be auto or vllm"),
        (["--override-generation-config", '{"beams": 1}'], "there is no default 'beams'; known are temperature, top_p"),
        (["--allowed-local-media-path", "/nowhere"], "--allowed-local-media-path /nowhere: there is no such folder"),
        (["--config", "/nowhere.yaml"], "No such file"),
    ],
)
def test_wrong_words_end_in_one_line(words, text, capsys):
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["check", "info"])
def test_ctrl_c_ends_a_command_in_one_line(command, monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, {"check": "check_model"}.get(command, command), interrupted)
    assert cli.main([command]) == 130
    assert capsys.readouterr().err == "omniloop: interrupted\n"


@pytest.mark.parametrize("words", [["8", "1", "2"], ["8,1", "2"], ["[8, 1, 2]"], ["2", "1", "2", "8"]])
def test_graph_sizes_are_given_in_any_order(words):
    assert config_of("--cudagraph-capture-sizes", *words, "--enforce-eager").engine().cudagraph_capture_sizes == (
        1,
        2,
        8,
    )


def test_the_engine_gets_what_it_should_do_about_bad_luck():
    engine = config_of("--max-failed-steps", "5", "--max-oom", "7", "--deterministic", "--enforce-eager").engine()
    assert engine.failures == FailureLimits(5, 7)
    assert engine.deterministic
    assert engine.enforce_eager
    assert engine.device_reserve_bytes == 1 << 30


def test_files_hold_the_same_names_and_the_command_line_wins(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "port: 9\nmax_model_len: 4k\nenable-prefix-caching: false\n"
        "allowed-origins: [a, b]\nlimit-mm-per-prompt: {image: 1}\n"
    )
    config = config_of("--config", str(path), "--port", "10")
    assert config.server.port == 10
    assert config.model.max_model_len == 4000
    assert config.cache.enable_prefix_caching is False
    assert config.server.allowed_origins == ("a", "b")
    assert config.media.limit_mm_per_prompt == {"image": 1}
    path.write_text("prot: 9\n")
    with pytest.raises(UsageError, match="did you mean --port"):
        config_of("--config", str(path))
    path.write_text("- 9\n")
    with pytest.raises(UsageError, match="names and values"):
        config_of("--config", str(path))


def read(tmp_path, text):
    """The Config of a configuration file."""
    path = tmp_path / "server.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return config_of("--config", str(path))


def test_a_file_may_hold_json_as_text_switches_turned_off_and_nulls(tmp_path):
    assert read(tmp_path, "limit-mm-per-prompt: '{\"image\": 2}'").media.limit_mm_per_prompt == {"image": 2}
    assert read(tmp_path, "limit_mm_per_prompt: image=2,video=0").media.limit_mm_per_prompt == {"image": 2, "video": 0}
    dated = read(tmp_path, "default-chat-template-kwargs: {today: 2026-01-02}\nrevision: 2026-01-02")
    assert dated.chat.default_chat_template_kwargs == {"today": "2026-01-02"}
    assert dated.model.revision == "2026-01-02"
    assert read(tmp_path, "no-enable-prefix-caching: true").cache.enable_prefix_caching is False
    assert read(tmp_path, "dtype:\nserved-model-name: null\nkv-transfer-config: null") == Config()


@pytest.mark.parametrize("text", ["api-key:", "api-key-file: null"])
def test_s02_a_key_that_a_file_leaves_empty_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="is empty; give a value"):
        read(tmp_path, text)


def test_a_file_that_is_no_text_is_refused_and_so_is_no_name(tmp_path):
    with pytest.raises(UsageError, match="is not valid YAML"):
        read(tmp_path, b"\xff\xfe\0")
    with pytest.raises(UsageError, match="No such file"):
        config_of("--config=")


def test_keys_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("SERVER_API_KEY", "three")
    assert config_of("--api-key", "one").server.api_key == ("one", "three")
    monkeypatch.setenv("SERVER_API_KEY", "three, four\n")
    assert config_of("--api-key", "one, two").server.api_key == ("one", "two", "three", "four")


@pytest.mark.parametrize("words", [("--api-key", ""), ("--api-key=",), ("--api-key-file", ""), ("--api-key", " ,")])
def test_s02_an_empty_key_is_refused(words):
    with pytest.raises(UsageError, match=r"--api-key(-file)?: is empty"):
        config_of(*words)


@pytest.mark.parametrize(
    "name", ["admin-api-key", "ssl-keyfile", "host", "uds", "allowed-hosts", "allowed-media-domains"]
)
def test_s02_nothing_that_keeps_others_out_may_be_empty(name):
    """An unset shell variable would leave the flag empty."""
    with pytest.raises(UsageError, match=f"--{name}: is empty; give a value, or leave the flag out"):
        config_of(f"--{name}=")


@pytest.mark.parametrize("text", ["", ",", "\n"])
def test_s02_an_empty_key_in_the_environment_is_refused(monkeypatch, text):
    monkeypatch.setenv("SERVER_API_KEY", text)
    with pytest.raises(UsageError, match="SERVER_API_KEY: is set and holds no key"):
        config_of()


def test_trusted_proxies_are_addresses_and_networks():
    assert config_of("--trusted-proxies", "10.0.0.1,fd00::/8,unix").server.trusted_proxies == (
        "10.0.0.1", "fd00::/8", "unix",
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"--trusted-proxies proxy\.local: must be an address"):
        config_of("--trusted-proxies", "proxy.local")


def printed(*words: str) -> str:
    """The output of a command line that prints and exits before the server starts."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 0
    return text.getvalue()


def test_help_of_one_screen_shows_commands_common_flags_and_examples():
    text = printed("--help")
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert all(f"  {name} " in text for name in COMMANDS)
    assert len(re.findall(r"^  --[a-z]", text, re.MULTILINE)) == 15 + 1  # the 16th flag is --config
    assert len(re.findall(r"^  omniloop", text.partition("examples:")[2].partition("more:")[0], re.MULTILINE)) == 3
    for words, _ in EXAMPLES:
        assert parse(words.split()[1:])[0] in COMMANDS


def test_help_of_everything_names_every_flag_with_its_default():
    text = printed("--help=all")
    for name, flag in all_flags().items():
        assert line(flag) in text
        assert f"--{name}" in text
    assert re.search(r"--max-request-bytes N +body of a route with media \(64 MiB\)", text)


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group_has_its_flags_and_no_others(group):
    found = set(re.findall(r"^  --([a-z-]+)", printed(f"--help={group}"), re.MULTILINE))
    assert found == {name for name, flag in all_flags().items() if flag.group == group}


def test_groups_are_those_of_the_configuration():
    assert set(GROUPS) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("command", ["serve", "check", "info"])
def test_commands_have_a_help_of_their_own(command):
    assert printed(command, "--help").startswith(f"usage: omniloop {command} ")
    assert printed(command, "--help=all") == printed("--help=all")


def test_a_folder_with_the_name_of_a_misspelt_command_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serv").mkdir()
    assert parse(["serv"])[1].model.model == "serv"


def test_help_of_a_word_shows_the_flags_that_speak_of_it_and_version_the_version(capsys):
    from server import __version__

    for word, text in ("--help=max_num_seqs", "  --max-num-seqs N "), ("--version", f"omniloop {__version__}"):
        with pytest.raises(SystemExit) as ended:
            parse([word])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert shown.startswith(text)
        assert shown.count("\n") == 1


def test_every_flag_of_a_group_reaches_the_engine():
    config = config_of("--block-size", "32", "--max-num-seqs", "3", "--max-num-batched-tokens", "1k", "--seed", "5")
    engine = config.engine()
    assert (engine.block_size, engine.max_num_seqs, engine.max_num_batched_tokens, engine.seed) == (32, 3, 1000, 5)


def test_version_is_the_distribution_s():
    import tomllib

    from server import __version__

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["version"] == __version__


def test_no_flag_is_dead():
    sources = "".join(
        path.read_text() for path in Path(cli.__file__).parent.rglob("*.py") if path.name not in ("cli.py", "config.py")
    )
    config = (Path(cli.__file__).parent / "flags" / "config.py").read_text().partition("class Config:")[2]
    for flag in cli.all_flags().values():
        if flag.group != "media":  # mm reads the flags of media
            assert f".{flag.field}" in sources + config, f"nothing reads --{flag.name}"


def test_a_key_meant_for_vllm_does_not_leave_the_server_open(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(UsageError, match="VLLM_API_KEY: is not read here; name it SERVER_API_KEY") as refused:
        config_of()
    assert "secret" not in str(refused.value)
    assert config_of("--api-key", "a").server.api_key == ("a",)
    assert parse(["check"])[0] == "check"
    monkeypatch.setenv("SERVER_API_KEY", "b")
    assert config_of().server.api_key == ("b",)


@pytest.mark.parametrize(
    "words",
    [
        ["-pp", "1"],
        ["--data_parallel_size=1", "--pipeline-parallel-size", "1"],
        ["--enable-chunked-prefill"],
        ["--enable-chunked-prefill=True", "--disable-log-requests"],
        ["--swap-space", "4"],
        ["-pp=1", "-O3"],
        ["--enable-tokenizer-info-endpoint", "--enable-server-load-tracking"],
        ["--no-enable-prompt-adapter", "--enable-sleep-mode=false", "--no-disable-hybrid-kv-cache-manager"],
        ["-pcp", "1", "--enable-offline-docs", "-cb", "--log-error-stack", "--no-mmap=false"],
        ["--mlock", "--no-mlock", "-cc.mode=3", "--compilation-config.mode", "3", "--attention-backend", "FLASH_ATTN"],
    ],
)
def test_a_flag_of_another_server_that_asks_for_what_holds_is_taken_and_reported(words, capsys):
    assert config_of(*words, "--port", "1").server.port == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == sum(word.startswith("-") for word in words)
    assert all(line.endswith("the flag changes nothing") for line in told)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            ["--pipeline-parallel-size", "2"],
            "--pipeline-parallel-size 2: layers cannot be put on different GPUs: use --tensor-parallel-size",
        ),
        (["-pp", "two"], "--pipeline-parallel-size two: layers cannot be put on different GPUs"),
        (["-tp", "two"], "--tensor-parallel-size two: must be a whole number"),
        (["-tp", "0"], "--tensor-parallel-size 0: must be at least 1"),
        (["-tp", "-2"], "--tensor-parallel-size -2: must be at least 1"),
        (["--no-enable-prompt-adapter=false"], "--no-enable-prompt-adapter false: only LoRA adapters are served"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill: prompts are always split"),
        (["--enable-chunked-prefill=false"], "--enable-chunked-prefill false: prompts are always split"),
        (["--uvicorn-log-level", "loud"], "--uvicorn-log-level loud: --log-level loud: must be one of"),
        (["--enable-prompt-adapter"], "--enable-prompt-adapter: only LoRA adapters are served"),
        (["--ctx-size"], "--ctx-size: needs a value"),
        (["--cache-type-k", "q8_0"], "--cache-type-k q8_0: use --kv-cache-dtype auto, bfloat16 or fp8"),
        (["--kv-cache-dtype", "float16"], "--kv-cache-dtype float16: 16-bit values are bfloat16"),
    ],
)
def test_a_flag_of_another_server_is_refused_with_what_does_the_same_here(words, advice):
    with pytest.raises(UsageError, match=re.escape(advice)):
        parse(words)


def test_a_value_that_only_another_server_knows_is_taken_for_what_it_means(tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    file.write_text("dtype: float\n")
    words = ["--config", str(file), "--structured-outputs-backend", "xgrammar", "--max-model-len", "-1"]
    words += ["--kv-cache-dtype", "bf16"]
    config = config_of(*words)
    model = config.model
    assert config.cache.kv_cache_dtype == "bfloat16"
    assert (model.dtype, model.structured_outputs_backend, model.max_model_len) == ("float32", "auto", 0)
    assert (
        capsys.readouterr().err.splitlines()[0] == "omniloop: --structured-outputs-backend xgrammar: "
        "one library compiles all grammars; taken as auto"
    )


def test_a_file_may_hold_flags_of_another_server(tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    file.write_text("pipeline-parallel-size: 1\nenable_chunked_prefill: true\nenable-prompt-adapter: false\nport: 5\n")
    assert config_of("--config", str(file)).server.port == 5
    assert capsys.readouterr().err.count("the flag changes nothing") == 3
    file.write_text("pipeline-parallel-size: 2\n")
    with pytest.raises(UsageError, match=r"--pipeline-parallel-size 2 in .*flags\.yaml: layers cannot"):
        config_of("--config", str(file))


def test_the_advice_for_flags_of_other_servers_names_flags_of_this_one():
    flags = {*all_flags(), *(f"no-{name}" for name in all_flags())}
    assert not flags & {*FOREIGN}
    assert {*SHORT.values()} <= {*FOREIGN, *flags}
    named = {own: {*re.findall(r"--([a-z][a-z-]+)", entry.advice)} for own, entry in FOREIGN.items()}
    assert {name for own, names in named.items() for name in names - {own}} <= flags  # or another value of its own
    here = flags_of(ServeOptions, "serve") | all_flags()
    for name, values in VALUES.items():
        for text, entry in values.items():
            if entry.value:
                assert convert(here[name], text) == convert(here[name], entry.value)


def test_the_page_for_people_who_come_from_vllm_names_flags_that_exist():
    text = docs.text("flags")
    same = text.split("mean the same here:")[1].split("|")[0]
    assert {*re.findall(r"--([a-z-]+)", same)} <= {*all_flags()}
    theirs = set(re.findall(r"^\| `--([a-z-]+)", text.split("| vLLM | omniloop |")[1].split("## ")[0], re.MULTILINE))
    assert theirs <= {*all_flags(), *FOREIGN, *(f"no-{name}" for name in all_flags())}


@pytest.mark.parametrize("asked", [None, "3"])
def test_products_of_numpy_have_one_thread_unless_the_operator_says_more(asked):
    """Several threads of the server multiply at once; OpenBLAS reads the variable when numpy is imported."""
    run = "import atexit, os, sys, server.__main__ as m"
    run += "; atexit.register(lambda: print(os.environ['OPENBLAS_NUM_THREADS']))"
    run += "; assert 'numpy' not in sys.modules; sys.argv[1:] = ['--version']; m.start()"
    settings = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    settings |= {"OPENBLAS_NUM_THREADS": asked} if asked else {}
    done = subprocess.run([sys.executable, "-c", run], env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == (asked or "1")
