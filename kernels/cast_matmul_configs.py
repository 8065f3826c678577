"""The tuning of ``cast_matmul_triton.py``: the configurations for each kind of GPU.

``cast_matmul_estimate.py`` chooses one for a product. Nothing here needs Triton or a GPU.
``python -m amp_compiler.kernels.check`` compiles every configuration.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

STEP = 128  # every BLOCK_K divides it; the pieces of a split K are multiples of it
SHORTEST = 512  # for a piece of K shorter than this, the workspace costs more than an idle GPU
MOST_PIECES = 16  # the second kernel reads this many fp32 values per output


@dataclass(frozen=True)
class Config:
    """One tuning configuration, and what it is for."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    reason: str
    unit: str = ""  # the tensor-core instruction, if the tile is too small for the target's best
    registers: int | None = None  # the most per thread, if the compiler has to be told
    group_m: int = 8

    @property
    def name(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps} s{self.stages}"

    def meta(self) -> dict[str, int]:
        """Return the compile-time arguments of the kernel."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m}

    def compiler(self) -> dict[str, int]:
        """Return the options for Triton's compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}

    @property
    def takes_unaligned(self) -> bool:
        """True if there are registers for unaligned operands: loading element by element needs one per address."""
        threads = 32 * self.warps
        loads, sums = (self.block_m + self.block_n) * self.block_k // threads, self.block_m * self.block_n // threads
        return loads <= 64 and loads + sums <= 128


@dataclass(frozen=True)
class Target:
    """A kind of GPU: what the choice of a configuration and the offline check need to know about it."""

    name: str
    processors: int  # streaming multiprocessors or compute units, of the GPU whose data sheet the estimate uses
    unit: str  # its best tensor-core instruction
    configs: tuple[Config, ...]


# Left alone, NVIDIA's assembler spills a few values of some of these tiles to make room for one more program.
ALL_REGISTERS = 255

# Shared memory holds `stages` copies of both operand tiles as they are in memory, fp32 at worst, and one rounded copy:
# the fp32 case sets the limit of every row here, and the check compiles it.
CONFIGS_SM80 = (
    Config(128, 128, 32, 8, 4, "large square products: most reuse that fits 163 KB with fp32 operands"),
    Config(128, 64, 32, 4, 3, "tall outputs: programs hide each other's loads", registers=ALL_REGISTERS),
    Config(64, 128, 32, 4, 3, "wide outputs, the mirror image"),
    Config(64, 64, 64, 4, 3, "middle sizes: four times the programs of the largest tile"),
    Config(32, 64, 64, 4, 4, "batches of 32 rows or fewer: no half of the tile is padding"),
    Config(16, 64, 128, 4, 3, "a few rows against a large weight: limited by memory, long loads"),
    Config(64, 16, 128, 4, 3, "a few columns, the mirror image"),
    Config(32, 32, 64, 2, 4, "small matrices in large batches"),
)
CONFIGS_SM90 = (
    Config(128, 256, 32, 8, 4, "large products: the widest wgmma, most reuse; a deeper tile of fp32 spills registers"),
    Config(128, 128, 64, 8, 3, "large products of fewer tiles, deeper pipeline"),
    Config(128, 64, 64, 4, 3, "tall outputs: one warp group, two programs per processor"),
    Config(64, 128, 64, 4, 3, "wide outputs, the mirror image"),
    Config(64, 64, 64, 4, 4, "middle sizes: 64 rows are the smallest tile that wgmma takes"),
    Config(64, 32, 128, 4, 3, "narrow outputs and a long K"),
    Config(16, 64, 128, 4, 3, "a few rows against a large weight: limited by memory", "mma.sync"),
    Config(32, 32, 64, 2, 4, "small matrices in large batches", "mma.sync"),
)
CONFIGS_SM100 = (
    Config(128, 256, 64, 8, 3, "large products: the accumulator takes half of the tensor memory"),
    Config(128, 128, 64, 8, 3, "large products of fewer tiles, deeper pipeline", registers=ALL_REGISTERS),
    Config(128, 64, 64, 4, 3, "tall outputs: two programs per processor", registers=ALL_REGISTERS),
    Config(64, 128, 64, 4, 3, "wide outputs: 64 rows are the smallest tile that tcgen05 takes"),
    Config(64, 64, 64, 4, 4, "middle sizes", registers=ALL_REGISTERS),
    Config(128, 32, 128, 4, 2, "narrow outputs and a long K"),
    Config(16, 64, 128, 4, 3, "a few rows against a large weight: limited by memory", "mma.sync"),
    Config(32, 32, 64, 2, 4, "small matrices in large batches", "mma.sync"),
)
CONFIGS_GFX942 = (
    Config(128, 128, 32, 8, 2, "large square products: 64 KB of LDS is the limit"),
    Config(128, 64, 32, 4, 2, "tall outputs"),
    Config(64, 128, 32, 4, 2, "wide outputs, the mirror image"),
    Config(64, 64, 64, 4, 2, "middle sizes: four times the programs"),
    Config(32, 64, 64, 4, 2, "batches of 32 rows or fewer"),
    Config(16, 64, 128, 4, 2, "a few rows against a large weight: limited by memory, long loads"),
    Config(64, 16, 128, 4, 2, "a few columns, the mirror image"),
    Config(32, 32, 64, 2, 2, "small matrices in large batches"),
)
# The other NVIDIA GPUs that support bf16 (sm_86, sm_89, sm_120): 99 KB of shared memory.
CONFIGS_SM86 = (
    Config(128, 64, 32, 4, 3, "large products: 99 KB of shared memory with fp32 operands", registers=ALL_REGISTERS),
    Config(64, 64, 32, 4, 3, "middle sizes", registers=ALL_REGISTERS),
    Config(16, 64, 128, 4, 2, "a few rows against a large weight", registers=ALL_REGISTERS),
    Config(32, 32, 64, 2, 3, "small matrices in large batches"),
)

TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 108, "mma.sync", CONFIGS_SM80),
        Target("sm_86", 82, "mma.sync", CONFIGS_SM86),
        Target("sm_90", 132, "wgmma", CONFIGS_SM90),
        Target("sm_100", 148, "tcgen05", CONFIGS_SM100),
        Target("gfx942", 304, "mfma", CONFIGS_GFX942),
    )
}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def piece_length(k: int, pieces: int) -> int:
    """Return how much of K each piece has, a multiple of ``STEP``; rounding up may leave fewer pieces."""
    return max(1, ceil_div(ceil_div(k, pieces), STEP)) * STEP


@functools.cache
def target_of(device: torch.device) -> str:
    """Return the name of the row of ``TARGETS`` for a device; sm_80 for a CPU, where the interpreter runs."""
    if device.type == "cpu":
        return "sm_80"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return "gfx942"  # all AMD GPUs have at least its 64 KB of LDS
    if properties.major < 8:
        version = f"{properties.major}.{properties.minor}"
        raise ValueError(f"cast_matmul needs compute capability 8.0 or newer, not {version}.")
    if (properties.major, properties.minor) in ((8, 0), (8, 7)):
        return "sm_80"
    return {9: "sm_90", 10: "sm_100"}.get(properties.major, "sm_86")
