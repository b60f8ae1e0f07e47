"""The mixture of tasks: how often each is generated, and how turns are joined into conversations.

In: a seed, and weights that raise the shares of tasks in which the model is weak. Out: an endless stream of `Sample`s;
sample number i of seed s is always the same. `held=True` gives the held-out stream.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
from collections.abc import Iterator

from examples.embedded_model import films, picture_tasks, sound_tasks, talk_tasks, text_tasks, tool_tasks
from examples.embedded_model.sample import Dice, Sample, Turn

MEDIA = (*picture_tasks.TASKS, *sound_tasks.TASKS, *films.TASKS)
TEXT = (*text_tasks.TASKS, *talk_tasks.TASKS)
# Each group of tasks with its share; within a group the tasks have weights of their own.
ROOMS = {"image": (picture_tasks.TASKS, 4.5), "audio": (sound_tasks.TASKS, 1.8), "video": (films.TASKS, 1.2),
         "letters": (text_tasks.TASKS, 5.0), "talk": (talk_tasks.TASKS, 2.0),
         "tools": (tool_tasks.TASKS, 3.0), "sides": (picture_tasks.SIDES, 0.4)}  # fmt: skip


class Mixture:
    """Generates samples; `weights` multiplies the share of a task or of a row of the table."""

    def __init__(self, weights: dict[str, float] | None = None, only: str = "") -> None:
        weights = weights or {}
        self.names, self.makers, self.rows, shares = [], [], [], []
        for room, (tasks, share) in ROOMS.items():
            total = sum(weight for _, weight, _ in tasks)
            for maker, weight, row in tasks:
                factor = weights.get(maker.__name__, 1.0) * weights.get(row, 1.0) * weights.get(room, 1.0)
                if only and only not in (room, row, maker.__name__):
                    continue
                self.names.append(f"{room}.{maker.__name__}")
                self.makers.append(maker)
                self.rows.append(row)
                shares.append(share * weight / total * factor)
        self.edges = list(itertools.accumulate(shares))

    def throw(self, dice: Dice) -> Sample:
        """Generates one conversation."""
        index = bisect.bisect(self.edges, dice.r.random() * self.edges[-1])
        index = min(index, len(self.edges) - 1)
        turns = self._turns(dice, index)
        text = self.names[index].startswith(("letters", "talk"))
        extra = dice.whole(1, 3) if dice.chance(0.35 if text else 0.08) else 0
        for _ in range(extra):
            turns += _text_turns(dice)
        return Sample(self.names[index], turns, dice.system())

    def _turns(self, dice: Dice, index: int) -> list[Turn]:
        dice.task = self.makers[index].__name__
        made = self.makers[index](dice)
        turns = made if isinstance(made, list) else [made]
        for turn in turns:
            turn.task = turn.task or ("json" if turn.check == "json" else self.rows[index])
        return turns


def _text_turns(dice: Dice) -> list[Turn]:
    """One more exchange of text, as turns."""
    maker, _, row = dice.pick(TEXT)
    dice.task = maker.__name__
    made = maker(dice)
    turns = made if isinstance(made, list) else [made]
    for turn in turns:
        turn.task = "json" if turn.check == "json" else row
    return turns


def stream(
    seed: int, held: bool = False, mixture: Mixture | None = None, start: int = 0, step: int = 1
) -> Iterator[Sample]:
    """Samples number start, start + step, ... of a seed."""
    mixture = mixture or Mixture()
    for number in itertools.count(start, step):
        yield mixture.throw(Dice(f"{seed}/{number}", held))


def texts_only(seed: int, count: int) -> Iterator[str]:
    """The texts of the mixture without any media, for training the tokenizer."""
    for number in range(count):
        dice = Dice(f"{seed}/{number}")
        for turn in _text_turns(dice):
            yield " ".join(p for p in turn.parts if isinstance(p, str))
            yield turn.answer
    for number in range(max(1, count // 20)):
        for maker, _, _ in picture_tasks.TASKS:
            for turn in maker(Dice(f"{seed}/{number}")):
                yield " ".join(p for p in turn.parts if isinstance(p, str))
                yield turn.answer


def main() -> None:
    """Prints some conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--only", default="", help="a room, a row of the table or a generator")
    args = parser.parse_args()
    for sample in itertools.islice(stream(args.seed, args.held, Mixture(only=args.only)), args.show):
        print(f"{sample.task}  {sample.system}")
        for turn in sample.turns:
            asked = [p if isinstance(p, str) else f"<{p.kind} {p.data.shape}>" for p in turn.parts]
            print(f"    {' '.join(asked)!r} -> {turn.answer!r}")


if __name__ == "__main__":
    main()
