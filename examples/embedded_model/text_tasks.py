"""Text without media: arithmetic, counting, letters, order, calendar, units. Each function generates one turn."""

from __future__ import annotations

from collections.abc import Callable

from examples.embedded_model.sample import Dice, Turn

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
            "twelfth")  # fmt: skip
# larger unit, smaller unit, factor
UNITS = (
    ("km", "m", 1000), ("kilometers", "meters", 1000), ("m", "cm", 100), ("meters", "centimeters", 100),
    ("cm", "mm", 10), ("centimeters", "millimeters", 10), ("m", "mm", 1000), ("kg", "g", 1000),
    ("kilograms", "grams", 1000), ("tons", "kilograms", 1000), ("liters", "milliliters", 1000), ("l", "ml", 1000),
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7),
    ("years", "months", 12), ("feet", "inches", 12), ("yards", "feet", 3), ("dozen", "pieces", 12),
    ("dollars", "cents", 100), ("euros", "cents", 100),
)  # fmt: skip


def _number(dice: Dice) -> int:
    """A number of up to three digits; longer numbers are more frequent because they are harder."""
    roll = dice.r.random()
    return dice.whole(0, 9) if roll < 0.15 else dice.whole(10, 99) if roll < 0.45 else dice.whole(100, 999)


def add(dice: Dice) -> Turn:
    """A sum of numbers up to 999."""
    a, b = _number(dice), _number(dice)
    return Turn([dice.ask("sum", a=a, b=b)], str(a + b))


def subtract(dice: Dice) -> Turn:
    """A difference, which is sometimes negative."""
    a, b = _number(dice), _number(dice)
    if a < b and dice.chance(0.7):
        a, b = b, a
    return Turn([dice.ask("difference", a=a, b=b)], str(a - b))


def multiply(dice: Dice) -> Turn:
    """Multiplication tables up to twelve, and up to three digits times one digit."""
    if dice.chance(0.5):
        a, b = dice.whole(0, 12), dice.whole(0, 12)
    else:
        a, b = dice.whole(2, 999), dice.whole(2, 9)
        if dice.chance(0.3):
            a, b = b, a
    return Turn([dice.ask("product", a=a, b=b)], str(a * b))


def divide(dice: Dice) -> Turn:
    """A division without remainder."""
    b = dice.whole(1, 12)
    quotient = dice.whole(0, 12) if dice.chance(0.5) else dice.whole(2, 99)
    if quotient * b > 999:
        b = dice.whole(2, 9)
    return Turn([dice.ask("quotient", a=quotient * b, b=b)], str(quotient))


def larger(dice: Dice) -> Turn:
    """The greater of two numbers."""
    a, b = _number(dice), _number(dice)
    if a == b:
        b += 1
    return Turn([dice.ask("larger", a=a, b=b)], str(max(a, b)))


def count_numbers(dice: Dice) -> Turn:
    """Counting up or down over up to a dozen numbers."""
    start, length = dice.whole(0, 90), dice.whole(3, 12)
    if dice.chance(0.4):
        start = dice.whole(0, 10)
    numbers = list(range(start, start + length))
    if dice.chance(0.35):
        numbers.reverse()
        return Turn([dice.ask("count_down", a=numbers[0], b=numbers[-1])], ", ".join(map(str, numbers)))
    return Turn([dice.ask("count_up", a=numbers[0], b=numbers[-1])], ", ".join(map(str, numbers)))


def _quoted(dice: Dice, word: str) -> str:
    """The word without or with one of two kinds of quotation marks."""
    return dice.pick((word, word, f'"{word}"', f"'{word}'"))


def count_letters(dice: Dice) -> Turn:
    """The number of letters of a word."""
    word = dice.word()
    return Turn([dice.ask("letters", w=_quoted(dice, word))], str(len(word)))


def count_words(dice: Dice) -> Turn:
    """The number of words in a text."""
    words = [dice.word() for _ in range(dice.whole(2, 8))]
    return Turn([dice.ask("num_words", w=" ".join(words))], str(len(words)))


def _string(dice: Dice, longest: int = 9) -> str:
    """Mostly a word, sometimes random letters."""
    if dice.chance(0.75):
        return dice.word(longest)
    return "".join(dice.pick("abcdefghijklmnopqrstuvwxyz") for _ in range(dice.whole(3, 7)))


def reverse(dice: Dice) -> Turn:
    """A word with its letters in reverse order."""
    word = _string(dice)
    if dice.chance(0.1):
        word = str(dice.whole(10, 99999))
    return Turn([dice.ask("reverse", w=_quoted(dice, word))], word[::-1])


def reverse_list(dice: Dice) -> Turn:
    """A short list in reverse order."""
    items = _list_of_words(dice) if dice.chance(0.6) else [str(dice.whole(0, 99)) for _ in range(dice.whole(3, 6))]
    return Turn([dice.ask("reverse_list", w=", ".join(items))], ", ".join(items[::-1]))


