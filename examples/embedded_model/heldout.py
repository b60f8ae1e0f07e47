"""The held-out set as messages: phrasings, words, backgrounds, voices and codecs that training never uses.

`items(n, seed)` needs only this repository, Pillow, av and scipy (speech comes from a small recorded pack, printed text
uses Pillow's own font), so it gives the same items everywhere. `live=True` adds the machine's fonts and espeak-ng.

    for task, messages, expected, check in items(200, seed=1): ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from examples.embedded_model.encode import MAX_AUDIO, TABLE
from examples.embedded_model.media import message
from examples.embedded_model.mixture import Mixture
from examples.embedded_model.sample import Dice, Media, Sample

Item = tuple[str, list[dict], str, str]


def _short_enough(sample: Sample) -> bool:
    """Whether no sound is longer than those in training."""
    media = [p for t in sample.turns for p in t.parts if isinstance(p, Media)]
    sounds = [m if m.kind == "audio" else m.sound for m in media if m.kind == "audio" or m.sound]
    return all(len(s.data) <= MAX_AUDIO for s in sounds)


def samples(n: int, seed: int, live: bool = False, tasks: Sequence[str] = TABLE) -> Iterator[tuple[str, Sample, Dice]]:
    """`n` conversations, with the tasks in turn; each conversation ends with a turn of its task."""
    mixtures = {task: Mixture(only=task) for task in tasks}
    number = made = 0
    while made < n:
        task = tasks[made % len(tasks)]
        dice = Dice(f"heldout/{seed}/{number}", held=True, portable=not live)
        number += 1
        sample = mixtures[task].throw(dice)
        last = [i for i, turn in enumerate(sample.turns) if turn.task == task]
        if not last or not _short_enough(sample):
            continue
        sample.turns = sample.turns[: dice.pick(last) + 1]
        made += 1
        yield task, sample, dice


def items(n: int, seed: int, live: bool = False, tasks: Sequence[str] = TABLE) -> Iterator[Item]:
    """Task, messages in OpenAI's format, expected answer, and how to judge it (Turn.check)."""
    for task, sample, dice in samples(n, seed, live, tasks):
        messages: list[dict] = [{"role": "system", "content": sample.system}] if sample.system else []
        for turn in sample.turns[:-1]:
            messages += [message(dice, turn), {"role": "assistant", "content": turn.answer}]
        messages.append(message(dice, sample.turns[-1]))
        yield task, messages, sample.turns[-1].answer, sample.turns[-1].check


def judge(got: str, expected: str, check: str) -> bool:
    """Whether an answer is right; case, spaces and punctuation count only if the question is about them."""
    if check == "call":
        got, expected = (
            text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>") for text in (got, expected)
        )
    if check in ("json", "schema", "call"):
        try:
            return json.loads(got) == json.loads(expected)
        except ValueError:
            return False
    if check == "cased":
        return got.strip() == expected
    plain = [re.sub(r"[^a-z0-9-]+", " ", text.lower()).strip() for text in (got, expected)]
    return plain[0] == plain[1]
