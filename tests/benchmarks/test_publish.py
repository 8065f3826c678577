"""Results become tables; nothing but the marked blocks of a page changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_helpers import load

publish = load("publish")
tables = load("tables")
Row, Result = publish.Result.__init__.__globals__["Row"], publish.Result

MACHINE = {"cpu": "A CPU", "cores": "2", "threads": "2", "features": "avx2", "torch": "2.13.0", "commit": "abc123"}
README = "# Title\n\n<!-- bench: {name} -->\nold\n<!-- end bench --> <!-- claim: x -->\n\nrest\n"


def result(script: str, rows: list[object]) -> object:
    return Result(script, "2026-11-16T12:00:00+00:00", MACHINE, {"rounds": 6}, rows)


def steps(subject: str, dtype: str, times: dict[str, list[float]], **more: object) -> list[object]:
    counts = {"ops": 10, "casts": 4, "cast_bytes": 2_000_000, "peak_bytes": 3000, "saved_bytes": 100}
    key = {"subject": subject, "kind": "training", "dtype": dtype, **more}
    return [Row({**key, "variant": name}, counts, {"seconds": taken}) for name, taken in times.items()]


def folder_of(path: Path, **results: object) -> Path:
    path.mkdir(exist_ok=True)
    for name, one in results.items():
        one.write(path / f"{name}.json")
        (path / f"{name}.svg").write_text("<svg/>")
    return path


def root_of(path: Path, name: str) -> Path:
    (path / "docs").mkdir(parents=True)
    (path / "README.md").write_text(README.format(name=name))
    (path / "docs" / "benchmarks.md").write_text("nothing\n")
    return path


FAST = {"fp32": [1.0] * 6, "autocast": [4.0] * 6, "O2": [2.0] * 6}


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = folder_of(tmp_path / "results", training=result("steps", steps("bert", "bfloat16", FAST)))
    (results / "run_diagonal.json").write_text(json.dumps({"plan": "diagonal", "jobs": [{"name": "training"}]}))
    root = root_of(tmp_path / "root", "steps_training")
    assert publish.main([str(results), "--root", str(root)]) == 0
    text = (root / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- bench: steps_training -->\n| | bf16: O2 / fp32 | bf16: autocast / O2 |\n")
    assert "| 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) |" in text
    assert "`make bench`, 2026-11-16: A CPU, 2 cores, 2 threads, avx2; torch 2.13.0, commit abc123." in text
    assert text.endswith("<!-- end bench --> <!-- claim: x -->\n\nrest\n")
    assert (root / "docs/bench/training.svg").exists()
    again = publish.Published.load(root / "benchmarks/published")
    assert again.results["training"].rows[0].samples == {"seconds": [1.0] * 6}
    assert publish.main([str(results), "--root", str(root)]) == 0
    assert (root / "README.md").read_text() == text  # a second time changes nothing
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("change", "said"), [
    (lambda r: setattr(r.rows[0], "failed", True), "failed"),
    (lambda r: r.arguments.update(tiny=True), "tiny form"),
])  # fmt: skip
def test_what_must_not_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, said: str
) -> None:
    made = result("steps", steps("bert", "bfloat16", FAST))
    change(made)
    results, root = folder_of(tmp_path / "results", training=made), root_of(tmp_path / "root", "steps_training")
    before = (root / "README.md").read_text()
    assert publish.main([str(results), "--root", str(root)]) == 2
    assert said in capsys.readouterr().err
    assert (root / "README.md").read_text() == before


def test_no_difference_stays_no_difference(tmp_path: Path) -> None:
    times = {**FAST, "O2": [0.9, 1.1, 0.95, 1.05, 0.97, 1.02]}
    published = publish.Published({"a": result("steps", steps("bert", "float16", times))})
    assert "no difference (0.99: 0.90 to 1.10)" in tables.RENDERERS["steps_training"](published)


def test_two_dtypes_beside_each_other() -> None:
    rows = steps("bert", "bfloat16", FAST) + steps("bert", "float16", FAST) + steps("gpt", "float16", FAST)
    lines = tables.RENDERERS["steps_training"](publish.Published({"a": result("steps", rows)})).splitlines()
    assert lines[0].count("|") == 6
    assert "| – | – | 2.00" in lines[-1]


def test_other_optimizers_stay_out() -> None:
    rows = steps("bert", "bfloat16", FAST, optimizer="adamw") + steps("gpt", "bfloat16", FAST, accumulate=4)
    assert tables.RENDERERS["steps_training"](publish.Published({"a": result("steps", rows)})) == ""


def test_ratios_are_of_one_run() -> None:
    """Two files with the same subject: the samples of one are never divided by those of the other."""
    slow = {name: [10 * value for value in times] for name, times in FAST.items()}
    both = {name: result("steps", steps("bert", "bfloat16", times)) for name, times in (("a", slow), ("b", FAST))}
    text = tables.RENDERERS["steps_training"](publish.Published(both))
    assert "| 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) |" in text


def test_what_cannot_run_says_why() -> None:
    rows = steps("lstm", "float16", {**FAST, "autocast": []})
    rows[1].note, rows[1].samples = "oneDNN has no LSTM of this dtype here", {}
    assert "oneDNN has no LSTM" in tables.RENDERERS["steps_training"](publish.Published({"a": result("steps", rows)}))


def test_counts() -> None:
    published = publish.Published({"a": result("steps", steps("bert", "float16", FAST))})
    text = tables.RENDERERS["memory_and_casts"](published)
    assert "| 1.00 (10 / 10) | 1.00 (4 / 4) | 1.00 (2.0 MB / 2.0 MB) |" in text


def test_growth() -> None:
    def row(what: str, variant: str, layers: int, seconds: float) -> object:
        key = {"model": "bert", "layers": layers, "what": what, "variant": variant}
        return Row(key, samples={"seconds": [seconds]})

    both = ("amp_compile", "torch.compile aot_eager")
    rows = [row("compile", name, size, size / 2) for size in (0, 2, 8) for name in both]
    figures = {"exponent": 1.0, "exponent_low": 0.9, "exponent_high": 1.05, "whole_exponent": 0.8}
    rows.append(Row({"model": "bert", "what": "exponent", "variant": "compile time"}, figures=figures, note="yes"))
    text = tables.RENDERERS["growth"](publish.Published({"growth": result("growth", rows)}))
    assert "| bert, 8 layers | 4.0 s | 1.00 (one round) |" in text
    assert "| compile time | 1.00 (0.90 to 1.05) | 0.80 | yes |" in text
    assert "Inductor" not in text  # was not measured
    assert "0 layers" not in text


def test_a_block_without_results_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = folder_of(tmp_path / "results", training=result("steps", steps("bert", "bfloat16", FAST)))
    root = root_of(tmp_path / "root", "growth")
    before = (root / "README.md").read_text()
    assert publish.main([str(results), "--root", str(root)]) == 0
    assert (root / "README.md").read_text() == before
    assert "blocks as they were: growth" in capsys.readouterr().out


def test_results_of_an_earlier_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_of(tmp_path / "root", "steps_training")
    for name in ("old", "new"):
        results = folder_of(tmp_path / name, **{name: result("steps", steps("bert", "bfloat16", FAST))})
        assert publish.main([str(results), "--root", str(root)]) == 0
    assert "results of an earlier run: old.json" in capsys.readouterr().out


def test_a_picture() -> None:
    published = publish.Published({"training": result("steps", [])})
    text = publish.rewrite(README.format(name="plot training"), published, "docs/bench", [])
    assert "![training: steps.py](docs/bench/training.svg)\n<!-- end bench -->" in text


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("no_such_block", {"a.json": None}, "the block 'no_such_block' is none of: steps_training"),
        ("growth", {}, "holds no result of a benchmark"),
        ("growth", {"a.json": "{"}, "a.json is no result of a benchmark"),
        ("growth", {"a.json": '{"rows": []}'}, "a.json is no result of a benchmark"),
    ],
)
def test_one_line_says_what_is_wrong(
    name: str, files: dict[str, str | None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, results = root_of(tmp_path / "root", name), tmp_path / "results"
    results.mkdir()
    for file, text in files.items():
        if text is None:
            result("steps", []).write(results / file)
        else:
            (results / file).write_text(text)
    before = (root / "README.md").read_text()
    assert publish.main([str(results), "--root", str(root)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert (root / "README.md").read_text() == before
    assert not (root / "docs" / "bench").exists()


@given(text=st.text(alphabet="ab |\n<>!-"), inside=st.text(alphabet="xy |\n"))
def test_only_blocks_change(text: str, inside: str) -> None:
    published = publish.Published({"a": result("steps", steps("bert", "bfloat16", FAST))})
    block = f"<!-- bench: steps_training -->\n{inside}\n<!-- end bench -->"
    before, after = f"{text}\n", f"\n{text}"
    written = publish.rewrite(before + block + after, published, "docs", [])
    assert written.startswith(before + "<!-- bench: steps_training -->\n|")
    assert written.endswith("<!-- end bench -->" + after)
    assert publish.rewrite(written, published, "docs", []) == written


@given(st.lists(st.floats(min_value=1e-9, max_value=1e3), min_size=1))
def test_rounding_keeps_six_figures(seconds: list[float]) -> None:
    small = publish.smaller(result("steps", [Row({"variant": "a"}, {"ops": 12345678}, {"seconds": seconds})])).rows[0]
    assert small.counts == {"ops": 12345678}
    assert small.samples["seconds"] == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(("page", "folder"), publish.PAGES.items())
def test_what_is_shown_is_what_was_published(page: str, folder: str) -> None:
    """No figure in a block was written by hand, or is left from another run."""
    kept: list[str] = []
    text = (publish.ROOT / page).read_text()
    published = publish.Published.load(publish.ROOT / "benchmarks" / "published")
    assert publish.BLOCK.search(text)
    assert publish.rewrite(text, published, folder, kept) == text
    assert kept == []


def test_every_result_and_every_plot_is_on_the_page() -> None:
    """docs/benchmarks.md leaves nothing out that is in the repository."""
    text = (publish.ROOT / "docs/benchmarks.md").read_text()
    shown = {match["name"].strip() for match in publish.BLOCK.finditer(text)}
    assert set(tables.RENDERERS) - {"results"} <= shown
    plots = {f"plot {file.stem}" for file in (publish.ROOT / "docs/bench").glob("*.svg")}
    assert plots == {name for name in shown if name.startswith("plot ")}


def test_the_readme_has_one_table() -> None:
    text = (publish.ROOT / "README.md").read_text()
    assert [match["name"] for match in publish.BLOCK.finditer(text)] == ["results"]


def test_results_for_the_readme() -> None:
    infer = [Row({**row.key, "kind": "inference"}, row.counts, row.samples) for row in steps("bert", "float16", FAST)]
    rows = steps("bert", "bfloat16", FAST) + steps("nine_512", "bfloat16", FAST) + infer
    lines = tables.RENDERERS["results"](publish.Published({"a": result("steps", rows)})).splitlines()[2:]
    assert lines == [
        "| training, BERT-like, bf16 | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) | 4 → 4 | 3.0 KB → 3.0 KB |",
        "| inference, BERT-like, fp16 | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) | – | – |",
    ]
