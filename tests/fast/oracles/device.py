"""A simulated device that computes nothing, but records for each KV position which prefix wrote the position.

The device runs plans in launch order, from the plans alone: block-table changes, rows, fed tokens, towers and media
runs. Writing position p stores the identity of keys[0 .. p] under the request's root. A row may only read positions
that hold exactly the row's own prefix. So the device detects a block that is shared wrongly, reused early or never
sent, and a position that is skipped, computed twice or read from a missing embedding.
"""

SAMPLE, FEED, EXACT = 1, 2, 4
GARBAGE = object()


class Device:
    def __init__(self, rng, groups, block_size, draw):
        self.rng = rng
        self.groups = groups
        self.block_size = block_size
        self.draw = draw  # request -> its next token
        self.tables = [{} for _ in groups]  # (slot, index) -> block
        self.kv = {}  # (block, offset) -> (group, identity)
        self.last = {}  # slot -> newest sampled token
        self.embeddings = {}  # entry -> content
        self.begun = set()  # entries whose towers have partly run; the first read runs the remaining parts
        self.last_read = {}  # entry -> step
        self.identities = {}

    def identity(self, request, position):
        """A number that identifies the request's keys up to and including `position`."""
        known = request.identities
        while len(known) <= position:
            above = known[-1] if known else request.root
            name = (above, request.key(len(known)))
            known.append(self.identities.setdefault(name, len(self.identities)))
        return known[position]

    def run(self, plan, requests, fails):
        """Execute a plan; `requests` by slot. Returns a sampled token per row. A failing step writes wrong data."""
        for u in range(plan.num_updates):
            slot, index, block, group = (plan.updates[u, k] for k in range(4))
            self.tables[group][slot, index] = block
        for e in range(plan.num_encodes):
            if plan.encode_slot[e] < 0:  # a part of a large tower
                self.begun.add(plan.encode_entry[e])
                if self.embeddings.get(plan.encode_entry[e]) is GARBAGE:
                    del self.embeddings[plan.encode_entry[e]]
                continue
            request = requests[plan.encode_slot[e]]
            _start, _, entry, _, content = request.media[plan.encode_item[e]]
            assert entry == plan.encode_entry[e]
            self.embeddings[entry] = GARBAGE if fails else content
        runs = {}
        for m in range(plan.num_media):
            for k in range(plan.media_length[m]):
                self.last_read[plan.media_entry[m]] = plan.step_id
                assert plan.media_start[m] + k not in runs
                runs[plan.media_start[m] + k] = (plan.media_entry[m], plan.media_row[m] + k)
        sampled = []
        for row in range(plan.num_rows):
            request = requests[plan.row_slot[row]]
            request.broken = request.broken or fails
            sampled.append(self._row(plan, row, request, runs))
        assert not runs, "media runs outside of media positions"
        return sampled

    def _row(self, plan, row, request, runs):
        slot, start, count = plan.row_slot[row], plan.row_computed[row], plan.row_len[row]
        at, flags = plan.row_start[row], plan.row_flags[row]
        assert plan.row_start[row + 1] == at + count
        assert start == request.computed, "a position is skipped or computed twice"
        tokens = list(plan.token_ids[at : at + count])
        if flags & FEED:
            assert tokens == [-1]
            tokens = [self.last[slot]]
        if not request.broken:
            assert tokens == request.tokens[start : start + count]
        self._read_media(request, start, count, at, runs)
        for group in range(len(self.groups)):
            self._read_write(request, group, slot, start, count)
        request.computed = start + count
        assert request.computed <= len(request.tokens)
        assert bool(flags & SAMPLE) == (request.computed == len(request.tokens))
        if not flags & SAMPLE:
            return -1
        self.last[slot] = self.draw(request)
        request.tokens.append(self.last[slot])
        return self.last[slot]

    def _read_write(self, request, group, slot, start, count):
        kind, window = self.groups[group]
        table, size = self.tables[group], self.block_size
        low = max(0, start - window + 1) if kind else 0
        for position in range(low, start):
            block = table[slot, position // size]
            assert block > 0
            held = self.kv.get((block, position % size))
            if held is GARBAGE and request.broken:
                continue
            assert held == (group, self.identity(request, position)), f"position {position} of slot {slot}"
        for position in range(start, start + count):
            block = table[slot, position // size]
            assert block > 0
            self.kv[block, position % size] = GARBAGE if request.broken else (group, self.identity(request, position))

    def _read_media(self, request, start, count, at, runs):
        for begin, length, entry, first, content in request.media:
            for position in range(max(begin, start), min(begin + length, start + count)):
                assert runs.pop(at + position - start) == (entry, first + position - begin)
                if entry in self.begun and entry not in self.embeddings:
                    self.embeddings[entry] = content
                if self.embeddings[entry] is GARBAGE:
                    request.broken = True
                assert request.broken or self.embeddings[entry] == content
