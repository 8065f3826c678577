"""A function of torch's that is replaced for one thread and one block."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from amp_compiler.capture.patching import replaced


class Base:
    def inherited(self) -> str:
        return "base"


class Thing(Base):
    def own(self) -> str:
        return "own"

    @staticmethod
    def static(x: int) -> int:
        return x


def in_another_thread(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(20)
    return found[0]


@pytest.mark.parametrize("name", ["own", "inherited"])
def test_inside_and_after(name: str) -> None:
    before = dict(vars(Thing))
    expected = getattr(Thing(), name)()
    with replaced(Thing, name, lambda self: "new"):
        assert getattr(Thing(), name)() == "new"
        assert Base().inherited() == "base"
        assert in_another_thread(lambda: getattr(Thing(), name)()) == expected
    assert getattr(Thing(), name)() == expected
    assert dict(vars(Thing)) == before


def test_after_an_error() -> None:
    with pytest.raises(ValueError, match="x"), replaced(Thing, "own", lambda self: "new"):
        raise ValueError("x")
    assert Thing().own() == "own"


def test_a_static_method_stays_one() -> None:
    before = vars(Thing)["static"]
    with replaced(Thing, "static", lambda x: -x):
        assert Thing.static(1) == -1
    assert vars(Thing)["static"] is before


def test_a_function_of_a_module_and_one_inside_another() -> None:
    module = SimpleNamespace(run=lambda x: x)
    old = module.run
    with replaced(module, "run", lambda x: old(x) + 1):
        inner = module.run
        with replaced(module, "run", lambda x: inner(x) * 10):
            assert module.run(1) == 20
        assert module.run(1) == 2
    assert module.run is old


def test_two_threads_do_not_overlap() -> None:
    """The first to end would put back what the second has replaced."""
    entered, order = threading.Event(), []

    def second() -> None:
        entered.wait(20)
        with replaced(Thing, "own", lambda self: "second"):
            order.append(Thing().own())

    thread = threading.Thread(target=second)
    thread.start()
    with replaced(Thing, "own", lambda self: "first"):
        entered.set()
        thread.join(0.2)
        order.append(Thing().own())
    thread.join(20)
    assert order == ["first", "second"]
    assert Thing().own() == "own"
