"""Words around a question, and words of a phrasing that can replace each other."""

LEADS = (
    "Please answer:", "Question:", "Hello!", "Hi.", "Hey,", "Tell me:", "Quick question:", "Please:", "OK,",
    "One question:", "Good morning!", "So,", "Now,", "Look:", "I wonder:", "Help me:", "I have a question:", "Excuse me,",
    "Here is my question.", "Could you answer this?", "Well,", "And now:", "Listen:", "Let us see.", "Try this:", "Next:",
    "My question is:", "Good evening.", "Dear assistant,", "Task:", "Q:", "Answer this:", "Think:", "Be careful.",
)  # fmt: skip
ASIDES = ("Thanks!", "Please.", "Thank you.", "Answer briefly.", "Be brief.", "Just the answer.", "Keep it short.")
SYSTEMS = (
    "You are a helpful assistant.", "You are a small model that sees, hears and reads.", "Answer briefly.",
    "You are omniloop, a small assistant.", "Be short and precise.", "You are a friendly assistant.",
    "Answer the question of the user.", "You help people.",
)  # fmt: skip

# Words of a training phrasing that can replace each other.
_PICTURE, _PICTURES = ("image", "picture", "photo", "drawing"), ("images", "pictures", "photos")
_FILM, _SOUND = ("video", "clip", "film", "movie"), ("recording", "audio", "sound", "sound clip", "audio clip")
SWAPS: dict[str, tuple[str, ...]] = {
    "picture": _PICTURE, "image": _PICTURE, "photo": _PICTURE, "pictures": _PICTURES, "images": _PICTURES, "video": _FILM,
    "clip": _FILM, "recording": _SOUND, "audio": _SOUND, "digits": ("digits", "numbers"), "spoken": ("spoken", "said", "heard"),
    "said": ("said", "spoken", "heard"), "see": ("see", "notice", "find", "spot", "recognize"), "Which": ("Which", "What"),
    "shown": ("shown", "visible", "drawn", "displayed", "seen", "to be seen"), "color": ("color", "colour"),
    "colour": ("color", "colour"), "Write": ("Write", "Give me", "Show me", "Print", "Put"), "object": ("object", "thing", "item"),
    "Convert": ("Convert", "Change", "Turn", "Transform"), "Calculate": ("Calculate", "Compute", "Work out", "Find"),
    "Compute": ("Calculate", "Compute", "Work out", "Evaluate"), "Tell": ("Tell", "Show", "Give"), "Name": ("Name", "Say", "State"),
    "Describe": ("Describe", "Explain", "Tell me about", "Summarize"), "bigger": ("bigger", "larger"),
    "smaller": ("smaller", "littler"), "word": ("word", "term"), "written": ("written", "printed", "shown"), "moving": ("moving", "going"),
    "printed": ("printed", "written"), "Sort": ("Sort", "Order", "Arrange"), "Reverse": ("Reverse", "Invert", "Flip"),
    "text": ("text", "writing", "print"), "appears": ("appears", "shows up", "comes up"), "becomes": ("becomes", "turns"),
    "beeps": ("beeps", "tones", "sounds"), "long": ("long",), "list": ("list", "sequence"), "contain": ("contain", "include", "have"),
    "contains": ("contains", "includes", "has"), "shows": ("shows", "has", "presents"), "has": ("has", "shows"),
    "voice": ("voice", "speaker", "person"), "speaker": ("voice", "speaker", "person"), "hear": ("hear", "notice"),
}  # fmt: skip
COMMAND_VERBS = frozenset(
    "Name Describe Count Write Sort Reverse Spell Convert Tell Read Transcribe Add Subtract Multiply Divide Calculate Compute "
    "Solve Put Make Turn Repeat Say Copy Order Arrange Find Change Express List Type Uppercase Lowercase Take".split()
)
WISHES = ("Can you {c}?", "Could you {c}?", "Could you please {c}?", "Please {c}.", "I want you to {c}.", "Now {c}.",
          "Would you {c}?", "I would like you to {c}.", "Try to {c}.", "{c}")  # fmt: skip
