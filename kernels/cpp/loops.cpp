// The loops of loops.h, for every dtype, and the kernels for lists of gradients, which are loops too. ops.cpp, which is compiled
// beside this file, has the rest.
#include "loops.h"

#include "dots.h"
#include "multi_tensor.h"
#include "ops.h"
#include "steps.h"

namespace amp {

namespace {

// Calls `run` with a pointer to the values, in their own dtype, and with what they are rounded to. EXACT: values of fp32 may be
// taken as they are.
template <bool EXACT, class F>
inline __attribute__((always_inline)) void in_dtype(const Operand& x, const void* from, const F& run) {
  if (x.type == at::kHalf) return run(static_cast<const c10::Half*>(from), c10::Half());
  if (x.type == at::kBFloat16) return run(static_cast<const c10::BFloat16*>(from), c10::BFloat16());
  const float* values = static_cast<const float*>(from);
  if (x.low == at::kHalf) return run(values, c10::Half());
  if (!EXACT || x.low == at::kBFloat16) return run(values, c10::BFloat16());
  if constexpr (EXACT) run(values, Exact());
}

}  // namespace

void pack(const Operand& x, int64_t row, int64_t column, int64_t rows, int64_t columns, float* to, int64_t step) {
  if (x.turned) {
    return in_dtype<false>(x, x.at(row, column), [&](const auto* from, auto low) {
      pack_turned<decltype(low)>(from, x.stride, rows, columns, to, step);
    });
  }
  in_dtype<true>(x, x.at(row, column), [&](const auto* from, auto low) {
    pack_lines<decltype(low)>(from, x.stride, rows, columns, to, step);
  });
}

void finish(Type type, const float* from, int64_t stride, const float* plus, void* to, int64_t step, int64_t rows, int64_t n) {
  const auto run = [&](auto* out) {
    for (int64_t r = 0; r < rows; ++r) finish(from + r * stride, plus, out + r * step, n);
  };
  if (type == at::kHalf) return run(static_cast<c10::Half*>(to));
  type == at::kBFloat16 ? run(static_cast<c10::BFloat16*>(to)) : run(static_cast<float*>(to));
}

void dot_columns(const float* rows, const Operand& b, int64_t column, float* to, int64_t step, int64_t width, int64_t m,
                 int64_t k) {
  in_dtype<true>(b, b.at(0, column), [&](const auto* from, auto low) {
    dot_columns<decltype(low)>(rows, from, b.stride, to, step, width, m, k);
  });
}

void add_rows(const float* a, const Operand& b, int64_t column, float* sums, int64_t width, int64_t m, int64_t k) {
  in_dtype<false>(b, b.at(0, column), [&](const auto* from, auto low) {
    add_rows<decltype(low)>(a, from, b.stride, sums, width, m, k);
  });
}

void register_lists(Library& library) {
  library.def("unscale_(Tensor[] tensors, Tensor found, Tensor factor) -> Tensor[]", &boxed<&unscale_cpu>);
  library.def("all_finite(Tensor[] tensors) -> (bool, Tensor[])", &boxed<&all_finite_cpu>);
  library.def("norm(Tensor[] tensors) -> (float, Tensor[])", &boxed<&norm_cpu>);
}

}  // namespace amp
