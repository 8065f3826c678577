"""Device ``cuda`` on a machine without a GPU: everything runs through torch's real dispatcher, on fakes.

``load()``, before torch is imported, builds and loads ``no_device.cpp``, a device guard and hooks that do nothing; the
autograd engine and torch's composite ops need them. ``install()``, afterwards, makes ``device="cuda"`` give fakes
wherever it is written, and Triton's launches note themselves instead of running. So Dynamo, AOTAutograd, all passes and
the compiled code run as they would on an H100, and compute nothing: shapes, dtypes, devices and every op called are
real, values are not. A value that the host reads raises.

In a CUDA build of torch the same is done over its own hooks and guard. With a real GPU none of this is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("no_device.cpp")
LIBRARIES: list[ctypes.CDLL] = []
#: launches of Triton kernels, by name; and why the host would have waited, while ``watch()`` is on
LAUNCHES: list[str] = []
WATCHED: list[bool] = []
#: ops that write to their arguments and that torch 2.13 has no fake of
NO_FAKE = ("aten::_fused_sgd_", "aten::_fused_adagrad_")
H100 = SimpleNamespace(
    name="stand-in for an NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
    warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20, is_integrated=0, is_multi_gpu_board=0, gcnArchName="", clock_rate=1980000,
    memory_clock_rate=2619000, memory_bus_width=5120, uuid="none", pci_bus_id=0,
)  # fmt: skip


class HostWaits(RuntimeError):
    """The host would have waited for the device."""


def cause() -> str:
    """Why there can be no stand-in on this machine; empty if there can."""
    return "" if shutil.which("g++") else "no GPU, and no g++ to build a stand-in for one (tests/gpu/no_device.cpp)"


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def build() -> Path:
    """The library, compiled once for each torch and source."""
    folder = Path(tempfile.gettempdir()) / f"amp-no-device-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else.")
    root = _torch()
    of = f"{importlib.metadata.version('torch')}\n{root}\n{SOURCE.read_text()}"
    path = folder / f"{hashlib.sha256(of.encode()).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            new = path.with_suffix(".new")
            command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root / 'include'}", str(SOURCE), "-o",
                       str(new), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]  # fmt: skip
            subprocess.run(command, check=True)
            new.rename(path)
    return path


def load() -> None:
    """Load the library. torch must not have been imported: it reads the hooks once."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    LIBRARIES.append(ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL))


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """Inside, what would make the host wait for the device raises ``HostWaits``."""
    WATCHED.append(True)
    try:
        yield
    finally:
        WATCHED.pop()


@contextlib.contextmanager
def capability(number: int) -> Iterator[None]:
    """Inside, torch chooses its attention for a GPU of this compute capability: 80 is 8.0, an A100."""
    known = ctypes.c_int.in_dll(LIBRARIES[0], "amp_capability")
    before, known.value = known.value, number
    try:
        yield
    finally:
        known.value = before


