"""Section: a group of parts as text, with equal layers merged, and each part with the kernels that it launches.

Thread: any; pure. In: lines of text by path, and the launches of steps by size. Out: lines. Items of a list with equal
lines form one group. The group is printed with the kernels that most of its items launch; the different kernels of
the other items follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.explain.launches import Launch

ITEM = re.compile(r"(?P<list>[^\d]+?)\.(?P<number>\d+)(?=\.|$)")  # an item of the outermost list in a path
Steps = Mapping[int, Sequence[Launch]]  # by tokens
Kernels = Mapping[int, tuple[str, ...]]  # by tokens, each kernel once


@dataclass(frozen=True, slots=True)
class Section:
    """The parts that one call runs."""

    title: str
    lines: Mapping[str, str]  # by path
    held: Mapping[str, str]  # path -> form of the matrix, for filled parts
    facts: Mapping[str, str]  # further lines of some paths
    steps: Steps

    def text(self) -> Iterator[str]:
        """The section as lines."""
        yield self.title
        kernels, order = kernels_of(self.steps), Order(self.steps, list(self.lines))
        units: dict[str, list[str]] = {}  # a path, or the path of a list -> all paths below it
        for path in (*self.lines, *kernels):
            found = ITEM.match(path)
            below = units.setdefault(path if found is None else found["list"], [])
            if path not in below:
                below.append(path)
        for unit, below in sorted(units.items(), key=lambda unit: min(map(order.place, unit[1]))):
            if below == [unit]:
                yield from self._part(unit, unit or "by itself", kernels, 1)
                continue
            items: dict[str, list[str]] = {}  # "layers.3" -> its paths, in the order in which they run
            for path in sorted(below, key=order.place):
                items.setdefault(found[0] if (found := ITEM.match(path)) else unit, []).append(path)
            items = dict(sorted(items.items(), key=lambda item: int(item[0].rpartition(".")[2])))
            for group in self._alike(items):
                yield from self._group(group, items, kernels)

    def _alike(self, items: Mapping[str, Sequence[str]]) -> list[list[str]]:
        """Groups of items with equal parts and facts."""
        groups: dict[object, list[str]] = {}
        for item, paths in items.items():
            said = frozenset((path[len(item) :], self.lines[path]) for path in paths if path in self.lines)
            groups.setdefault((said, self.facts.get(item)), []).append(item)
        return list(groups.values())

    def _group(
        self, group: Sequence[str], items: Mapping[str, Sequence[str]], kernels: Mapping[str, Kernels]
    ) -> Iterator[str]:
        launched = {
            item: {path[len(item) :]: kernels[path] for path in items[item] if path in kernels} for item in group
        }
        ran = [item for item in group if launched[item]]
        usual = _most_common(ran, launched) if ran else group[0]
        listed, many = usual.rpartition(".")[0], f" ({len(group)} alike)" if len(group) > 1 else ""
        numbers = ranges([int(item.rpartition(".")[2]) for item in group])
        yield from self._part(usual, f"{listed}.{numbers}{many}", kernels, 1)
        for path in items[usual]:
            if path != usual:
                yield from self._part(path, path[len(usual) + 1 :], kernels, 2)
        for item in ran:
            for below in dict.fromkeys((*launched[item], *launched[usual])):
                own = launched[item].get(below, {})
                if own != launched[usual].get(below, {}):
                    yield f"    in {item}{below} instead"
                    yield from (f"      {line}" for line in by_size(own) or ["no kernel"])

    def _part(self, path: str, name: str, kernels: Mapping[str, Kernels], depth: int) -> Iterator[str]:
        said = [self.lines[path]] if path in self.lines else []
        said += [f"held as {self.held[path]}"] if path in self.held else []
        yield f"{'  ' * depth}{name}: {'; '.join(said)}".rstrip(": ")
        if path in self.facts:
            yield f"{'  ' * (depth + 1)}{self.facts[path]}"
        yield from (f"{'  ' * (depth + 1)}{line}" for line in by_size(kernels.get(path, {})))


class Order:
    """The order of parts: by first launch; a part without launches comes before the part constructed next."""

    def __init__(self, steps: Steps, constructed: Sequence[str]) -> None:
        self._first: dict[str, float] = {}
        launches = [launch for tokens in steps.values() for launch in tokens]
        for number, launch in enumerate(launches):
            path = launch.owner
            self._first.setdefault(path, number)
            while path := path.rpartition(".")[0]:
                self._first.setdefault(path, number)
        following: dict[str, float] = {}  # parent -> place of the part constructed next
        for path in reversed(constructed):
            parent = path.rpartition(".")[0]
            place = self._first.setdefault(path, following.get(parent, self._first.get(parent, float("inf"))))
            following[parent] = place

    def place(self, path: str) -> float:
        return self._first[path]


def kernels_of(steps: Steps) -> dict[str, Kernels]:
    """Path -> tokens of a step -> the distinct kernels launched."""
    found: dict[str, dict[int, dict[str, None]]] = {}
    for tokens, launches in steps.items():
        for owner, kernel in launches:
            found.setdefault(owner, {}).setdefault(tokens, {})[kernel] = None
    return {path: {tokens: tuple(names) for tokens, names in sizes.items()} for path, sizes in found.items()}


def by_size(kernels: Kernels) -> list[str]:
    """One line for each set of kernels, with the step sizes that launch it: "1, 32: ..."."""
    sizes: dict[tuple[str, ...], list[int]] = {}
    for tokens, names in kernels.items():
        sizes.setdefault(names, []).append(tokens)
    return [f"{', '.join(map(str, alike))}: {', '.join(names)}" for names, alike in sizes.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: "0-3,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _most_common(items: Sequence[str], launched: Mapping[str, Mapping[str, Kernels]]) -> str:
    """The item whose kernels are the most frequent; at a tie the last item but one."""
    alike = Counter(str(launched[item]) for item in items)
    return max([*items[-2:], *items[:-2]], key=lambda item: alike[str(launched[item])])
