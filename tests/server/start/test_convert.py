"""`convert`: pickled weights become safetensors, in a process without network; bad files leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.base.errors import ConfigError
from engine.weights.files import open_checkpoint
from mm.isolation.helper import environment
from server import cli
from server.start import convert, unpickle
from tests import tiny

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5, dtype=torch.bfloat16), "c": torch.tensor(7)}


def save(path: Path, found: object = None, **how: object) -> Path:
    torch.save(TENSORS if found is None else found, path, **how)
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that the process would write, read in this one."""
    with path.open("rb") as file:
        return unpickle.tensors_of(unpickle.loaded(file.fileno(), unpickle.checked_archive(file.fileno())))


def answer(target: int, source: Path, memory: int = 1 << 30) -> dict:
    """The reply of the process that reads `source` and writes to the descriptor `target`."""
    numbers = [str(number) for number in (target, os.getpid(), memory, 60)]
    with source.open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "server.start.unpickle", *numbers],
            stdin=file,
            stdout=subprocess.PIPE,
            env=environment(),
            pass_fds=(target,),
            check=True,
        )
    return json.loads(done.stdout)


def rewritten(path: Path, change) -> Path:
    """The archive with each record (name, bytes) replaced by what `change` returns: (name, bytes, compression)."""
    with zipfile.ZipFile(path) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records:
            archive.writestr(*change(name, data))
    return path


def stays(folder: Path, names: set[str]) -> None:
    assert {path.name for path in folder.iterdir()} == names


def test_a_checkpoint_in_parts_is_served_after_conversion(tmp_path, capsys):
    folder = Path(shutil.copytree(tiny.checkpoint("llama"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number in range(2):
        part = dict(list(tensors.items())[number::2])
        torch.save(
            part, folder / f"pytorch_model-{number + 1:05d}-of-00002.bin", _use_new_zipfile_serialization=number > 0
        )
    torch.save({"lr": 0.1}, folder / "training_args.bin")
    with pytest.raises(ConfigError, match=rf"never read by the server: `python -m server convert {folder}`"):
        open_checkpoint(folder)
    assert cli.main(["convert", str(folder)]) == 0
    assert "model-00002-of-00002.safetensors" in capsys.readouterr().out
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert sum(len(shard.tensors) for shard in open_checkpoint(folder)) == len(tensors)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_tensors_of_every_form_are_written_as_they_are(tmp_path):
    """Views, transposed and tied tensors, no values, parameters, and a trainer's wrapping."""
    wide = torch.randn(6, 4)
    given = {
        **TENSORS,
        "view": wide[2:4],
        "transposed": wide.t(),
        "tied": wide,
        "again": wide,
        "none": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "flags": torch.tensor([True, False]),
        "codes": torch.ones(3).to(torch.float8_e4m3fn),
    }
    source = save(tmp_path / "x.pt", {"epoch": 3, "state_dict": given})
    with (tmp_path / "x.safetensors").open("wb") as file:
        unpickle.write(read(source), os.dup(file.fileno()), 1 << 20)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


class Code:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def test_code_in_a_pickle_does_not_run_and_the_folder_stays_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder / "pytorch_model.bin", {"a": torch.ones(2), "b": Code()})
    save(folder / "sparse_linear.pt")
    assert cli.main(["convert", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "pytorch_model.bin: torch cannot read it" in said
    assert "nothing was written" in said
    stays(folder, {"pytorch_model.bin", "sparse_linear.pt"})
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_the_process_has_no_network_starts_nothing_and_bounds_its_memory():
    code = """if True:
        import os, socket, subprocess, sys
        from server.start.unpickle import fence_in
        fence_in(int(sys.argv[1]), 64 << 20, 30)
        for act in (socket.socket, lambda: subprocess.run("true"), lambda: open("x", "w"), lambda: bytearray(1 << 30)):
            try:
                act()
            except (OSError, MemoryError) as error:
                print(type(error).__name__)
        """
    done = subprocess.run(
        [sys.executable, "-c", code, str(os.getpid())], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.split() == ["PermissionError", "PermissionError", "PermissionError", "MemoryError"]


def test_memory_and_a_full_disk_are_named(tmp_path):
    large = save(tmp_path / "large.bin", {"a": torch.ones(20 << 20)}, _use_new_zipfile_serialization=False)
    with Path("/dev/full").open("wb") as full:
        assert answer(full.fileno(), large, 1 << 20) == {
            "error": "reading it takes more than 1,048,576 bytes of memory"
        }
        assert answer(full.fileno(), save(tmp_path / "x.pt")) == {"error": "writing failed: No space left on device"}


def lying(data: bytes) -> bytes:
    """The pickle of TENSORS whose first storage claims a thousand times as many values."""
    assert data.count(b"K\x0ctq") == 1  # 12 values, the end of a storage's description
    return data.replace(b"K\x0ctq", b"M\xe0\x2etq")


STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name, data: (name, data, DEFLATED), "is compressed, which torch.save never does"),
        (
            lambda name, data: (name, lying(data) if name.endswith("data.pkl") else data, STORED),
            r"claims [\d,]+ bytes, and no record",
        ),
        (lambda name, data: (name.replace("data.pkl", "code/x.py"), data, STORED), "TorchScript"),
    ],
)
def test_archives_that_lie_are_refused(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        read(rewritten(save(tmp_path / "x.pt"), change))


@pytest.mark.parametrize("length", [0, 100, -200])
def test_a_file_that_ends_early_is_refused(tmp_path, length):
    source = save(tmp_path / "x.pt")
    source.write_bytes(source.read_bytes()[:length])
    with pytest.raises((ConfigError, EOFError)):
        read(source)


def test_a_record_that_appears_twice_is_refused(tmp_path):
    source = save(tmp_path / "x.pt")
    with zipfile.ZipFile(source, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], b"")
    with pytest.raises(ConfigError, match="is there twice"):
        read(source)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"lr": 0.1}, "no dictionary of tensors"),
        ([torch.ones(2)], "no dictionary of tensors"),
        ({"a": torch.ones(2), "b": 3}, "'b' is a int, not a tensor"),
        ({"a": torch.ones(2), 3: torch.ones(2)}, "a tensor has the name '3'"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'a' is complex64, strided"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is float32, sparse_coo"),
        ({"a": torch.ones(*[1] * 17)}, "17 dimensions"),
    ],
)
def test_what_is_no_weight_is_refused(tmp_path, found, said):
    with pytest.raises(ConfigError, match=said):
        read(save(tmp_path / "x.pt", found))


