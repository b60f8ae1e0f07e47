"""Launcher: a step's calls come in order, on a runtime whose streams run as late or as early as allowed."""

import _ctypes
import ctypes
import gc
import subprocess
import time

import numpy as np
import pytest

from _fast.layout import GraphKind
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from engine.kernels import target
from tests.fast.oracles.runtime import COPY, ELAPSED, GRAPH, QUERY, RECORD, SYNC, Rig, addresses, library, seed_words

ROWS, TOKENS, SLOTS = 8, 64, 12


class Engine:
    """The plain order of a step, in Python, with two steps in flight."""

    def __init__(self, seed=0, **options):
        self.rng = np.random.default_rng(seed)
        self.scheduler = Scheduler(
            max_slots=SLOTS, max_rows=ROWS, max_tokens=TOKENS, max_model_len=128, num_blocks=100, block_size=4
        )
        self.rig = Rig(ROWS, TOKENS, 128, SLOTS, **options)
        self.emitted, self.rules, self.number = {}, {}, 0
        self.in_flight = []

    def add(self):
        length, most = int(self.rng.integers(1, 50)), int(self.rng.integers(1, 30))
        prompt = self.rng.integers(0, 900, length).astype(np.int32)
        slot = self.scheduler.add(self.number, prompt, max_tokens=most)
        if slot >= 0:
            self.rig.params.stage(slot, seed_words(slot, length, self.number))
            self.rules[self.number] = most
            self.emitted[self.number] = []
            self.number += 1

    def plan(self):
        launcher, index = self.rig.launcher, self.scheduler.next_step % len(self.rig.plans)
        launcher.wait_until_read(index)
        plan = self.rig.plans[index]
        if not self.scheduler.schedule(plan):
            return None
        self.rig.params.pack(plan)
        return plan, index

    def launch(self, together):
        """Returns False if there was nothing to launch."""
        planned = self.plan()
        if planned is None:
            return False
        plan, index = planned
        launcher = self.rig.launcher
        kind = 0 if plan.num_decode_rows == plan.num_rows else 1
        size = launcher.pick(kind, plan.num_tokens)
        sample = launcher.pick(GraphKind.SAMPLE, plan.num_sampled) if plan.num_sampled else 0
        if together and size:
            launcher.launch(plan, index, kind, size, sample)
        else:
            launcher.prep(plan, index)
            if size:
                launcher.replay(kind, size)
            if sample:
                launcher.replay(GraphKind.SAMPLE, sample)
            launcher.finish()
        self.in_flight.append(planned)
        return True

    def settle(self):
        plan, index = self.in_flight.pop(0)
        assert self.rig.launcher.wait(index, 5.0)
        assert self.rig.launcher.done(index)
        tokens = self.rig.ring[index][: plan.num_rows]
        self.scheduler.commit(plan, tokens)
        for row in range(plan.num_rows):
            if plan.out_token[row] >= 0:
                self.emitted[plan.out_request[row]].append(plan.out_token[row])
        for slot in self.scheduler.freed_slots[: self.scheduler.num_freed]:
            self.rig.params.forget(slot)

    def run(self, steps, arrivals=0.4):
        while steps or self.in_flight or self.scheduler.num_running or self.scheduler.num_waiting:
            steps -= steps > 0
            if steps and self.rng.random() < arrivals:
                self.add()
            launched = self.launch(together=self.rng.random() < 0.5)
            if self.in_flight and (not launched or len(self.in_flight) == 2):
                self.settle()
        assert self.rig.fault == 0
        for number, tokens in self.emitted.items():
            assert tokens == [self.rig.draw(number, place) for place in range(self.rules[number])]


