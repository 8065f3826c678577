"""Figures of the compiled matrix product: how machine code is read, and that the table is what compiling gives."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

import triton

from amp_compiler.kernels.cast_matmul_configs import TARGETS
from amp_compiler.kernels.cast_matmul_figures import FIGURES, TRITON
from amp_compiler.kernels.check_figures import figures, key, variants
from amp_compiler.kernels.check_loop import Loop, read_loop

compiles = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="TRITON_INTERPRET: nothing is compiled")
same_triton = pytest.mark.skipif(triton.__version__ != TRITON, reason=f"the table is of Triton {TRITON}")

SASS = """
.text.matmul_kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
.L_x_0:
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0030*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/                   LDS.64 R8, [R3] ;
        /*0050*/                   F2FP.PACK_AB R8, R9, R8 ;
        /*0060*/                   LDSM.16.M88.4 R12, [R3] ;
        /*0070*/               @P1 LDGSTS.E.BYPASS.128 [R5], [R6.64] ;
        /*0080*/                   LDGDEPBAR ;
        /*0090*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*00a0*/              @!P0 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""
AMD = """
.LBB0_3:                                ; =>This Inner Loop Header: Depth=1
\t.loc\t1 100 27                        ; cast_matmul_triton.py:100:27
\tbuffer_load_dwordx4 v[72:75], v54, s[24:27], 0 offen
\ts_waitcnt lgkmcnt(0)
\tds_read2st64_b64 v[54:57], v44
\tv_cvt_f16_f32_e32 v1, v2
\tv_mfma_f32_32x32x8_f16 v[0:15], v[1:2], v[3:4], v[0:15]
\ts_cbranch_scc1 .LBB0_3
; %bb.4:
"""


def test_the_loop_that_multiplies_is_read() -> None:
    """Seven instructions; 8 and 16 bytes of each lane are read from shared memory, and 16 written there."""
    assert read_loop(SASS, 4, 32, 16 * 128) == Loop(7, 1, 1, (8 + 16 + 16) * 128, 16 * 128)


def test_amds_vector_instructions_are_those_that_wait_for_each_other() -> None:
    assert read_loop(AMD, 1, 64, 16 * 64) == Loop(1, 1, 1, 16 * 64, 16 * 64)


def test_a_turn_of_two_steps_is_halved() -> None:
    assert read_loop(SASS, 4, 32, 8 * 128) == Loop(4, 1, 1, 20 * 128, 8 * 128)


@pytest.mark.parametrize(("text", "step", "words"), [("EXIT ;", 16, "no loop"), (SASS, 1000, "not a multiple")])
def test_what_cannot_be_read_is_told(text: str, step: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        read_loop(text, 4, 32, step)


def test_every_configuration_has_its_rows() -> None:
    wanted = {key(target, config, product) for target, kind in TARGETS.items() for config in kind.configs
              for product in variants(target)}  # fmt: skip
    assert FIGURES.keys() == wanted


def test_a_program_loads_its_tile_once() -> None:
    """The bytes that the machine code loads in a step are those of the tile: nothing is read twice."""
    for (target, name, side), row in FIGURES.items():
        config = next(config for config in TARGETS[target].configs if config.name == name)
        left, right = (4, 2) if side.startswith("left") else (2, 4)
        assert row.loaded == config.block_k * (config.block_m * left + config.block_n * right)


@compiles
@same_triton
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_the_table_is_what_compiling_gives(target: str) -> None:
    _same(target, TARGETS[target].configs[-1:])


@compiles
@same_triton
@pytest.mark.zoo
@pytest.mark.parametrize("target", TARGETS)
def test_the_whole_table_is_what_compiling_gives(target: str) -> None:
    _same(target, TARGETS[target].configs)


def _same(target: str, configs: tuple[object, ...]) -> None:
    made = {key(target, config, product): figures(target, config, product)  # type: ignore[arg-type]
            for config in configs for product in variants(target)}  # fmt: skip
    assert made == {row: FIGURES[row] for row in made}
