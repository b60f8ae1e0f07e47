from _fast.running import RunningRows
from _fast.seqs import SeqTable
from _fast.tables import BlockTables

class PlainRows:
    def __init__(self, seqs: SeqTable, tables: BlockTables, running: RunningRows) -> None: ...
