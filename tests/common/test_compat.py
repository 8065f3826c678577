"""Which releases of torch are taken, refused and warned about, and what each of them has."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from amp_compiler import amp_compile
from amp_compiler.common import compat
from amp_compiler.policy.ops.table import ALIASES, ALL_ROWS, ROWS
from amp_compiler.policy.ops.torch_lists import LISTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.1", "2.15.0+cu132", "2.15.1a0+git12", "unknown"])
def test_supported_releases_are_taken_in_silence(version: str) -> None:
    with warnings.catch_warnings(action="error"):
        compat.check_release(version)


@pytest.mark.parametrize("version", ["2.12.1+cu130", "2.9.0", "1.13.1"])
def test_an_old_release_is_an_error_that_tells_what_to_install(version: str) -> None:
    with pytest.raises(ImportError, match=r"needs torch 2\.13 to 2\.15.*pip install 'torch>=2\.13") as found:
        compat.check_release(version)
    assert version in str(found.value)
    assert "silently wrong" in str(found.value)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234", "3.0.1"])
def test_a_newer_release_gives_one_warning(version: str) -> None:
    with pytest.warns(UserWarning, match=r"tested with torch 2\.13 to 2\.15") as found:
        compat.check_release(version)
    assert len(found) == 1
    assert version in str(found[0].message)


def test_the_check_is_made_when_the_package_is_imported() -> None:
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = types.SimpleNamespace(__version__='2.12.0')\n"
        "try:\n    import amp_compiler\nexcept ImportError as error:\n    print('refused:', error)\n"
        "for version in ('2.16.0', '2.16.1'):\n"
        "    sys.modules['torch'].__version__ = version\n"
        "    import amp_compiler\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("refused: amp_compiler needs torch 2.13")
    assert ran.stderr.count("tested with torch") == 1


def test_the_project_declares_the_releases_that_are_taken() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest, untested) = (".".join(map(str, release)) for release in (compat.OLDEST, compat.UNTESTED))
    assert f"torch>={oldest},<{untested}" in declared


def test_what_this_torch_does_not_have_is_in_no_row_and_on_no_list() -> None:
    missing = {name for name in compat.OPS_OF_SOME_RELEASES if not hasattr(torch.ops.aten, name)}
    assert missing < set(compat.OPS_OF_SOME_RELEASES)
    assert {row.name for row in ALL_ROWS} - {row.name for row in ROWS} == missing
    listed = {name.partition(".")[0] for lists in LISTS.values() for names in lists.values() for name in names}
    assert not missing & (listed | set(ALIASES))
    assert set(compat.OPS_OF_SOME_RELEASES) - missing <= listed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [4, 16])
def test_grouped_products_run_where_fp32_ones_do(columns: int, dtype: torch.dtype) -> None:
    a, b, offsets = torch.randn(6, 16), torch.randn(2, 16, columns), torch.tensor([2, 6], dtype=torch.int32)
    try:
        with FakeTensorMode() as mode:
            torch._grouped_mm(mode.from_tensor(a), mode.from_tensor(b), offs=mode.from_tensor(offsets))
    except RuntimeError as error:
        pytest.skip(f"Dynamo cannot trace grouped_mm in fp32 with torch {torch.__version__}: {error}")
    fast = amp_compile(lambda a, b: torch.nn.functional.grouped_mm(a, b, offs=offsets), dtype=dtype)
    torch.testing.assert_close(fast(a, b), torch._grouped_mm(a, b, offs=offsets), atol=0.1, rtol=0.02)
    (row,) = (row for row in fast.report().rows if row.op == "_grouped_mm")
    assert row.precision == (str(dtype).removeprefix("torch.") if columns == 16 else "float32")
