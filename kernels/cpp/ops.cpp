// The compiled CPU kernels: see ../build.py for how and when they are compiled, and ../cast_matmul.py, ../unscale.py
// and ../lstm.py for their definitions.
#include <torch/library.h>

#include "attention.h"
#include "batched.h"
#include "cast_matmul.h"
#include "lstm.h"
#include "multi_tensor.h"
#include "wide.h"

TORCH_LIBRARY(amp_cpu, library) {
  library.def("unscale_(Tensor[] tensors, Tensor found, Tensor factor) -> Tensor[]", &amp::unscale_cpu);
  library.def("all_finite(Tensor[] tensors) -> (bool, Tensor[])", &amp::all_finite_cpu);
  library.def("conversions() -> (int, int)", [] {
    return std::tuple<int64_t, int64_t>(amp::conversions().number, amp::conversions().bytes);
  });
  library.def("scratch_bytes() -> int", [] { return amp::scratch_bytes().load(); });
  library.def(
      "lstm_forward(Tensor(a!) gates, Tensor state, Tensor cell, Tensor right, Tensor(b!) out, Tensor(c!) cells, bool reverse)"
      " -> ()",
      &amp::lstm_forward_cpu);
  library.def(
      "lstm_backward(Tensor? given, Tensor(a!) state, Tensor(b!) cell, Tensor gates, Tensor cells, Tensor first_cell,"
      " Tensor right, Tensor(c!) sums, bool reverse) -> ()",
      &amp::lstm_backward_cpu);
  library.def("norm(Tensor[] tensors) -> (float, Tensor[])", &amp::norm_cpu);
}

TORCH_LIBRARY_IMPL(amp, CPU, library) {
  library.impl("cast_matmul", &amp::cast_matmul_cpu);
  library.impl("wide_scaled_dot_product_flash_attention_for_cpu", &amp::attention_cpu);
  library.impl("wide_scaled_dot_product_flash_attention_for_cpu_backward", &amp::attention_backward_cpu);
  for (const char* name : {"wide_convolution", "wide_convolution_backward", "wide_baddbmm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&amp::wide_cpu>());
  }
}
