from typing_extensions import Buffer

OK: int
TOO_DEEP: int
TOO_MANY_NODES: int
NOT_FINITE: int
LONE_SURROGATE: int
INTEGER_TOO_LARGE: int

def scan(data: Buffer, max_depth: int, max_nodes: int) -> tuple[int, int]: ...
