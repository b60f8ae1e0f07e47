from typing_extensions import Buffer

OK: int
TOO_DEEP: int
TOO_MANY_NODES: int
NOT_FINITE: int
LONE_SURROGATE: int
INTEGER_TOO_LARGE: int
MOST_NAMES: int
MOST_MEMBERS: int

def scan(data: Buffer, max_depth: int, max_nodes: int) -> tuple[int, int, list[bytes]]: ...
def members(data: Buffer) -> list[tuple[bytes, int, int]] | None: ...
