"""docs/migrating.md has every example of the five guides that this project began with: as a block that
``tests/test_docs.py`` runs, or with the reason why it has no counterpart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "migrating.md"


class Example(NamedTuple):
    """One block of code of a guide. ``line``: of the guide, where the block begins."""

    line: int
    about: str


#: the examples of each guide, in its order; their outputs belong to them
GUIDES = {
    "MindSpore": [
        Example(48, "data and network"),
        Example(122, "auto_mixed_precision"),
        Example(141, "to_float of cells"),
        Example(164, "astype in construct"),
        Example(191, "DynamicLossScaler, the scaled loss"),
        Example(211, "value_and_grad"),
        Example(217, "a jitted step with all_finite"),
        Example(236, "the training loop"),
        Example(270, "build_train_network"),
        Example(285, "Model with amp_level"),
    ],
    "Paddle": [
        Example(134, "nine linear layers"),
        Example(161, "sizes and data"),
        Example(188, "fp32, dynamic graph"),
        Example(226, "O1, dynamic graph"),
        Example(269, "O2, dynamic graph"),
        Example(329, "Model.prepare with amp_configs, Model.fit"),
        Example(371, "gradient accumulation"),
        Example(423, "static program"),
        Example(437, "fp32, static graph"),
        Example(471, "O1, static graph, CustomOpLists"),
        Example(524, "O2, static graph, use_pure_fp16"),
        Example(570, "fp16_guard in the network"),
        Example(590, "O2, static graph, use_fp16_guard"),
        Example(689, "decorate before DataParallel"),
    ],
    "MXNet": [
        Example(33, "imports and sizes"),
        Example(65, "a synthetic loader"),
        Example(94, "a detector of the model zoo"),
        Example(112, "the network, hybridized"),
        Example(122, "Trainer"),
        Example(129, "the loop in fp32"),
        Example(180, "amp.init"),
        Example(194, "the network again"),
        Example(202, "init_trainer"),
        Example(216, "the loop with scale_loss"),
        Example(271, "convert_hybrid_block, convert_model"),
        Example(310, "lists of ops, cast_optional_params, save_checkpoint"),
    ],
    "OneFlow": [
        Example(11, "model, loss and optimizer"),
        Example(32, "a Graph with enable_amp"),
        Example(50, "the loop"),
        Example(66, "GradScaler"),
    ],
    "MegEngine": [
        Example(16, "autocast as a context"),
        Example(31, "autocast as a decorator"),
        Example(43, "a switch"),
        Example(55, "GradScaler.backward"),
        Example(87, "the same in single steps"),
    ],
}
OTHERS = ("Apex", "torch.autocast and GradScaler", "Lightning", "Accelerate and the Hugging Face Trainer")
_MARK = re.compile(r"^<!-- example: (?P<guide>\w+) (?P<numbers>\d+(?:, \d+)*) -->$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """The text below each headline of the second order."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def marked(section: str) -> dict[int, tuple[str, str]]:
    """The examples of a section by number: the guide that the mark names, and what follows the mark up to the next."""
    found: dict[int, tuple[str, str]] = {}
    marks = list(_MARK.finditer(section))
    for mark, after in zip(marks, [*marks[1:], None], strict=True):
        rest = section[mark.end() : after.start() if after else len(section)].strip()
        for number in map(int, mark["numbers"].split(", ")):
            assert number not in found, f"example {number} is there twice"
            found[number] = mark["guide"], rest
    return found


def answered(text: str) -> bool:
    """Whether a mark is followed at once by a block that runs, or by a reason."""
    return bool(re.match(r"```python\n>>> .*?\n```(\n|$)", text, re.DOTALL) or re.match(r"No counterpart: \w+", text))


@pytest.mark.parametrize("guide", GUIDES)
def test_every_example_has_a_place(guide: str) -> None:
    found = marked(sections(PAGE.read_text())[guide])
    wanted = {number: example for number, example in enumerate(GUIDES[guide], 1)}
    assert {n: e.about for n, e in wanted.items() if n not in found} == {}
    assert set(found) == set(wanted)
    assert {named for named, _ in found.values()} == {guide}
    assert {wanted[n].about for n, (_, text) in found.items() if not answered(text)} == set()


def test_every_section_has_a_table_and_says_what_differs() -> None:
    found = sections(PAGE.read_text())
    assert list(found) == ["The levels", *GUIDES, *OTHERS]
    for name in (*GUIDES, *OTHERS):
        assert re.search(r"^\| .+ \| here \|$", found[name], re.MULTILINE), name
        assert re.search(r"^What differs\b", found[name], re.MULTILINE), name
        assert "```" in found[name], name


def test_the_lists_are_in_the_order_of_the_guides() -> None:
    for examples in GUIDES.values():
        assert [e.line for e in examples] == sorted({e.line for e in examples})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\n>>> 1\n1\n```\n", True),
        ("No counterpart: there is no zoo.", True),
        ("```text\n>>> 1\n```\n", False),
        ("Some words.\n```python\n>>> 1\n1\n```\n", False),
        ("No counterpart.", False),
    ],
)
def test_what_counts_as_an_answer(text: str, expected: bool) -> None:
    assert answered(text) is expected
