"""Flags of ranks: numbers that are none are refused by name, and flags of other servers name the way out."""

import pytest

from server.cli import parse
from server.flags.command_line import UsageError


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-tp", "0"], "--tensor-parallel-size 0: must be at least 1"),
        (["--tensor-parallel-size=-2"], "--tensor-parallel-size -2: must be at least 1"),
        (["-tp", "two"], "--tensor-parallel-size two: must be a whole number"),
        (["-tp", "1.5"], "--tensor-parallel-size 1.5: must be a whole number"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2: .*: use --tensor-parallel-size"),
        (["--pp-size", "2"], "--pp-size 2: .*: use --tensor-parallel-size"),
        (["--ep-size", "2"], "--ep-size 2: use --enable-expert-parallel"),
    ],
)
def test_what_is_no_number_of_ranks_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        parse(flags)


def test_the_driver_s_variables_reach_the_engine(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    config = parse(["-tp", "4", "--enable-expert-parallel"])[1].engine()
    assert (config.tensor_parallel, config.ranks.whole_experts) == (4, True)
    assert config.ranks.driver_variables["CUDA_LAUNCH_BLOCKING"] == "1"
