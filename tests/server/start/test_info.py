"""`python -m server info`: processor, driver, cards and flags as it reports them, without secrets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from server.cli import parse
from server.start import info

X86 = "processor\t: 0\nmodel name\t: A CPU @ 2.00GHz\nflags\t\t: fpu avx avx2 fma amx_tile amx_bf16 nonsense\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"
NVIDIA = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x)\nGCC version: gcc 12.2.0\n"
)


def test_info_begins_with_versions_and_ends_with_the_model():
    found = list(info.lines(parse(["info", "--no-enable-prefix-caching"])[1]))
    assert found[0].startswith("omniloop ")
    assert f"torch {torch.__version__.split('+')[0]}" in found[1]
    begins = ["libraries", "processor", "processor features", "memory", "driver", "cards", "flags", "model", "takes"]
    assert [line.split(":")[0].split(" ")[0] for line in found[1:]] == [name.split(" ")[0] for name in begins]
    assert "flags: --no-enable-prefix-caching" in found
    assert "Qwen2_5OmniThinkerForConditionalGeneration" in found[-2]
    assert "takes text, image, video, audio" in found[-1]


def test_flags_are_printed_as_typed_and_secrets_are_masked():
    typed = [
        "--api-key",
        "secret",
        "--admin-api-key",
        "boss",
        "--port",
        "9",
        "--allowed-hosts",
        "a,b",
        "--enforce-eager",
    ]
    shown = " ".join(info.flags(parse(["info", *typed])[1]))
    assert "--port 9" in shown
    assert "--enforce-eager" in shown
    assert "--api-key ***" in shown
    assert "secret" not in shown
    assert "boss" not in shown
    assert list(info.flags(parse(["info"])[1])) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (X86, ("A CPU @ 2.00GHz", ["avx", "avx2", "fma", "amx_tile", "amx_bf16"])),
        (ARM, ("", ["asimd", "bf16", "sve"])),
        ("", ("", [])),
    ],
)
def test_a_processor_is_read_from_the_kernels_file(text, found):
    assert info.processor(text) == found


def test_driver_and_cards_are_reported(monkeypatch, tmp_path):
    (tmp_path / "nvidia").write_text(NVIDIA)
    (tmp_path / "amd").write_text("6.12.12\n")
    monkeypatch.setattr(info, "NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(info, "AMD", tmp_path / "amd")
    assert info.driver() == "NVIDIA 570.86.15"
    monkeypatch.setattr(info, "NVIDIA", tmp_path / "none")
    assert info.driver() == "amdgpu 6.12.12"
    card = SimpleNamespace(name="A card", total_memory=80 << 30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: card)
    monkeypatch.setattr("engine.kernels.target.target", lambda: SimpleNamespace(arch="sm_90"))
    assert list(info.of_cards())[1:] == [f"card {at}: A card, sm_90, 80.0 GiB, 132 units" for at in (0, 1)]
