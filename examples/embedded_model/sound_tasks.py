"""Questions about sounds: spoken digits, command words, tones. Each function generates a sound and its turns."""

from __future__ import annotations

from collections.abc import Callable

from examples.embedded_model.blueprint import SAMPLE_RATE
from examples.embedded_model.picture_tasks import sentence, with_media
from examples.embedded_model.sample import Dice, Media, Turn
from examples.embedded_model.sounds import COMMANDS, beeps, digit_text, slide, speak, wear
from examples.embedded_model.spoken import utterances

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six")


def digit_sound(dice: Dice) -> tuple[Media, str]:
    """One to six digits, spoken by a voice, mostly without pauses."""
    if dice.portable:
        said, wave = dice.pick([u for u in utterances() if u[0].isdigit()])
        return Media("audio", wear(dice, wave), SAMPLE_RATE), said
    length = dice.whole(1, 6) if dice.chance(0.7) else dice.whole(4, 6)
    digits = "".join(dice.pick("0123456789") for _ in range(length))
    return Media("audio", wear(dice, speak(dice, digit_text(dice, digits))), SAMPLE_RATE), digits


def command_sound(dice: Dice) -> tuple[Media, str]:
    """One spoken command word."""
    if dice.portable:
        said, wave = dice.pick([u for u in utterances() if not u[0].isdigit()])
        return Media("audio", wear(dice, wave), SAMPLE_RATE), said
    word = dice.pick(COMMANDS)
    text = dice.pick((word, word, word + ".", word + "!", word.capitalize()))
    return Media("audio", wear(dice, speak(dice, text)), SAMPLE_RATE), word


def digits(dice: Dice) -> list[Turn]:
    """The spoken digits, and sometimes a question about them."""
    media, string = digit_sound(dice)
    turns = [Turn([dice.ask("digits")], string)]
    roll = dice.r.random()
    if roll < 0.08:
        turns.append(Turn([dice.ask("num_digits")], str(len(string))))
    elif roll < 0.16:
        last = dice.chance(0.5)
        turns.append(Turn([dice.ask("last_digit", nth="last" if last else "first")], string[-1] if last else string[0]))
    elif roll < 0.22:
        turns[0] = Turn([dice.ask("hear")], f"The digits {string}.")
    return with_media(dice, [media], turns)


def command(dice: Dice) -> list[Turn]:
    """Which of the forty command words it is."""
    media, word = command_sound(dice)
    turns = [Turn([dice.ask("command")], sentence(word))]
    if dice.chance(0.08):
        turns[0] = Turn([dice.ask("hear")], f"The word {word}.")
    elif dice.chance(0.08):
        other = dice.pick(COMMANDS)
        other = word if dice.chance(0.5) else other
        turns.append(Turn([f"Is the word {other}?"], "Yes." if other == word else "No."))
    return with_media(dice, [media], turns)


def tones(dice: Dice) -> list[Turn]:
    """Whether a tone rises or falls; how many beeps there are, and whether they are long or short."""
    if dice.chance(0.4):
        rising = dice.chance(0.5)
        media = Media("audio", wear(dice, slide(dice, rising), speech=False), SAMPLE_RATE)
        word = "rising" if rising else "falling"
        turns = [Turn([dice.ask("tone")], sentence(word)), Turn([dice.ask("hear")], f"A {word} tone.")]
    else:
        count, long = dice.whole(1, 6), dice.chance(0.4)
        media = Media("audio", wear(dice, beeps(dice, count, long), speech=False), SAMPLE_RATE)
        word = "long" if long else "short"
        what = f"{NUMBER_WORDS[count]} {word} beep" + ("s" if count > 1 else "")
        turns = [Turn([dice.ask("beeps")], str(count)), Turn([dice.ask("length")], sentence(word)),
                 Turn([dice.ask("hear")], sentence(what))]  # fmt: skip
    order = dice.some(range(len(turns)), dice.whole(1, len(turns)))
    return with_media(dice, [media], [turns[i] for i in order])


TASKS: tuple[tuple[Callable[[Dice], list[Turn]], float, str], ...] = (
    (digits, 3.0, "audio_digits"),
    (command, 1.5, "audio_commands"),
    (tones, 1.0, "audio_tones"),
)
