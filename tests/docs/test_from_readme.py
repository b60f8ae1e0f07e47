"""Both installations without Docker, from a clean checkout, give the answer in README."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, of_page
from tests.docs.from_readme import NAMES, WAYS, lines_of


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", NAMES)
def test_a_clean_checkout_gives_the_answer(way):
    """Installs torch and everything else into a new environment, compiles, serves and asks once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.from_readme", way], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_readme_has_two_ways_and_a_question():
    assert [lines_of(way)[-1].split()[0] for way in NAMES] == [".omniloop/bin/omniloop", "make"]
    assert len(of_page("README", "sh")) == len(WAYS) + 1
