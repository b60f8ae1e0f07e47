class TokenShares:
    prompt_budget: int
    max_tokens: int
    def load(self) -> tuple[int, int, int, int]: ...
