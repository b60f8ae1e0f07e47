class Rest:
    active: bool
    num_probes: int
    def __init__(self) -> None: ...
