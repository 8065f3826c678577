"""The table of published speed-ups: what is predicted for it stays as good as it was."""

from __future__ import annotations

import pytest

from benchmark_helpers import load

predict = load("predict")
ROWS = predict.published()
#: rows that `make test` predicts again; the others take minutes
QUICK = [row for row in ROWS if row.network == "nine_8192" or (row.network == "resnet50" and row.batch == 1)]
LIMIT = 0.25


def error(row: object) -> float:
    return row.predicted / row.speedup - 1  # type: ignore[attr-defined]


def test_the_table() -> None:
    assert {row.split for row in ROWS} == {"fit", "check"}
    assert len([row for row in ROWS if row.split == "check"]) > len(ROWS) / 2
    assert len(set(ROWS)) == len(ROWS)
    assert all(row.source and row.predicted > 0 for row in ROWS)


def test_most_rows_are_met_and_a_miss_has_a_cause() -> None:
    missed = [row for row in ROWS if abs(error(row)) > LIMIT]
    assert len(missed) <= 0.2 * len(ROWS)
    assert [row.title for row in missed if not row.missed] == []
    assert [row.title for row in ROWS if row.missed and row not in missed] == [], "a cause of a row that is met"


def test_every_row_is_on_the_right_side_of_1() -> None:
    assert [row.title for row in ROWS if (row.predicted > 1) != (row.speedup > 1)] == []


@pytest.mark.parametrize("row", QUICK, ids=lambda row: f"{row.title} on {row.device}, {row.policy}")
def test_what_is_predicted_is_what_the_table_says(row: object) -> None:
    """Change it on purpose: `python benchmarks/predict.py --subjects --write`."""
    found = predict.predict_row(row)
    assert found.speedup == pytest.approx(row.predicted, rel=0.01)  # type: ignore[attr-defined]
    assert found.band[0] < found.speedup < found.band[1]


@pytest.mark.zoo
@pytest.mark.parametrize("row", [row for row in ROWS if row not in QUICK], ids=lambda row: f"{row.title}, {row.device}")
def test_the_rest_of_the_table(row: object) -> None:
    test_what_is_predicted_is_what_the_table_says(row)


def test_a_subject_on_this_cpu() -> None:
    """In a size for tests: every variant has a prediction."""
    device = predict.find("t4")  # any will do: nothing is compared
    found = predict.predict_subject(predict.SUBJECTS["bert"].tiny, predict.DTYPES["bfloat16"], device, device)
    assert set(found) == set(predict.VARIANTS)
    assert all(seconds > 0 for seconds in found.values())
