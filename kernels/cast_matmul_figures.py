"""Figures of the compiled matrix product, read from its machine code: what an estimate of its time is made of.

A row is a configuration of a target with one fp32 operand. ``python -m amp_compiler.kernels.check_figures`` writes the
rows, and a test compiles configurations again and compares.
"""

from __future__ import annotations

from typing import NamedTuple


class Figures(NamedTuple):
    """What one program does in one step of its loop, one BLOCK_K."""

    programs: int  # that a processor runs at once, by registers, shared memory and warps
    instructions: int  # of one warp (AMD: of the vector unit, tensor-core instructions not)
    converts: int  # of these, conversions to low precision
    shared: int  # bytes of all warps that pass through shared memory
    loaded: int  # bytes of all warps that are loaded from memory


# written by check_figures.py
TRITON = "3.7.1"
FIGURES: dict[tuple[str, str, str], Figures] = {
    ("sm_80", "128x128x32 w8 s4", "right fp16"): Figures(2, 133, 16, 93184, 24576),
    ("sm_80", "128x128x32 w8 s4", "left fp16"): Figures(2, 164, 32, 109568, 24576),
    ("sm_80", "128x64x32 w4 s3", "right fp16"): Figures(2, 145, 16, 50688, 16384),
    ("sm_80", "128x64x32 w4 s3", "left fp16"): Figures(2, 186, 32, 62976, 20480),
    ("sm_80", "64x128x32 w4 s3", "right fp16"): Figures(4, 162, 16, 54784, 20480),
    ("sm_80", "64x128x32 w4 s3", "left fp16"): Figures(4, 180, 32, 58880, 16384),
    ("sm_80", "64x64x64 w4 s3", "right fp16"): Figures(3, 192, 32, 75264, 24576),
    ("sm_80", "64x64x64 w4 s3", "left fp16"): Figures(3, 189, 32, 75264, 24576),
    ("sm_80", "32x64x64 w4 s4", "right fp16"): Figures(2, 134, 16, 54784, 20480),
    ("sm_80", "32x64x64 w4 s4", "left fp16"): Figures(3, 151, 32, 58880, 16384),
    ("sm_80", "16x64x128 w4 s3", "right fp16"): Figures(2, 190, 32, 87552, 36864),
    ("sm_80", "16x64x128 w4 s3", "left fp16"): Figures(3, 164, 32, 75264, 24576),
    ("sm_80", "64x16x128 w4 s3", "right fp16"): Figures(3, 170, 32, 75264, 24576),
    ("sm_80", "64x16x128 w4 s3", "left fp16"): Figures(2, 189, 32, 87552, 36864),
    ("sm_80", "32x32x64 w2 s4", "right fp16"): Figures(4, 132, 16, 29440, 12288),
    ("sm_80", "32x32x64 w2 s4", "left fp16"): Figures(4, 157, 32, 33536, 12288),
    ("sm_86", "128x64x32 w4 s3", "right fp16"): Figures(2, 145, 16, 50688, 16384),
    ("sm_86", "128x64x32 w4 s3", "left fp16"): Figures(2, 186, 32, 62976, 20480),
    ("sm_86", "64x64x32 w4 s3", "right fp16"): Figures(4, 108, 16, 38400, 12288),
    ("sm_86", "64x64x32 w4 s3", "left fp16"): Figures(4, 116, 16, 38400, 12288),
    ("sm_86", "16x64x128 w4 s2", "right fp16"): Figures(2, 171, 32, 87552, 36864),
    ("sm_86", "16x64x128 w4 s2", "left fp16"): Figures(4, 151, 32, 75264, 24576),
    ("sm_86", "32x32x64 w2 s3", "right fp16"): Figures(4, 132, 16, 29440, 12288),
    ("sm_86", "32x32x64 w2 s3", "left fp16"): Figures(4, 157, 32, 33536, 12288),
    ("sm_90", "128x256x32 w8 s4", "right fp16"): Figures(1, 146, 16, 97280, 40960),
    ("sm_90", "128x256x32 w8 s4", "left fp16"): Figures(1, 112, 8, 56320, 32768),
    ("sm_90", "128x128x64 w8 s3", "right fp16"): Figures(1, 157, 16, 105472, 49152),
    ("sm_90", "128x128x64 w8 s3", "left fp16"): Figures(1, 164, 16, 89088, 49152),
    ("sm_90", "128x64x64 w4 s3", "right fp16"): Figures(2, 178, 16, 60928, 32768),
    ("sm_90", "128x64x64 w4 s3", "left fp16"): Figures(2, 223, 32, 77312, 40960),
    ("sm_90", "64x128x64 w4 s3", "right fp16"): Figures(2, 211, 32, 93696, 40960),
    ("sm_90", "64x128x64 w4 s3", "left fp16"): Figures(2, 172, 16, 52736, 32768),
    ("sm_90", "64x64x64 w4 s4", "right fp16"): Figures(2, 143, 16, 52736, 24576),
    ("sm_90", "64x64x64 w4 s4", "left fp16"): Figures(2, 152, 16, 44544, 24576),
    ("sm_90", "64x32x128 w4 s3", "right fp16"): Figures(2, 159, 16, 60928, 32768),
    ("sm_90", "64x32x128 w4 s3", "left fp16"): Figures(2, 220, 32, 77312, 40960),
    ("sm_90", "16x64x128 w4 s3", "right fp16"): Figures(3, 177, 32, 87552, 36864),
    ("sm_90", "16x64x128 w4 s3", "left fp16"): Figures(4, 162, 32, 75264, 24576),
    ("sm_90", "32x32x64 w2 s4", "right fp16"): Figures(6, 131, 16, 29440, 12288),
    ("sm_90", "32x32x64 w2 s4", "left fp16"): Figures(6, 157, 32, 33536, 12288),
    ("sm_100", "128x256x64 w8 s3", "right fp16"): Figures(1, 248, 32, 187392, 81920),
    ("sm_100", "128x256x64 w8 s3", "left fp16"): Figures(1, 189, 16, 105472, 65536),
    ("sm_100", "128x128x64 w8 s3", "right fp16"): Figures(1, 168, 16, 105472, 49152),
    ("sm_100", "128x128x64 w8 s3", "left fp16"): Figures(2, 165, 16, 89088, 49152),
    ("sm_100", "128x64x64 w4 s3", "right fp16"): Figures(2, 179, 16, 60928, 32768),
    ("sm_100", "128x64x64 w4 s3", "left fp16"): Figures(2, 212, 32, 77312, 40960),
    ("sm_100", "64x128x64 w4 s3", "right fp16"): Figures(2, 225, 32, 93696, 40960),
    ("sm_100", "64x128x64 w4 s3", "left fp16"): Figures(2, 179, 16, 52736, 32768),
    ("sm_100", "64x64x64 w4 s4", "right fp16"): Figures(2, 156, 16, 52736, 24576),
    ("sm_100", "64x64x64 w4 s4", "left fp16"): Figures(2, 153, 16, 44544, 24576),
    ("sm_100", "128x32x128 w4 s2", "right fp16"): Figures(2, 202, 16, 77312, 49152),
    ("sm_100", "128x32x128 w4 s2", "left fp16"): Figures(2, 311, 64, 142848, 73728),
    ("sm_100", "16x64x128 w4 s3", "right fp16"): Figures(3, 180, 32, 87552, 36864),
    ("sm_100", "16x64x128 w4 s3", "left fp16"): Figures(4, 162, 32, 75264, 24576),
    ("sm_100", "32x32x64 w2 s4", "right fp16"): Figures(6, 129, 16, 29440, 12288),
    ("sm_100", "32x32x64 w2 s4", "left fp16"): Figures(6, 158, 32, 33536, 12288),
    ("gfx942", "128x128x32 w8 s2", "right fp16"): Figures(2, 30, 24, 90112, 24576),
    ("gfx942", "128x128x32 w8 s2", "left fp16"): Figures(2, 54, 48, 106496, 24576),
    ("gfx942", "128x128x32 w8 s2", "right bf16"): Figures(2, 94, 0, 90112, 24576),
    ("gfx942", "128x128x32 w8 s2", "left bf16"): Figures(2, 182, 0, 106496, 24576),
    ("gfx942", "128x64x32 w4 s2", "right fp16"): Figures(4, 34, 24, 49152, 16384),
    ("gfx942", "128x64x32 w4 s2", "left fp16"): Figures(3, 62, 48, 61440, 20480),
    ("gfx942", "128x64x32 w4 s2", "right bf16"): Figures(4, 98, 0, 49152, 16384),
    ("gfx942", "128x64x32 w4 s2", "left bf16"): Figures(3, 190, 0, 61440, 20480),
    ("gfx942", "64x128x32 w4 s2", "right fp16"): Figures(3, 38, 24, 53248, 20480),
    ("gfx942", "64x128x32 w4 s2", "left fp16"): Figures(4, 58, 48, 57344, 16384),
    ("gfx942", "64x128x32 w4 s2", "right bf16"): Figures(3, 102, 0, 53248, 20480),
    ("gfx942", "64x128x32 w4 s2", "left bf16"): Figures(4, 186, 0, 57344, 16384),
    ("gfx942", "64x64x64 w4 s2", "right fp16"): Figures(2, 64, 48, 73728, 24576),
    ("gfx942", "64x64x64 w4 s2", "left fp16"): Figures(2, 63, 48, 73728, 24576),
    ("gfx942", "64x64x64 w4 s2", "right bf16"): Figures(2, 192, 0, 73728, 24576),
    ("gfx942", "64x64x64 w4 s2", "left bf16"): Figures(2, 191, 0, 73728, 24576),
    ("gfx942", "32x64x64 w4 s2", "right fp16"): Figures(2, 110, 96, 102400, 20480),
    ("gfx942", "32x64x64 w4 s2", "left fp16"): Figures(3, 59, 48, 81920, 16384),
    ("gfx942", "32x64x64 w4 s2", "right bf16"): Figures(3, 366, 0, 102400, 20480),
    ("gfx942", "32x64x64 w4 s2", "left bf16"): Figures(3, 187, 0, 81920, 16384),
    ("gfx942", "16x64x128 w4 s2", "right fp16"): Figures(1, 74, 48, 86016, 36864),
    ("gfx942", "16x64x128 w4 s2", "left fp16"): Figures(2, 64, 48, 73728, 24576),
    ("gfx942", "16x64x128 w4 s2", "right bf16"): Figures(1, 202, 0, 86016, 36864),
    ("gfx942", "16x64x128 w4 s2", "left bf16"): Figures(2, 192, 0, 73728, 24576),
    ("gfx942", "64x16x128 w4 s2", "right fp16"): Figures(2, 64, 48, 73728, 24576),
    ("gfx942", "64x16x128 w4 s2", "left fp16"): Figures(1, 74, 48, 86016, 36864),
    ("gfx942", "64x16x128 w4 s2", "right bf16"): Figures(2, 192, 0, 73728, 24576),
    ("gfx942", "64x16x128 w4 s2", "left bf16"): Figures(1, 202, 0, 86016, 36864),
    ("gfx942", "32x32x64 w2 s2", "right fp16"): Figures(5, 64, 48, 36864, 12288),
    ("gfx942", "32x32x64 w2 s2", "left fp16"): Figures(5, 64, 48, 36864, 12288),
    ("gfx942", "32x32x64 w2 s2", "right bf16"): Figures(5, 192, 0, 36864, 12288),
    ("gfx942", "32x32x64 w2 s2", "left bf16"): Figures(5, 192, 0, 36864, 12288),
}  # fmt: skip
