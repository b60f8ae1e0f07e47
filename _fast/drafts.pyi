class Drafts:
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    @property
    def accepted_per_place(self) -> list[int]: ...
