"""The file of an architecture is found by the architecture's name: the rule, its aliases, and what a lookup imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.models import lookup
from tests import tiny


def test_every_class_of_a_family_finds_the_file_of_the_family():
    for name, family in lookup.families().items():
        assert lookup.served(name) == (name, family)
        spelled, found = lookup.served(name.upper()) or ("", None)
        assert spelled.lower() == name.lower(), "capital letters do not matter"
        assert found is family, name


def test_no_two_files_have_one_name():
    assert len({file.rpartition(".")[2] for file in lookup.files().values()}) == len(lookup.files())


@pytest.mark.parametrize("alias", lookup.ALIASES)
def test_an_alias_names_a_file_that_the_rule_does_not_find(alias, monkeypatch):
    classes = [name for name in lookup.families() if name.startswith(alias)]
    wanted = {name: lookup.family_of(name) for name in classes}
    monkeypatch.delitem(lookup.ALIASES, alias)
    assert any(lookup.served(name) is None for name in wanted), alias


@pytest.mark.parametrize("name", ["NoSuchForCausalLM", "SparseForCausalLM", "LlamaForSpeech", "Model", ""])
def test_a_name_without_a_family_is_not_served(name):
    assert lookup.served(name) is None


def test_inner_decoders_go_by_their_whole_model_type():
    assert lookup.inner_decoder("gemma3_text") is lookup.family_of("Gemma3ForCausalLM")
    for kind in ("gemma3", "gemma3text", "qwen2_moe", "llava", "sparse", "none"):
        assert lookup.inner_decoder(kind) is None, kind
    assert "qwen3_moe" in lookup.inner_decoders()


def test_a_checkpoint_imports_no_other_family():
    code = (
        "import json, sys\nfrom engine.models.registry import load_model_config\n"
        "load_model_config(sys.argv[1])\nprint(json.dumps([name for name in sys.modules if 'engine.models.' in name]))"
    )
    command = [sys.executable, "-c", code, str(tiny.checkpoint("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rooms = tuple(f"engine.models.{room}." for room in lookup.ROOMS)
    assert [name for name in json.loads(done.stdout) if name.startswith(rooms)] == ["engine.models.text.llama"]
