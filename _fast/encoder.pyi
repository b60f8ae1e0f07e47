from _fast.entries import Entries

class EncoderTable(Entries):
    under_way: int
