"""Parts of messages that all rooms share."""

from __future__ import annotations

import functools
import warnings

import pytest

from amp_compiler.common.messages import first_line, nearest_path, suggestion, users_frame


@pytest.mark.parametrize(
    ("error", "plain", "named"),
    [
        (ValueError("one\ntwo"), "one", "ValueError: one"),
        (ValueError("\n\n  one \n"), "one", "ValueError: one"),
        (ValueError(""), "ValueError", "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_the_first_line_of_an_error(error: BaseException, plain: str, named: str) -> None:
    assert first_line(error) == plain
    assert first_line(error, named=True) == named


def test_a_long_line_is_cut() -> None:
    assert first_line(ValueError("x" * 300), limit=200) == "x" * 200


def test_suggestions() -> None:
    known = ["linear", "bilinear", "conv2d"]
    assert suggestion("liner", known) == "Did you mean 'linear'?"
    assert suggestion("liner", known, most=3) == "Did you mean 'linear' or 'bilinear'?"
    assert suggestion("zzz", known) == ""
    assert suggestion("zzz", known, otherwise="Known: all.") == "Known: all."
    assert suggestion("O9", ["O2"], cutoff=0.4) == "Did you mean 'O2'?"


def test_paths() -> None:
    assert nearest_path("encodr.*", ["", "encoder", "decoder"]) == "Did you mean 'encoder'?"
    assert nearest_path("zzz", ["", "a", "b", "c", "d", "e"]) == "Paths look like: a, b, c, d."
    assert nearest_path("zzz", [""]) == "Paths look like: (none)."


def _ours(source: str) -> None:
    """Run code as that of a module of the package."""
    exec(source, {"__name__": "amp_compiler.somewhere", "users_frame": users_frame, "warnings": warnings,
                  "call": functools.partial})  # fmt: skip


def test_a_warning_names_the_users_line_whatever_is_between() -> None:
    source = """
def inner(): warnings.warn("told", UserWarning, stacklevel=users_frame())
def outer(): inner()
outer()
"""
    with pytest.warns(UserWarning, match="told") as caught:
        _ours(source)
    assert caught[0].filename == __file__
