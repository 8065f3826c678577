// The compiled CPU kernels as ops: see ../build.py for how and when they are compiled, and ../cast_matmul.py, ../wide.py,
// ../unscale.py and ../lstm.py for their definitions. What takes their time is in loops.cpp, and in torch.
#include "ops.h"

#include "attention.h"
#include "batched.h"
#include "lstm.h"
#include "wide.h"

namespace amp {

namespace {

std::tuple<int64_t, int64_t> counted() { return {conversions().number, conversions().bytes}; }
int64_t bytes_held() { return scratch_bytes(); }

void register_all() {
  Library any("amp_cpu", "CompositeImplicitAutograd");  // sees lists as they are: lazy conjugation is not resolved
  register_lists(any);
  any.def("conversions() -> (int, int)", &boxed<&counted>);
  any.def("scratch_bytes() -> int", &boxed<&bytes_held>);
  any.def(
      "lstm_forward(Tensor x, Tensor h, Tensor c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, bool reverse, bool keeps)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      &boxed<&lstm_layer_cpu>);
  any.def(
      "lstm_backward(Tensor? given, Tensor(a!) state, Tensor(b!) cell, Tensor gates, Tensor cells, Tensor first_cell,"
      " Tensor w_hh, Tensor(c!) sums, bool reverse) -> ()",
      &boxed<&lstm_backward_cpu>);

  Library cpu("amp", "CPU");
  cpu.impl("cast_matmul", &boxed<&cast_matmul_cpu>);
  cpu.impl("wide_convolution", &boxed<&wide_convolution_cpu>);
  cpu.impl("wide_convolution_backward", &boxed<&wide_convolution_backward_cpu>);
  cpu.impl("wide_baddbmm", &boxed<&wide_baddbmm_cpu>);
  cpu.impl("wide_scaled_dot_product_flash_attention_for_cpu", &boxed<&attention_cpu>);
  cpu.impl("wide_scaled_dot_product_flash_attention_for_cpu_backward", &boxed<&attention_backward_cpu>);
  any.keep();
  cpu.keep();
}

}  // namespace
}  // namespace amp

// Registers the kernels with the torch of this process; returns what went wrong, or null. ../registry.py calls it.
extern "C" __attribute__((visibility("default"))) const char* amp_register() {
  static amp::Error error;
  try {
    amp::register_all();
    return nullptr;
  } catch (const std::exception& problem) {
    error.add(problem.what());
    return error.what();
  }
}
