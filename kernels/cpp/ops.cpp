// The CPU's kernels, compiled: see ../build.py for how and when, ../cast_matmul.py and ../unscale.py for what they mean.
#include <torch/library.h>

#include "cast_matmul.h"
#include "multi_tensor.h"

TORCH_LIBRARY(amp_cpu, library) {
  library.def("unscale_(Tensor[] tensors, Tensor found, Tensor factor) -> Tensor[]", &amp::unscale_cpu);
  library.def("all_finite(Tensor[] tensors) -> (bool, Tensor[])", &amp::all_finite_cpu);
  library.def("norm(Tensor[] tensors) -> (float, Tensor[])", &amp::norm_cpu);
}

TORCH_LIBRARY_IMPL(amp, CPU, library) { library.impl("cast_matmul", &amp::cast_matmul_cpu); }