def change_case(dice: Dice) -> Turn:
    """Upper or lower case of a word or two."""
    text = " ".join(_string(dice) for _ in range(1 if dice.chance(0.75) else 2))
    if dice.chance(0.5):
        shown = text.capitalize() if dice.chance(0.3) else text
        return Turn([dice.ask("upper", w=_quoted(dice, shown))], text.upper(), "cased")
    shown = text.capitalize() if dice.chance(0.2) else text.upper()
    return Turn([dice.ask("lower", w=_quoted(dice, shown))], text.lower(), "cased")


def spell(dice: Dice) -> Turn:
    """A word's letters, joined with hyphens."""
    word = _string(dice)
    return Turn([dice.ask("spell", w=_quoted(dice, word))], "-".join(word))


def repeat(dice: Dice) -> Turn:
    """The words of the question once more."""
    text = " ".join(_string(dice) if dice.chance(0.9) else str(_number(dice)) for _ in range(dice.whole(1, 6)))
    return Turn([dice.ask("repeat", w=text)], text)


def _list_of_words(dice: Dice) -> list[str]:
    return list(dict.fromkeys(dice.word() for _ in range(dice.whole(3, 5))))


def _list_of_numbers(dice: Dice) -> list[int]:
    top = dice.pick((9, 20, 99, 99, 999))
    return dice.some(range(top + 1), dice.whole(3, 6))


def sort_numbers(dice: Dice) -> Turn:
    """Three to six numbers in ascending or descending order."""
    numbers = _list_of_numbers(dice)
    down = dice.chance(0.3)
    question = dice.ask("sort_down" if down else "sort_up", w=", ".join(map(str, numbers)))
    return Turn([question], ", ".join(map(str, sorted(numbers, reverse=down))))


def sort_words(dice: Dice) -> Turn:
    """Three to five words in alphabetical order."""
    words = _list_of_words(dice)
    return Turn([dice.ask("sort_words", w=", ".join(words))], ", ".join(sorted(words)))


def largest(dice: Dice) -> Turn:
    """The maximum of a list."""
    numbers = _list_of_numbers(dice)
    return Turn([dice.ask("largest", w=", ".join(map(str, numbers)))], str(max(numbers)))


def calendar(dice: Dice) -> Turn:
    """Days and months: the next, the previous, how many, and which number."""
    kind, names = dice.pick((("day", DAYS), ("month", MONTHS)))
    index = dice.whole(0, len(names) - 1)
    roll = dice.whole(0, 5)
    if roll <= 1:
        return Turn([dice.ask("next", w=names[index], kind=kind)], names[(index + 1) % len(names)] + ".")
    if roll == 2:
        return Turn([dice.ask("previous", w=names[index], kind=kind)], names[(index - 1) % len(names)] + ".")
    if roll == 3:
        days = dice.whole(2, 10)
        start = dice.whole(0, 6)
        return Turn([dice.ask("days_later", w=DAYS[start], n=days)], DAYS[(start + days) % 7] + ".")
    if roll == 4:
        whole = "week" if kind == "day" else "year"
        return Turn([dice.ask("nth_of", n=ORDINALS[index], kind=kind, whole=whole)], names[index] + ".")
    month = dice.whole(0, 11)
    return Turn([dice.ask("month_days", w=MONTHS[month])], str(MONTH_DAYS[month]))


def convert(dice: Dice) -> Turn:
    """Units: multiplication, or division without remainder."""
    large, small, factor = dice.pick(UNITS)
    count = dice.whole(1, 12) if dice.chance(0.6) else dice.whole(1, 99 if factor in (10, 100, 1000) else 20)
    if dice.chance(0.4):
        return Turn([dice.ask("convert", n=count * factor, a=small, b=large)], f"{count} {large}")
    return Turn([dice.ask("convert", n=count, a=large, b=small)], f"{count * factor} {small}")


# function, weight in training, row of the table
TASKS: tuple[tuple[Callable[[Dice], Turn], float, str], ...] = (
    (add, 3.0, "text_arithmetic"),
    (subtract, 3.0, "text_arithmetic"),
    (multiply, 3.0, "text_arithmetic"),
    (divide, 1.5, "text_arithmetic"),
    (larger, 0.4, "text_arithmetic"),
    (count_numbers, 0.8, "text_counting"),
    (count_letters, 1.2, "text_counting"),
    (count_words, 1.0, "text_counting"),
    (reverse, 2.5, "text_letters"),
    (reverse_list, 0.7, "text_letters"),
    (change_case, 1.8, "text_letters"),
    (spell, 1.5, "text_letters"),
    (repeat, 0.7, "text_letters"),
    (sort_numbers, 1.5, "text_sorting"),
    (sort_words, 2.0, "text_sorting"),
    (largest, 0.4, "text_sorting"),
    (calendar, 1.0, "text_calendar"),
    (convert, 1.5, "text_units"),
)
