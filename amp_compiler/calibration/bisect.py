"""Find a large set of items that holds, in few evaluations. Pure Python: it knows no models and no metrics.

The items are given in order of increasing danger, and a predicate tells whether a set of them holds. One evaluation of
the predicate is expensive. In three steps:

1. **Bisect the prefix.** If all items together fail, the largest prefix of the order that holds is found. The first
   guess leaves out the suspects; then the number left out grows or shrinks by powers of two, and the last power is
   bisected. A good order puts what must be left out at the end, so this takes a few evaluations, whatever the number
   of items; without one it takes twice the binary logarithm of their number at most.
2. **Delta-debug the rest.** What was left out is added back, half by half: a group that fails is split until it is one
   item, which is then to blame. Every set that is asked for contains the last one that held.
3. The set that is returned is the last one that held: it was evaluated itself, also where the predicate is not
   monotone. Nothing is concluded about a set from another one.

Groups of items (modules) may be given: they are searched first, as if each were one item, and the groups that are to
blame are then searched item by item.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
#: a failing group of so few is not halved any more: asking for each alone takes fewer evaluations in the worst case
_ONE_BY_ONE = 4


class Exhausted(Exception):
    """Raised by a predicate that may not be asked again; the search ends with what it has."""


@dataclass(frozen=True)
class Found(Generic[T]):
    """What a search found.

    ``holds``: the set, in the order of the items; the predicate was true for exactly this set, or it is empty.
    ``blamed``: items that fail when they are added to what held at the time. ``unknown``: items that were left out but
    not asked about one by one. ``complete``: False if the predicate was exhausted before the search came to its end.
    """

    holds: tuple[T, ...]
    blamed: tuple[T, ...]
    unknown: tuple[T, ...]
    complete: bool


def find_largest(
    items: Sequence[T],
    holds: Callable[[frozenset[T]], bool],
    *,
    suspects: int = 0,
    groups: Iterable[Sequence[T]] = (),
) -> Found[T]:
    """Find a large set of ``items`` for which ``holds`` is true.

    Args:
        items: Distinct items, in order of increasing danger.
        holds: Tells whether a set holds. A set is asked for once. It may raise ``Exhausted``.
        suspects: How many of the last items are expected to fail: the first guess.
        groups: Disjoint groups of items that are searched first, each as a whole, in order of increasing danger. An
            item without a group is a group of its own, after the others.

    Examples:
        >>> found = find_largest(range(100), lambda low: not low & {97, 99})
        >>> found.blamed, len(found.holds)
        ((97, 99), 98)
    """
    search = _Search(items, holds)
    try:
        whole = [tuple(group) for group in groups if group]
        grouped = {item for group in whole for item in group}
        whole += [(item,) for item in items if item not in grouped]
        if len(whole) == len(items):
            search.prefix([(item,) for item in items], suspects)
        else:
            search.prefix(whole, 0)
        search.regain()
    except Exhausted:
        search.complete = False
    return search.result()


class _Search(Generic[T]):
    def __init__(self, items: Sequence[T], holds: Callable[[frozenset[T]], bool]) -> None:
        self.items, self._holds = items, holds
        self.asked: dict[frozenset[T], bool] = {frozenset(): True}
        self.kept: frozenset[T] = frozenset()
        self.left: list[tuple[T, ...]] = []  # groups that may still be added
        self.blamed: set[T] = set()
        self.complete = True

    def result(self) -> Found[T]:
        out = [item for item in self.items if item not in self.kept]
        return Found(
            tuple(item for item in self.items if item in self.kept),
            tuple(item for item in out if item in self.blamed),
            tuple(item for item in out if item not in self.blamed), self.complete,
        )  # fmt: skip

    def ask(self, items: frozenset[T]) -> bool:
        """Return whether a set holds; it becomes the one that is kept if it does and is larger."""
        if items not in self.asked:
            self.asked[items] = self._holds(items)
        if self.asked[items] and len(items) > len(self.kept):
            self.kept = items
        return self.asked[items]

    def prefix(self, groups: Sequence[tuple[T, ...]], suspects: int) -> None:
        """Keep the largest prefix of ``groups`` that holds; the groups after it are left."""
        count = len(groups)

        def holds_without(number: int) -> bool:
            return self.ask(frozenset(item for group in groups[: count - number] for item in group))

        if not count or holds_without(0):
            return
        fails, number = 0, min(suspects, count) or 1
        while number < count and not holds_without(number):  # leave out more and more
            fails, number = number, min(2 * number, count)
        if fails == 0:  # the first guess holds: leave out less
            step = 1
            while number - step > fails and holds_without(number - step):
                number, step = number - step, 2 * step
            fails = max(fails, number - step)
        while number - fails > 1:
            middle = (fails + number) // 2
            if holds_without(middle):
                number = middle
            else:
                fails = middle
        self.left = list(groups[count - number :])

    def regain(self) -> None:
        """Add back what can be added of the groups that are left: first groups as a whole, then their items."""
        failed = [*self.grow(self.left[:1]), *self.grow(self.left[1:])]  # the first is known to fail
        for group in failed:
            if len(group) > 1:
                self.grow([(item,) for item in group], fails=True)

    def grow(self, groups: Sequence[tuple[T, ...]], *, fails: bool = False) -> list[tuple[T, ...]]:
        """Add as many of ``groups`` as hold, by halves; return those that fail by themselves. ``fails``: they are known
        to fail together."""
        new = self.kept.union(*groups)
        if new == self.kept or (not fails and self.ask(new)):
            return []
        if len(groups) == 1:
            if len(groups[0]) == 1:
                self.blamed.add(groups[0][0])
            return list(groups)
        size = (len(groups) + 1) // 2 if len(groups) > _ONE_BY_ONE else 1
        parts = [groups[start : start + size] for start in range(0, len(groups), size)]
        return [group for part in parts for group in self.grow(part)]
