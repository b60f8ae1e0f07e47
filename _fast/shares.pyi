class TokenShares:
    prompt_budget: int
    max_tokens: int
    times_held: int
    def load(self) -> tuple[int, int, int, int]: ...
