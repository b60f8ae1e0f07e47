from collections.abc import Callable, Iterable, Sequence

class TokenTable:
    num_tokens: int
    each_byte: bool
    def __init__(self, blob: bytes, offsets: object, special: bytes, each_byte: bool = False) -> None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def join(self, token_ids: Sequence[int], skip_special: bool = False) -> bytes: ...

class StopSet:
    stops: tuple[bytes, ...]
    def __init__(self, stops: Sequence[bytes]) -> None: ...

class Detokenizer:
    num_tokens: int
    min_tokens: int
    matched: int
    def __init__(
        self,
        table: TokenTable,
        stops: StopSet | None = None,
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        strip: int = 0,
        first: Callable[[int], bytes] | None = None,
    ) -> None: ...
    def feed(self, token_ids: Iterable[int]) -> str: ...
    def skip(self, count: int) -> None: ...
    def finish(self) -> str: ...
