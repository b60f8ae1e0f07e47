from _fast.prefix import PrefixIndex
from _fast.seqs import SeqTable

class BlockNames:
    def __init__(self, index: PrefixIndex, seqs: SeqTable, block_size: int, primary: int) -> None: ...
