"""gpu_rank_chaos: a short run over simulated ranks ends with nothing held; a rank that never comes is a hang."""

import argparse
import json

from tests.bench import gpu_rank_chaos


def test_a_short_run_holds_nothing_at_the_end(capsys):
    flags = ["--shape", "tiny", "--device", "cpu", "--requests", "24", "--longest", "60", "--late", "5"]
    assert gpu_rank_chaos.main(flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 24 == sum(found["ended"].values())
    assert set(found["ended"]) <= {"left", "complete"}
    assert (found["hang"], found["held"]) == (False, {})


class Silent:
    """An engine that answers nothing."""

    def __init__(self):
        self.on_step = None

    def inspect(self):
        raise AssertionError("not here")


async def test_a_run_without_steps_is_a_hang(monkeypatch):
    async def forever(self):
        import asyncio

        await asyncio.Event().wait()

    monkeypatch.setattr(gpu_rank_chaos.Chaos, "_all", forever)
    monkeypatch.setattr(gpu_rank_chaos.Chaos, "_delay", forever)
    found = await gpu_rank_chaos.Chaos(Silent(), argparse.Namespace(seed=0, patience=0.0)).run()
    assert found["hang"]
    assert "held" not in found
