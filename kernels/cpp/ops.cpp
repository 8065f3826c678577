// The compiled CPU kernels as ops: see ../build.py for how and when they are compiled, and ../cast_matmul.py, ../unscale.py
// and ../lstm.py for their definitions.
#include "ops.h"

#include "cast_matmul.h"
#include "multi_tensor.h"
#include "wide.h"

namespace amp {

extern template Tensor cast_matmul<c10::Half, float>(const Tensor&, const Tensor&, const std::optional<Tensor>&);
extern template Tensor cast_matmul<c10::Half, c10::Half>(const Tensor&, const Tensor&, const std::optional<Tensor>&);
extern template Tensor cast_matmul<c10::BFloat16, float>(const Tensor&, const Tensor&, const std::optional<Tensor>&);
extern template Tensor cast_matmul<c10::BFloat16, c10::BFloat16>(const Tensor&, const Tensor&, const std::optional<Tensor>&);

namespace {

std::tuple<int64_t, int64_t> counted() { return {conversions().number, conversions().bytes}; }
int64_t bytes_held() { return scratch_bytes(); }

void register_all() {
  Library any("amp_cpu", "CompositeImplicitAutograd");  // sees lists as they are: lazy conjugation is not resolved
  any.def("unscale_(Tensor[] tensors, Tensor found, Tensor factor) -> Tensor[]", &boxed<&unscale_cpu>);
  any.def("all_finite(Tensor[] tensors) -> (bool, Tensor[])", &boxed<&all_finite_cpu>);
  any.def("norm(Tensor[] tensors) -> (float, Tensor[])", &boxed<&norm_cpu>);
  any.def("conversions() -> (int, int)", &boxed<&counted>);
  any.def("scratch_bytes() -> int", &boxed<&bytes_held>);
  register_lstm(any);

  Library cpu("amp", "CPU");
  cpu.impl("cast_matmul", &boxed<&cast_matmul_cpu>);
  cpu.impl("wide_convolution", &boxed<&wide_convolution_cpu>);
  cpu.impl("wide_convolution_backward", &boxed<&wide_convolution_backward_cpu>);
  cpu.impl("wide_baddbmm", &boxed<&wide_baddbmm_cpu>);
  register_attention(cpu);
  any.keep();
  cpu.keep();
}

}  // namespace
}  // namespace amp

// Registers the kernels with the torch of this process; returns what went wrong, or null. ../registry.py calls it.
extern "C" __attribute__((visibility("default"))) const char* amp_register() {
  static std::string error;
  try {
    amp::register_all();
    return nullptr;
  } catch (const std::exception& problem) {
    error = problem.what();
    return error.c_str();
  }
}
