"""A device whose copies run late: a thread runs them in order, each after a delay.

It replaces engine/weights/upload.Upload. If a source is rewritten before its event has fired, the copy has wrong
bits.
"""

import queue
import random
import threading
import time

import torch


class LateEvent:
    """An event that fires when the copies before it are done."""

    def __init__(self):
        self._fired = threading.Event()
        self.fire = self._fired.set

    def synchronize(self):
        assert self._fired.wait(60)


class LateUpload:
    """Runs copies on a thread of its own, some time after they are requested, like a device's stream."""

    def __init__(self, delay_s=0.0005):
        self._delay_s = delay_s
        self._work = queue.SimpleQueue()
        self.chunks = 0
        self.pinned_bytes = 0
        self.finished = False
        threading.Thread(target=self._run, daemon=True).start()

    def pinned(self, size):
        self.pinned_bytes += size
        return torch.full((size,), 0xAB, dtype=torch.uint8)

    def begin(self):
        pass

    def send(self, copies):
        event = LateEvent()
        self.chunks += 1
        self._work.put((copies, event))
        return event

    def arrive(self, event):
        event.synchronize()

    def finish(self):
        self.finished = True

    @torch.inference_mode()
    def _run(self):
        chance = random.Random(0)
        while True:
            copies, event = self._work.get()
            time.sleep(self._delay_s * chance.random())
            for target, source in copies:
                target.copy_(source)
            event.fire()
