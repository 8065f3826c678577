// A batch of products, one by one, each by one thread if there are enough of them.
#pragma once

#include "cast_matmul.h"

namespace amp {

constexpr int64_t LARGE = int64_t(1) << 14;  // values of a matrix for which a few rows are multiplied one by one

// The operands of a batch: matrix i begins `i * step` elements after the first.
struct Batch {
  Operand first;
  int64_t step;
  Batch(const Tensor& x, Type low) : first(operand(x, low)), step(x.stride(0)) {}
  Operand item(int64_t i) const {
    return {advanced(first.data, first.type, i * step), first.stride, first.turned, first.type, first.low};
  }
};

inline void multiply_batch(const Tensor& left, const Tensor& right, Type low, const Result& to) {
  const Batch a(left, low), b(right, low);
  const int64_t number = left.size(0), m = left.size(1), k = left.size(2), n = right.size(2);
  const bool few = m <= (b.first.turned ? A_FEW : A_FEW_SUMS) && (m <= 2 || k * n >= LARGE);
  const auto some = [&](int64_t i, int64_t end) {
    for (; i < end; ++i) (few ? multiply : multiply_many)(a.item(i), b.item(i), to.from(i * m), m, k);
    tidy();
  };
  number < at::get_num_threads() ? some(0, number) : at::parallel_for(0, number, std::max<int64_t>(ALONE / (m * n * k), 1), some);
}

// x in `low` or fp32, with contiguous elements in one of the last two dimensions.
inline Tensor in_lines(const Tensor& x, Type low) {
  const Tensor known = x.scalar_type() == at::kFloat ? x : x.to(low);
  return known.stride(-1) == 1 || known.stride(-2) == 1 ? known : known.contiguous();
}

// The values of a bias, rounded, in fp32.
inline const float* rounded_bias(const Tensor& bias, Type low) {
  const Tensor dense = bias.scalar_type() == at::kFloat ? bias.contiguous() : bias.contiguous().to(low);
  const int64_t n = dense.numel();
  float* to = scratch(BIAS).take(n);
  conversions().add(n * static_cast<int64_t>(sizeof(float)));
  pack(Operand{dense.const_data_ptr(), 0, false, dense.scalar_type(), low}, 0, 0, 1, n, to, 0);
  return to;
}

inline Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Type low, Type out,
                      const Afterwards& then = {}) {
  if (a.dim() == 3 && b.stride(0) == 0) {  // one matrix for the whole batch: torch's `linear` of turned inputs
    const Tensor rows = a.reshape({a.size(0) * a.size(1), a.size(2)});
    return product(rows, b.select(0, 0), bias, low, out, then).view({a.size(0), a.size(1), b.size(2)});
  }
  const float* plus = bias.has_value() ? rounded_bias(*bias, low) : nullptr;
  const int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  const bool batched = a.dim() == 3;
  Tensor result = batched ? at::empty({a.size(0), m, n}, out) : at::empty({m, n}, out);
  const Result to{result.mutable_data_ptr<void>(), out, n, plus, 0, 0, nullptr, then};
  const int64_t count = result.numel();
  if (count > 0 && k == 0) {
    float* zeros = scratch(SUMS).take(n);
    std::fill_n(zeros, n, 0.0f);
    to.write(zeros, 0, 0, 0, count / n, n);
  } else if (count > 0) {
    const Tensor left = in_lines(a, low), right = in_lines(b, low);
    batched ? multiply_batch(left, right, low, to) : multiply(operand(left, low), operand(right, low), to, m, k);
  }
  tidy();
  return result;
}

inline Tensor cast_matmul_cpu(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Type dtype, Type out,
                              const std::optional<Tensor>& plus, const std::optional<Tensor>& times, bool relu) {
  TORCH_CHECK(a.dim() == b.dim() && (a.dim() == 2 || a.dim() == 3) && a.size(-1) == b.size(-2) &&
                  (a.dim() == 2 || a.size(0) == b.size(0)),
              "cast_matmul: ", a.sizes(), " times ", b.sizes());
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "cast_matmul rounds to float16 or bfloat16, not ", dtype);
  TORCH_CHECK(out == dtype || out == at::kFloat, "cast_matmul gives ", dtype, " or float32, not ", out);
  TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == b.size(-1)), "cast_matmul: the bias is ",
              bias.has_value() ? bias->sizes() : a.sizes(), " for ", b.size(-1), " columns");
  if (!plus && !times && !relu) return product(a, b, bias, dtype, out);
  const int64_t values = (a.dim() == 3 ? a.size(0) : 1) * a.size(-2) * b.size(-1);
  std::vector<Tensor> held;
  const auto matrix = [&](const std::optional<Tensor>& x) -> const void* {
    if (!x) return nullptr;
    TORCH_CHECK(x->scalar_type() == dtype && x->numel() == values,
                "cast_matmul adds or multiplies with as many values as the result has, in ", dtype);
    held.push_back(x->contiguous());
    return held.back().const_data_ptr();
  };
  TORCH_CHECK(out == dtype, "cast_matmul changes results in ", dtype, " only");
  const Afterwards then{matrix(plus), matrix(times), relu};
  return product(a, b, bias, dtype, out, then);
}

}  // namespace amp