@pytest.mark.parametrize("eager", [0, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_right_however_late_or_early_the_stream_runs(seed, eager):
    engine = Engine(seed)
    engine.rig.lib.set_eager(eager)
    engine.run(300)
    assert engine.number > 50


@pytest.mark.parametrize("records", [2, 4])
def test_other_numbers_of_records_work_too(records):
    engine = Engine(seed=1, records=records)
    engine.rig.lib.set_eager(0)
    engine.run(200)


@pytest.mark.parametrize(("whole", "graphs"), [(True, [GRAPH]), (False, [GRAPH] * 3)])
def test_a_decode_step_is_one_graph_where_there_is_one_and_one_wait(whole, graphs):
    engine = Engine(whole=whole)
    engine.add()
    engine.launch(together=True)
    for _ in range(3):
        engine.rig.take_calls()
        engine.launch(together=True)
        engine.settle()
        calls = [what for what, _ in engine.rig.take_calls() if what != QUERY]
        assert calls == [*graphs, RECORD, SYNC]


def test_a_step_that_computes_prompts_is_launched_in_its_parts():
    engine = Engine(seed=2)
    engine.add()
    engine.launch(together=True)
    handles = [which // 10000 for what, which in engine.rig.take_calls() if what == GRAPH]
    assert handles[:2] == [0, 3]
    assert handles[2:] in ([], [4])


def test_the_turn_is_copied_to_the_device_only_where_the_device_may_not_know_it():
    engine = Engine()
    engine.add()
    copied = []
    for _ in range(5):
        engine.launch(together=True)
        copied.append([size for what, size in engine.rig.take_calls() if what == COPY])
        engine.settle()
    assert copied == [[4], [], [], [], []]
    plan, _ = engine.plan()
    engine.scheduler.fail(plan)  # planned but not launched: its record is skipped
    engine.rig.params.forget(plan.row_slot[0])
    engine.emitted.clear()
    engine.add()
    engine.rig.take_calls()
    engine.rig.lib.set_failure(GRAPH, 2, 0)
    with pytest.raises(RuntimeError, match="GraphLaunch returned 2"):
        engine.launch(together=True)
    engine.rig.lib.set_failure(-1, 0, 0)
    assert [size for what, size in engine.rig.take_calls() if what == COPY] == [4], "left out"
    engine.scheduler.fail(engine.rig.plans[engine.scheduler.next_step % 3 - 1])
    engine.emitted.clear()
    engine.add()
    engine.launch(together=True)
    assert [size for what, size in engine.rig.take_calls() if what == COPY] == [4], "a launch failed"


def test_one_call_and_its_parts_make_the_same_calls():
    logs = []
    for together in (True, False):
        engine = Engine(seed=3, whole=False)
        engine.add()
        for _ in range(4):
            engine.launch(together)
            if len(engine.in_flight) == 2:
                engine.settle()
        logs.append([call for call in engine.rig.take_calls() if call[0] != QUERY])
    assert logs[0] == logs[1]


def gaps(engine, steps, late=0.0, every=4):
    """The measured gap after each step, or 0. A step is launched at least `late` seconds after the previous step."""
    engine.rig.launcher.measure_gaps(every)
    engine.rig.lib.set_step_ns(3_000_000)
    engine.add()
    found = []
    for _ in range(steps):
        if not engine.launch(together=True):
            engine.add()
            engine.launch(together=True)
        time.sleep(late)
        if len(engine.in_flight) == 2:
            engine.settle()
            found.append(engine.rig.launcher.gap_s)
    return found


def test_the_gap_after_every_nth_step_is_measured():
    engine = Engine(seed=4)
    engine.rig.take_calls()
    measured = gaps(engine, 20)
    assert [k for k, gap in enumerate(measured) if gap] == [4, 8, 12, 16]
    in_time = min(gap for gap in measured if gap)
    for _ in range(5):  # a delayed thread launches late
        if in_time > 0.001:
            in_time = min(gap for gap in gaps(Engine(seed=4), 20) if gap)
    assert in_time < 0.001
    log = engine.rig.take_calls()
    calls = [what for what, _ in log]
    assert calls.count(ELAPSED) == 4
    whole = sum(what == GRAPH and which > 50000 for what, which in log)
    begun = sum(what == GRAPH and (which == 1000 or which > 50000) for what, which in log)
    assert whole == begun - 1 - 4, "a gap ends between prep and forward"
    assert calls.count(SYNC) == len(measured)
    measured = gaps(Engine(seed=4), 12, late=0.008)
    assert min(gap for gap in measured if gap) > max(0.001, in_time)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_gap_is_read_before_the_next_one_is_marked(every):
    """Two steps are in flight: when the first step ends, the event recorded after the second has not fired yet."""
    measured = gaps(Engine(seed=4), 20, every=every)
    assert sum(gap > 0 for gap in measured) >= 4


def test_no_gap_is_reported_where_nothing_was_in_flight():
    engine = Engine(seed=4)
    engine.rig.launcher.measure_gaps(1)
    engine.add()
    for _ in range(5):
        engine.launch(together=True)
        engine.settle()
        assert engine.rig.launcher.gap_s == 0.0
    with pytest.raises(ValueError, match="every=0"):
        engine.rig.launcher.measure_gaps(0)


def test_a_step_without_a_wait_still_has_its_record_read_first():
    """The step failed on the host after its prep was launched; the stream runs as late as allowed."""
    engine = Engine()
    rig, scheduler = engine.rig, engine.scheduler
    rig.lib.set_eager(0)
    for _ in range(6):
        engine.add()
    failed = []
    for _ in range(4):
        plan, index = engine.plan()
        rig.launcher.prep(plan, index)
        failed += [plan.out_request[row] for row in range(plan.num_rows)]
        scheduler.fail(plan)
        for slot in scheduler.freed_slots[: scheduler.num_freed]:
            rig.params.forget(slot)
        engine.add()
        engine.add()
    for number in failed:
        del engine.emitted[number]
    engine.run(40)
    assert engine.emitted


@pytest.mark.parametrize(
    ("what", "name", "method"),
    [
        (GRAPH, "GraphLaunch", "prep"),
        (COPY, "MemcpyAsync", "prep"),
        (RECORD, "EventRecord", "finish"),
        (SYNC, "EventSynchronize", "wait"),
        (QUERY, "EventQuery", "done"),
    ],
)
def test_a_call_that_fails_is_named_with_its_number(what, name, method):
    engine = Engine()
    engine.add()
    plan, index = engine.plan()
    launcher = engine.rig.launcher
    steps = {
        "prep": lambda: launcher.prep(plan, index),
        "finish": launcher.finish,
        "wait": lambda: launcher.wait(index, 1.0),
        "done": lambda: launcher.done(index),
    }
    for step, call in steps.items():
        if step == method:
            engine.rig.lib.set_failure(what, 700, 0)
            with pytest.raises(RuntimeError, match=rf"{name} returned 700 \(an illegal memory access"):
                call()
            return
        call()


def test_one_call_for_all_says_which_part_failed():
    for k, name in enumerate(("GraphLaunch", "GraphLaunch", "GraphLaunch")):
        engine = Engine()
        engine.add()
        plan, index = engine.plan()
        engine.rig.lib.set_failure(GRAPH, 2, k)
        size = engine.rig.launcher.pick(1, plan.num_tokens)
        with pytest.raises(RuntimeError, match=f"{name} returned 2"):
            engine.rig.launcher.launch(plan, index, 1, size, 1)


def test_a_size_is_the_smallest_that_holds_the_count():
    launcher = Rig(256, 2048, 64, 256, graphs=False).launcher
    assert launcher.pick(0, 1) == 0
    for size in (256, 8, 1, 16):
        launcher.set_graph(GraphKind.DECODE, 0, size, 20000 + size)
        launcher.set_graph(GraphKind.SAMPLE, 0, size, 40000 + size)
    assert [launcher.pick(0, count) for count in (1, 2, 8, 9, 17, 256, 257)] == [1, 8, 8, 16, 256, 256, 0]
    assert [launcher.pick(GraphKind.SAMPLE, count) for count in (1, 9, 257)] == [1, 16, 0]
    for size in (64, 128, 1024):
        launcher.set_graph(GraphKind.MIXED, 0, size, 30000 + size)
    # Padding by more than a quarter costs more than launching every kernel by itself, except for small steps.
    assert [launcher.pick(1, count) for count in (1, 64, 65, 102, 103, 128, 800, 820)] == [
        64, 64, 0, 0, 128, 128, 0, 1024,
    ]  # fmt: skip


def test_a_step_runs_the_variant_that_its_rows_need():
    """Whole-step graphs of the variant run if they exist, else the parts; both variants share the forward graph."""
    rules = 2
    for whole in (False, True):
        engine = Engine(whole=True)
        launcher = engine.rig.launcher
        launcher.set_graph(GraphKind.SAMPLE, rules, 4, 40004)
        if whole:
            launcher.set_graph(GraphKind.STEP, rules, 4, 50004)
        assert [launcher.pick(GraphKind.SAMPLE, 1, variant) for variant in (0, rules)] == [1, 4]
        assert [launcher.pick(GraphKind.DECODE, 1, variant) for variant in (0, rules)] == [1, 1]
        engine.add()
        engine.launch(together=True)
        engine.settle()
        for variant, wanted in ((0, [50001]), (rules, [50004] if whole else [1000, 20001, 40004])):
            plan, index = planned = engine.plan()
            size = 4 if variant and whole else 1
            engine.rig.take_calls()
            launcher.launch(plan, index, GraphKind.DECODE, size, launcher.pick(GraphKind.SAMPLE, 1, variant), variant)
            engine.in_flight.append(planned)
            engine.settle()
            assert [which for what, which in engine.rig.take_calls() if what == GRAPH] == wanted
        assert engine.rig.fault == 0


def test_events_are_given_back():
    before = library().get_num_events()
    rig = Rig(4, 16, 64, 4)
    assert rig.lib.get_num_events() > 0
    del rig
    gc.collect()
    assert library().get_num_events() <= before


def test_a_wait_that_took_too_long_says_so():
    engine = Engine()
    engine.add()
    engine.rig.lib.set_step_ns(20_000_000)
    engine.launch(together=True)
    assert not engine.rig.launcher.done(0)
    assert engine.rig.launcher.wait(0, 0.001) is False
    assert engine.rig.launcher.wait(0, 0.001) is True


def test_a_mistake_is_refused_in_words():
    engine = Engine()
    engine.add()
    launcher = engine.rig.launcher
    with pytest.raises(ValueError, match=r"finish\(\) comes before wait"):
        launcher.wait(0, 1.0)
    with pytest.raises(ValueError, match="no step was begun"):
        launcher.finish()
    plan, index = engine.plan()
    with pytest.raises(ValueError, match="does not lie in record 1"):
        launcher.prep(plan, 1)
    with pytest.raises(ValueError, match="record 3: there are 0 to 2"):
        launcher.prep(plan, 3)
    with pytest.raises(ValueError, match="no graphs for kind 0, size 7"):
        launcher.launch(plan, index, 0, 7, 1)
    with pytest.raises(ValueError, match="no graph of kind 1 and size 7"):
        launcher.replay(1, 7)
    with pytest.raises(ValueError, match="no graph of kind 2 and size 7"):
        launcher.replay(GraphKind.SAMPLE, 7)
    with pytest.raises(ValueError, match="not null"):
        launcher.set_graph(GraphKind.DECODE, 0, 8, 0)
    with pytest.raises(ValueError, match="0 rows"):
        launcher.prep(StepPlan(ROWS, TOKENS, 128, engine.rig.records[1], 1), 1)
    with pytest.raises(ValueError, match="its tokens would not go home to 1"):
        launcher.prep(StepPlan(ROWS, TOKENS, 128, engine.rig.records[1]), 1)
    with pytest.raises(ValueError, match="kind 7: there are 0 to 6"):
        launcher.pick(7, 1)
    with pytest.raises(ValueError, match="variant 8: there are 0 to 7"):
        launcher.set_graph(GraphKind.DECODE, 8, 8, 20008)
    bare = Engine(graphs=False)
    bare.add()
    with pytest.raises(ValueError, match=r"set_graph\(\) comes before steps"):
        bare.rig.launcher.prep(*bare.plan())


@pytest.fixture
def no_runtime(monkeypatch):
    """Hides libraries in site-packages: torch's CUDA build loads a runtime on any machine; only stand-ins remain."""
    real = target._loaded
    monkeypatch.setattr(target, "_loaded", lambda: [path for path in real() if "/site-packages/" not in path])


@pytest.mark.skipif(target.target().kind != "cpu", reason="the driver itself is loaded")
def test_what_every_step_calls_is_the_drivers_where_one_is_loaded(no_runtime, tmp_path):
    path = tmp_path / "libcuda.so.1"
    names = ("GraphLaunch", "EventRecord", "EventSynchronize")
    source = "".join(f"int cu{name}(void) {{ return 0; }}\n" for name in names)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=source.encode(), check=True)
    expected, driver = addresses(), ctypes.CDLL(str(path))
    try:
        own = {name: ctypes.cast(getattr(driver, f"cu{name}"), ctypes.c_void_p).value for name in names}
        assert target.runtime_calls() == expected | own
    finally:
        for _ in range(2):  # once for each of the two that opened the library
            _ctypes.dlclose(driver._handle)
    assert target.runtime_calls() == expected


def test_the_runtime_is_found_among_the_loaded_libraries(no_runtime, monkeypatch):
    assert target.runtime_calls().keys() == addresses().keys()
    if target.target().kind == "cpu":
        assert target.runtime_calls() == addresses()
    monkeypatch.setattr(target, "RUNTIMES", {"libnobody.so": "no"})
    with pytest.raises(RuntimeError, match=r"none of libnobody.so: .* shared library"):
        target.runtime_calls()
