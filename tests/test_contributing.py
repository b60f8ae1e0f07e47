"""CONTRIBUTING.md is true: its examples build and run, its glossary is short, the files that it names are there."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

import engine.models.text
from engine.models.lookup import family_of
from engine.run import start
from engine.step.parts import order
from tests import tiny
from tests.contributing import PAGE, example
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import running, text_request
from tests.models.harness import Harness, load

TEXT = PAGE.read_text(encoding="utf-8")


def test_a_family_is_one_file(tmp_path, monkeypatch):
    """A new family is one file, named as its model_type, in the folder of decoders. No table names the file."""
    room = tmp_path / "room"
    room.mkdir()
    shutil.copy(example("model", tmp_path).__file__, room / "example.py")
    monkeypatch.setattr(engine.models.text, "__path__", [*engine.models.text.__path__, str(room)])
    folder = shutil.copytree(tiny.checkpoint("llama"), tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["ExampleForCausalLM"]}))
    plain, scaled = load(tiny.checkpoint("llama")), load(folder)
    assert family_of("ExampleForCausalLM").name == "Example"
    assert scaled.config.text.embedding_scale == 8.0
    tokens = list(range(3, 20))
    got, bare = (model_logits(model, tokens) for model in (scaled, plain))
    assert not torch.allclose(got, bare)
    plain.embed.table = plain.embed.table * 8.0  # the effect that `embedding_scale` must have
    assert torch.equal(got, model_logits(plain, tokens))


def model_logits(model, tokens):
    harness = Harness(model)
    return harness.step((harness.add(tokens), len(tokens)))


def test_a_kernel_is_one_file_with_its_reference(tmp_path):
    module = example("kernel", tmp_path)
    x, scale = torch.randn(3, 700).bfloat16(), torch.rand(3)
    assert torch.equal(module.scale_rows(x, scale), (x.float() * scale[:, None]).bfloat16())
    assert "out[row, column] = x[row, column] * scale[row]" in module.__doc__


@pytest.mark.parametrize("backend", ["host", "device"])
async def test_a_part_of_the_step_is_one_file_and_one_entry(tmp_path, monkeypatch, backend):
    made = example("part", tmp_path)
    monkeypatch.setattr(order, "PARTS", [*order.PARTS, made.token_count])
    if backend == "device":
        monkeypatch.setattr(start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(tiny.checkpoint("llama")) as served:
        counts = []
        async for delta in served.submit(text_request([5, 6, 7], 9)):
            counts.append(delta.extras[made.TokenCount.name])
        assert counts == sorted(counts)
        assert counts[-1] == 9
        assert served.ledger()["token_count"] == 0
    lines = (tmp_path / "example_part.py").read_text().splitlines()
    assert len(lines) <= 50


def test_the_glossary_has_at_most_forty_words():
    words = re.findall(r"^\| ([a-z ]+) \| ", TEXT.partition("## Words")[2].partition("## One plain step")[0], re.M)
    assert 20 < len(words) - 1 <= 40, "the first line is the table's head"


@pytest.mark.parametrize("part", ["## One plain step", "## Words"])
def test_the_files_that_the_page_names_are_there(part):
    chapter = TEXT.partition(part)[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:engine|server|mm|_fast|kernels)/[\w/]+(?:\.\w+)?)", chapter))
    assert named
    for name in named:
        path = PAGE.parent / (f"engine/{name}" if name.startswith("kernels/") else name)
        assert path.exists() or path.with_suffix(".pyx").exists(), name
