"""--model ORG/NAME: what is fetched from a hub, what is reused, and every way in which fetching can fail."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from urllib.request import Request, urlopen

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from engine.weights.files import open_checkpoint
from server import cli
from server.flags.config import Config, ModelFlags
from server.start import folders
from server.start import hub as hub_module
from server.start.folders import hub_of, is_hub_name, located
from server.start.hub import Hub, fetch
from tests import tiny
from tests.end_to_end.process import ROOT, SMALL, ServerProcess
from tests.server.fake_hub import TOKEN, FakeHub, asked_in_place_of_the_real

ANY = Hub()
NOT_READ = ("pytorch_model.bin", "README.md", "tf_model.h5", "original/params.json", "onnx/model.onnx")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A repository as makers publish it: shards, and files that only other programs read."""
    folder = shutil.copytree(tiny.checkpoint("llama"), tmp_path_factory.mktemp("hub") / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    owners = {name: f"model-0000{at % 4 + 1}-of-00004.safetensors" for at, name in enumerate(tensors)}
    for file in set(owners.values()):
        save_file({name: tensor for name, tensor in tensors.items() if owners[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    for name in NOT_READ:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not for us")
    return folder


@pytest.fixture
def fake(sharded, monkeypatch, tmp_path):
    """The hub that huggingface_hub uses; its cache is empty."""
    repositories = {"org/sharded": sharded, "org/single": tiny.checkpoint("qwen3")}
    with FakeHub(repositories) as hub:
        asked_in_place_of_the_real(hub, monkeypatch, tmp_path / "cache")
        yield hub


@pytest.fixture
def offline(monkeypatch):
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def refused(name: str, hub: Hub = ANY) -> str:
    with pytest.raises(ConfigError) as error:
        fetch(name, hub)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_only_what_serving_reads_is_fetched_and_only_once(fake, sharded):
    folder = fetch("org/sharded", Hub())
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert kept == set(fake.files("org/sharded")) - set(NOT_READ)
    assert len(open_checkpoint(folder)) > 3
    assert load_model_config(folder).architecture == "LlamaForCausalLM"
    fake.asked.clear()
    assert fetch("org/sharded", Hub()) == folder
    assert fake.fetched() == []
    assert len(fake.asked) <= 2


def test_a_file_for_which_a_drafter_is_refused_is_fetched():
    names = ["config.json", "mask_embedding.pt", "optimizer.pt", "model.safetensors"]
    assert hub_module.other_files(names) == ["config.json", "mask_embedding.pt"]


def test_a_folder_of_that_name_comes_first(monkeypatch, tmp_path):
    assert is_hub_name("org/name")
    for name in ("/models/x", "./a/b", "org", "org/name/more", "../x", "~/x", "org/na me", ""):
        assert not is_hub_name(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_name("org/name")


def test_dummy_weights_and_tokenizers_need_no_weights(fake):
    folder = fetch("org/single", Hub(), weights=False)
    assert (folder / "config.json").is_file()
    assert (folder / "tokenizer.json").is_file()
    assert not any(name.endswith(".safetensors") for name in fake.fetched())


def test_a_download_that_broke_off_goes_on(fake, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    name = "model.safetensors"
    size = fake.files("org/single")[name]
    fake.broken[name] = 0
    assert "the download was interrupted (RemoteProtocolError); start again, complete files are reused" in refused(
        "org/single"
    )
    fake.broken.clear()
    fake.cut[name] = size // 2
    fake.sent = 0
    folder = fetch("org/single", Hub())
    assert (folder / name).read_bytes() == (fake.repositories["org/single"] / name).read_bytes()
    assert fake.sent < 1.1 * size
    assert not list(folder.parents[1].rglob("*.incomplete"))


def test_bytes_are_counted(fake, monkeypatch):
    seen = []

    class Line(hub_module.ProgressLine):
        def __call__(self, done, total):
            seen.append((done, total))

    monkeypatch.setattr(hub_module, "ProgressLine", Line)
    fetch("org/sharded", Hub())
    total = sum(size for name, size in fake.files("org/sharded").items() if name.startswith("model-"))
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_download_gives_up_when_it_is_stopped(fake, tmp_path):
    hub = Hub()
    hub.stopped.set()
    with pytest.raises(hub_module.Stopped):
        fetch("org/single", hub)
    assert list((tmp_path / "cache").rglob("*"))
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_revisions_private_and_gated_repositories(fake):
    assert "--revision v9: org/single has no branch, tag or commit of that name" in refused("org/single", Hub("v9"))
    assert fetch("org/single", Hub("v1")) == fetch("org/single", Hub(fake.commit("org/single")))
    missing = refused("org/sinlge")
    assert "has no such repository or does not show it without a token; check the spelling, or give HF_TOKEN" in missing
    fake.private.add("org/sharded")
    assert "does not show it without a token" in refused("org/sharded")
    assert "does not accept the token (401)" in refused("org/sharded", Hub(token="hf_wrong"))
    assert fetch("org/sharded", Hub(token=TOKEN)).is_dir()
    fake.gated.add("org/single")
    shutil.rmtree(fetch("org/single", Hub(token=TOKEN)).parents[1])
    assert f"accept the terms at {fake.url}/org/single" in refused("org/single")


def test_all_files_come_from_one_commit(fake, sharded, monkeypatch, tmp_path):
    """Between the listing and the first file, the branch moves to another commit."""
    moved = shutil.copytree(sharded, tmp_path / "moved")
    download = hub_module.download

    def push_first(name, hub, revision, *files):
        fake.repositories[name] = moved
        return download(name, hub, revision, *files)

    (moved / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 3}')
    monkeypatch.setattr(hub_module, "download", push_first)
    folder = fetch("org/sharded", Hub())
    assert folder.name == fake.commit("org/sharded")
    assert "0.5" in (folder / "generation_config.json").read_text()
    assert not hub_module.lacking("org/sharded", folder, weights=True)


def test_without_a_hub_a_complete_copy_is_served(fake, offline, monkeypatch, caplog):
    from huggingface_hub import constants

    folder = fetch("org/sharded", Hub())
    assert "cannot be reached" not in caplog.text
    fake.down = True
    assert fetch("org/sharded", Hub()) == folder
    assert f"{fake.url} cannot be reached (it answers 503); the downloaded copy of org/sharded" in caplog.text
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached (ConnectError), and this machine has no copy" in refused("org/single")
    offline()
    assert fetch("org/sharded", Hub()) == folder
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"HF_HUB_OFFLINE is set, and the copy on this machine lacks {shard.name}" in refused("org/sharded")
    (folder / "config.json").unlink()
    assert "the copy on this machine lacks config.json" in refused("org/sharded")


def test_a_full_disk_is_reported_before_and_during_a_download(fake, monkeypatch):
    free = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=10_000))
    said = refused("org/single")
    assert "the disk is full (0.0 GB are to be fetched, 0.0 GB are free); free some room, or name another disk" in said
    during = r"the disk is full \(No space left on device\)"
    with pytest.raises(ConfigError, match=during), hub_module.one_line("org/single", ANY):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_pickles_only_are_refused_by_name(fake, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(tiny.checkpoint("llama") / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"code")
    fake.repositories["org/old"] = folder
    said = refused("org/old")
    assert "it holds no safetensors; pytorch_model.bin can hold code and is never read" in said
    assert "`hf download org/old --local-dir FOLDER`, `python -m server convert FOLDER`" in said
    assert "pytorch_model.bin" not in fake.fetched()


def test_what_cannot_be_served_is_not_fetched(fake, tmp_path):
    folder = shutil.copytree(tiny.checkpoint("llama"), tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    fake.repositories["org/other"] = folder
    asked = Config(model=ModelFlags(model="org/other"))
    with pytest.raises(ConfigError, match="architecture NoSuchForCausalLM is not supported"):
        located(asked, asked.folder, hub_of(asked), weights=True)
    assert "model.safetensors" not in fake.fetched()
    with pytest.raises(ConfigError, match="--revision v1: /a/folder is a folder, which has one revision"):
        located(asked, "/a/folder", Hub("v1"), weights=True)


def test_consolidated_weights_are_found(fake, tmp_path):
    folder = tmp_path / "mistral"
    folder.mkdir()
    for name in ("params.json", "tekken.json", "consolidated-00001.safetensors", "consolidated-00002.safetensors"):
        (folder / name).write_text("{}")
    fake.repositories["org/mistral"] = folder
    assert {path.name for path in fetch("org/mistral", Hub()).iterdir()} == {path.name for path in folder.iterdir()}


def test_an_adapter_that_the_model_is_made_of_is_fetched(fake, tmp_path):
    """An adapter is fetched if the configuration names it; an adapter that fine-tuning left in the folder is not."""
    for name, made in (("whole", True), ("tuned", False)):
        shutil.copytree(fake.repositories["org/single"], tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "has_lora_adapter": made}))
        shutil.copy(tmp_path / name / "model.safetensors", tmp_path / name / "adapter_model.safetensors")
        fake.repositories[f"org/{name}"] = tmp_path / name
        folder = fetch(f"org/{name}", Hub())
        assert (folder / "adapter_model.safetensors").exists() is made
        assert len(open_checkpoint(folder)) == 1 + made


@pytest.mark.parametrize("type_of", ["phi4_multimodal", "jina_embeddings_v3", "qwen3"])
def test_named_adapters_come_from_their_folders(fake, tmp_path, type_of, offline):
    """Adapters in folders are fetched for models that consist of them, and not for other models."""
    of_jina = type_of == "jina_embeddings_v3"
    repository, names = tmp_path / "named", ("separation", "text_matching") if of_jina else ("vision", "speech")
    within = {name: name if of_jina else f"{name}-lora" for name in names}
    shutil.copytree(fake.repositories["org/single"], repository)
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps({**config, "model_type": type_of}))
    for name in names:
        (repository / within[name]).mkdir()
        adapter = {"base_model.model.layers.0.o_proj.lora_A.weight": torch.ones(2, 3)}
        save_file(adapter, repository / within[name] / "adapter_model.safetensors")
        (repository / within[name] / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
        (repository / within[name] / "README.md").write_text("not for us")
    fake.repositories["org/named"] = repository
    folder = fetch("org/named", Hub())
    kept = {path.relative_to(folder).as_posix() for name in names for path in folder.glob(f"{within[name]}/*")}
    made = type_of != "qwen3"
    wanted = ("adapter_config.json", "adapter_model.safetensors")[: 1 + made]
    assert kept == {f"{within[name]}/{file}" for name in names for file in wanted}
    found = {name for shard in open_checkpoint(folder) for name in shard.tensors if "lora_A" in name}
    assert found == {f"layers.0.o_proj.lora_A.{name}.weight" for name in names if made}
    offline()
    assert fetch("org/named", Hub()) == folder, "the copy is whole"


def test_the_tokenizer_may_come_from_elsewhere(fake):
    config = Config(model=ModelFlags(model="org/sharded", tokenizer="org/single"))
    tokenizer = located(config, config.model.tokenizer, hub_of(config), weights=False)
    assert (Path(tokenizer) / "tokenizer.json").is_file()
    assert located(config, "/a/folder", hub_of(config), weights=True) == "/a/folder"
    with pytest.raises(ConfigError, match="--tokenizer org/none: there is no such folder here"):
        located(config, "org/none", Hub(flag="--tokenizer"), weights=False)


def test_a_check_reads_headers_only(fake, offline, capsys):
    fake.repositories["org/embedded"] = ROOT / "server" / "embedded"
    assert cli.main(["check", "org/embedded", "--max-model-len", "2k"]) == 0
    said = capsys.readouterr().out
    assert "served: natively, as Qwen2_5OmniThinkerForConditionalGeneration (Qwen2.5-Omni); takes text, image" in said
    assert "0.02 GiB BF16 in 1 file, 252 tensors are read" in said
    assert "--max-model-len 2,000 fits" in said
    assert fake.sent < 2e6 < fake.files("org/embedded")["model.safetensors"]
    assert cli.main(["check", "org/sharded"]) == 0
    assert "F32 in 4 files" in capsys.readouterr().out
    offline()
    assert cli.main(["check", "org/sharded"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("refused: --model org/sharded: the weights are not here, and the hub cannot be asked")
    assert said.count("\n") == 1


def environment_of(fake: FakeHub) -> dict[str, str]:
    return {"HF_ENDPOINT": fake.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}


def test_a_server_answers_from_the_hub(fake, tmp_path):
    """A process of its own fetches the model and answers; huggingface_hub reads HF_ENDPOINT and HF_TOKEN."""
    fake.private.add("org/single")
    flags = ("--model", "org/single", "--download-dir", str(tmp_path / "here"), *SMALL)
    process = ServerProcess(*flags, env=environment_of(fake)).spawn()
    try:
        process.wait_ready()
        body = json.dumps({"model": "org/single", "prompt": "a", "max_tokens": 2}).encode()
        asked = Request(f"http://127.0.0.1:{process.port}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(asked) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 2
        process.stop()
    finally:
        process.close()
    assert any((tmp_path / "here").rglob("model.safetensors"))


def test_a_signal_ends_a_download(fake, tmp_path):
    fake.hold.add("model.safetensors")
    process = ServerProcess("--model", "org/single", "--download-dir", str(tmp_path), env=environment_of(fake)).spawn()
    try:
        assert fake.held.wait(60), process.log
        process.signal()
        assert process.wait(30) == 0
        process.check_log()
    finally:
        process.close()


def test_a_wrong_name_is_one_line(fake, capsys):
    assert cli.main(["info", "--model", "org/nothing"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "org/nothing: there is no such folder here" in said


def test_a_file_in_the_place_of_a_folder_is_refused_as_a_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    state = SimpleNamespace(folder=str(file), tokenizer_source=str(file), config=Config())
    with pytest.raises(ConfigError, match=r"--model .*config.json: is a file; name the folder"):
        asyncio.run(folders.fetch(state))
