"""Languages of recordings: ISO 639 codes as in Whisper's tokens, and their English names.

Pure. A code that is not listed here is refused. Texts in the languages of `UNSPACED` are joined without a space.
"""

from __future__ import annotations

from server.errors import invalid, quoted

LANGUAGES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin",
    "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian",
    "lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian", "kn": "kannada",
    "et": "estonian", "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian",
    "ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili",
    "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer", "sn": "shona",
    "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan", "ka": "georgian", "be": "belarusian",
    "tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao",
    "uz": "uzbek", "fo": "faroese", "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk",
    "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog",
    "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa",
    "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
}  # fmt: skip
_CODES = {name: code for code, name in LANGUAGES.items()} | {"jv": "jw"}
UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue", "bo", "km"))


def code_of(param: str, given: str | None) -> str:
    """The code of a language that a client names by code or in English; "" if none is given. Raises ApiError."""
    if given is None or not given.strip():
        return ""
    word = given.strip().lower()
    code = _CODES.get(word, word)
    if code not in LANGUAGES:
        text = f"{param}: got {quoted(given)}; must be an ISO 639-1 code such as en, de or ja"
        raise invalid(param, text)
    return code


def name_of(code: str) -> str:
    """The English name, as in `verbose_json`."""
    return LANGUAGES.get(code, code)


def separator(code: str) -> str:
    """The separator between the texts of two windows."""
    return "" if code in UNSPACED else " "