def install() -> None:
    """Make device ``cuda`` give fakes, for the rest of the process."""
    import torch
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode

    device = torch.device("cuda", 0)

    class Mode(FakeTensorMode):
        """Fakes whose ``amp::`` ops run their CUDA registration, down to Triton's launch."""

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if WATCHED:
                _look(func, args, kwargs)
            if func.namespace == "amp":
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)
            if func.name().split(".")[0] in NO_FAKE:
                return None
            if func.name().startswith("aten::_thnn_fused_gru_cell"):  # torch has no fake of it either
                return _gru_cell(*args)
            if func is torch.ops.aten.nonzero.default:  # how many there are is a value: as many as there can be
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            return super().dispatch(func, types, args, kwargs)

    def _look(func: Any, args: Any, kwargs: Any) -> None:
        name = func.name().split(".")[0]
        if name in ("aten::_local_scalar_dense", "aten::nonzero"):
            raise HostWaits("the host reads a value")
        if name not in ("aten::copy_", "aten::_to_copy"):
            return
        source = args[1] if name == "aten::copy_" else args[0]
        target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or source.device)
        blocking = not (args[2] if name == "aten::copy_" and len(args) > 2 else kwargs.get("non_blocking"))
        if source.device.type != target.type and (target.type == "cpu" or blocking):
            raise HostWaits(f"a copy from {source.device.type} to {target.type}")

    mode = Mode(allow_non_fake_inputs=True)
    dispatch = FakeTensorMode.dispatch

    def lifting(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A tracer lifts what torch.tensor(…, device="cuda") has made outside of its mode, as it does a real tensor."""
        if func in self.lift_fns and getattr(args[0], "fake_mode", self) is mode is not self:
            return self.from_tensor(args[0])
        return dispatch(self, func, types, args, kwargs)

    FakeTensorMode.dispatch = lifting  # type: ignore[method-assign]
    FakeTensorConverter.invalidate_constant_aliases = _forget_constants  # type: ignore[method-assign]
    library = torch.library.Library("aten", "IMPL")

    def made(meta: Tensor) -> Tensor:
        return FakeTensor(mode, meta, device)

    def empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
              memory_format: Any = None) -> Tensor:  # fmt: skip
        given = {"dtype": dtype, "layout": layout, "pin_memory": False, "memory_format": memory_format}
        return made(torch.ops.aten.empty.memory_format(size, device="meta", **given))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                      pin_memory: Any = None) -> Tensor:  # fmt: skip
        given = {"dtype": dtype, "layout": layout, "pin_memory": False}
        return made(torch.ops.aten.empty_strided.default(size, stride, device="meta", **given))

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if WATCHED and not non_blocking:
            raise HostWaits(f"a copy from {source.device.type} to cuda")
        return self

    for name, kernel in (("empty.memory_format", empty), ("empty_strided", empty_strided), ("copy_", copy_)):
        library.impl(name, kernel, "CUDA", allow_override=True)
    LIBRARIES[0].amp_no_device()
    if torch.version.cuda is None:
        LIBRARIES[0].amp_choose_attention()
    torch._amp_no_device = library  # type: ignore[attr-defined]  # it must live as long as torch
    FakeTensor.data_ptr = lambda self: id(self) << 8  # type: ignore[method-assign]
    Tensor.is_pinned = lambda self, device=None: False  # type: ignore[method-assign]
    cuda: Any = torch.cuda
    names: Any = torch._C
    names._cuda_getDevice, names._cuda_getCurrentRawStream = lambda: 0, lambda of: 0
    names._cuda_setDevice = lambda of: None
    names._dynamo.guards._reinterpret_tensor = lambda t, size, stride, by=0: t.as_strided(
        size, stride, t.storage_offset() + by
    )
    names._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )
    cuda._lazy_init, cuda._initialized = lambda: None, True
    cuda._get_device_properties = lambda of: H100
    cuda._exchange_device, cuda._maybe_exchange_device = lambda of: 0, lambda of: 0
    cuda.default_generators = (torch.Generator(),)
    cuda.is_available, cuda.device_count = lambda: True, lambda: 1
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.synchronize, cuda.is_current_stream_capturing = lambda of=None: None, lambda: False
    _note_launches()


def _gru_cell(first: Any, workspace: Any, third: Any, *biases: Any) -> tuple[Any, ...]:
    """The results of ``_thnn_fused_gru_cell``, or of its backward: a new state and a workspace of five times its width;
    gradients of both gates, of the state and of both biases."""
    if not isinstance(third, bool):
        rows, width = third.shape
        return third.new_empty(third.shape), third.new_empty((rows, 5 * width))
    rows, width = first.shape
    gates, bias = (rows, 3 * width), (3 * width,) if third else ()
    sizes = (gates, gates, (rows, width), bias, bias)
    return tuple(first.new_empty(size) if size else None for size in sizes)


def _forget_constants(self: Any, tensor: Any) -> None:
    """As torch's, which refuses the constants on the device, because they are fakes here."""
    from torch.multiprocessing.reductions import StorageWeakRef

    for known in self.constant_storage_mapping.pop(StorageWeakRef(tensor._typed_storage()), ()):
        if (value := known()) is not None:
            value._fix_weakref()
            value.constant = None


class _Driver:
    """Triton's driver of a GPU that isn't there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _note_launches() -> None:
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        bound = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        blocks = grid(bound) if callable(grid) else grid
        assert all(isinstance(n, int) and n > 0 for n in blocks), blocks
        LAUNCHES.append(self.fn.__name__)

    driver.set_active(_Driver())
    JITFunction.run = run
    Autotuner.run = lambda self, *args, **kwargs: self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())