def test_a_small_file_cannot_write_a_large_one(tmp_path):
    """A tensor of one value and a stride of 0 claims a terabyte."""
    source = save(tmp_path / "x.pt", {"a": torch.ones(1).expand(1 << 38)})
    with (tmp_path / "out").open("wb") as file, pytest.raises(ConfigError, match=r"claim 1,099,511,627,776 bytes"):
        unpickle.write(read(source), os.dup(file.fileno()), 1 << 20)
    assert (tmp_path / "out").stat().st_size == 0


def converting(folder: Path) -> str:
    """The error of a conversion that starts no process."""
    with pytest.raises(ConfigError) as error:
        convert.convert(folder, print)
    return str(error.value)


def test_folders_without_work_are_refused(tmp_path, capsys):
    assert "there is no such folder" in converting(tmp_path / "none")
    save(tmp_path / "training_args.bin", {"lr": 0.1})
    assert "nothing to convert" in converting(tmp_path)
    save(tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").symlink_to("elsewhere")  # a link to nothing takes the name, too
    assert "nothing to convert" in converting(tmp_path)
    assert "model.safetensors is there already" in capsys.readouterr().out
    stays(tmp_path, {"training_args.bin", "pytorch_model.bin", "model.safetensors"})


def test_links_out_of_the_folder_and_other_things_than_files_are_refused(tmp_path):
    outside, folder = save(tmp_path / "outside.bin"), tmp_path / "snapshots" / "revision"
    folder.mkdir(parents=True)
    (folder / "pytorch_model.bin").symlink_to(outside)
    assert "outside of the folder; replace it by the file" in converting(folder)
    (folder / "pytorch_model.bin").unlink()
    os.mkfifo(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is no file" in converting(folder)
    (folder / "pytorch_model.bin").unlink()
    (tmp_path / "blobs").mkdir()
    (folder / "pytorch_model.bin").symlink_to(save(tmp_path / "blobs" / "0"))  # as in a cache of the hub
    assert [job.target.name for job in convert.jobs_of(folder)] == ["model.safetensors"]


def test_a_disk_without_room_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    save(tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    assert "the disk has 10 free" in converting(tmp_path)
    stays(tmp_path, {"pytorch_model.bin"})


def test_a_name_that_is_taken_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    save(tmp_path / "pytorch_model.bin")
    save(tmp_path / "sparse_linear.pt")

    def run(job: convert.Job, target: Path) -> convert.Job:
        target.write_bytes(b"ours")
        (tmp_path / "sparse_linear.safetensors").write_bytes(b"theirs")
        return convert.Job(target, job.target)

    monkeypatch.setattr(convert, "run", run)
    assert "nothing was written" in converting(tmp_path)
    stays(tmp_path, {"pytorch_model.bin", "sparse_linear.pt", "sparse_linear.safetensors"})
    assert (tmp_path / "sparse_linear.safetensors").read_bytes() == b"theirs"


def test_names_of_files():
    names = ("pytorch_model.bin", "pytorch_model-00001-of-00003.bin", "sparse_linear.pt", "consolidated.00.pth")
    assert [convert.target_of(name) for name in names] == [
        "model.safetensors",
        "model-00001-of-00003.safetensors",
        "sparse_linear.safetensors",
        "consolidated.00.safetensors",
    ]


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["a", "b"], 2), (["--x"], 2)])
def test_the_command_line(words, status, capsys):
    assert cli.main(["convert", *words]) == status
    said = capsys.readouterr()
    assert "convert" in said.out + said.err
