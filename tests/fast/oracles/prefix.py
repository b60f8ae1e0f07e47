"""SipHash-2-4 with 128 bits, written from the paper, and a prefix index that is a dict of exact names."""

MASK = (1 << 64) - 1


def _rotate(x, bits):
    return ((x << bits) | (x >> (64 - bits))) & MASK


def _rounds(v, count):
    a, b, c, d = v
    for _ in range(count):
        a = (a + b) & MASK
        b = _rotate(b, 13) ^ a
        a = _rotate(a, 32)
        c = (c + d) & MASK
        d = _rotate(d, 16) ^ c
        a = (a + d) & MASK
        d = _rotate(d, 21) ^ a
        c = (c + b) & MASK
        b = _rotate(b, 17) ^ c
        c = _rotate(c, 32)
    return [a, b, c, d]


def siphash128(key, data):
    """The hash of `data`: 16 bytes."""
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    v = [
        low ^ 0x736F6D6570736575,
        high ^ 0x646F72616E646F6D ^ 0xEE,
        low ^ 0x6C7967656E657261,
        high ^ 0x7465646279746573,
    ]
    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, whole, 8)]
    words.append((len(data) & 0xFF) << 56 | int.from_bytes(data[whole:], "little"))
    for word in words:
        v[3] ^= word
        v = _rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xEE
    v = _rounds(v, 4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    v = _rounds(v, 4)
    return first.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


def chain(key, parent, keys):
    """A block's hash, over the parent block's hash and the block's keys."""
    body = b"".join((k & MASK).to_bytes(8, "little") for k in keys)
    return siphash128(key, (16).to_bytes(8, "little") + parent + len(body).to_bytes(8, "little") + body)


class Index:
    def __init__(self):
        self.blocks = {}

    def lookup(self, *name):
        return self.blocks.get(name, 0)

    def add(self, block, *name):
        self.blocks[name] = block

    def discard(self, block):
        names = [name for name, held in self.blocks.items() if held == block]
        for name in names:
            del self.blocks[name]
        return bool(names)
