// A batch of products. Small ones: by packed blocks, one by one; on a CPU without these, as many at a time as stay in the cache
// are rounded and multiplied by torch's own batched product. Large ones, and those of a few rows with large matrices, as single
// products are (cast_matmul.h).
#pragma once

#include "cast_matmul.h"

namespace amp {

constexpr int64_t BATCH_HELD = int64_t(1) << 17;  // fp32 values of operands and results: half an L2
constexpr int64_t LARGE = int64_t(1) << 14;       // values of a matrix for which a few rows are multiplied one by one

// The operands of a batch: matrix i begins `i * step` elements after the first.
struct Batch {
  Operand first;
  int64_t step;
  Batch(const Tensor& x, Type low) : first(operand(x, low)), step(x.stride(0)) {}
  Operand item(int64_t i) const {
    return {advanced(first.data, first.type, i * step), first.stride, first.turned, first.type, first.low};
  }
};

// Packs matrices as they are in memory: `lines` contiguous lines of `length` elements each.
inline void pack_batch(const Batch& x, int64_t start, int64_t count, int64_t lines, int64_t length, float* to) {
  Operand matrix = x.item(start);
  matrix.turned = false;
  if (x.first.stride == length && x.step == lines * length) return pack(matrix, 0, 0, 1, count * lines * length, to, 0);
  for (int64_t i = 0; i < count; ++i) {
    matrix.data = x.item(start + i).data;
    pack(matrix, 0, 0, lines, length, to + i * lines * length, length);
  }
}

inline Tensor packed_batch(const Batch& x, int64_t start, int64_t count, int64_t rows, int64_t columns, float* to) {
  if (!x.first.turned) {
    pack_batch(x, start, count, rows, columns, to);
    return at::from_blob(to, {count, rows, columns}, at::kFloat);
  }
  pack_batch(x, start, count, columns, rows, to);
  return at::from_blob(to, {count, rows, columns}, {rows * columns, 1, rows}, at::kFloat);
}

inline void multiply_batch(const Tensor& left, const Tensor& right, Type low, const Result& to) {
  const Batch a(left, low), b(right, low);
  const int64_t number = left.size(0), m = left.size(1), k = left.size(2), n = right.size(2);
  const int64_t threads = at::get_num_threads(), values = m * k + k * n + m * n;
  const bool few = m <= (b.first.turned ? A_FEW : A_FEW_SUMS) && (m <= 2 || k * n >= LARGE);
  if (few || values > BATCH_HELD) {
    const auto some = [&](int64_t i, int64_t end) {
      for (; i < end; ++i) multiply(a.item(i), b.item(i), to.from(i * m), m, k);
    };
    number < threads ? some(0, number) : at::parallel_for(0, number, std::max<int64_t>(GRAIN / values, 1), some);
    return;
  }
  if (blocks_work() && k <= LONGEST) {
    return at::parallel_for(0, number, std::max<int64_t>(GRAIN / values, 1), [&](int64_t i, int64_t end) {
      float* packed = scratch(RIGHT).take(blocks(n, COLUMNS) * COLUMNS * k);
      for (; i < end; ++i) {
        pack_columns(b.item(i), packed, k, 0, n);
        multiply_rows(a.item(i), packed, to.from(i * m), 0, m, k, 0, n);
      }
    });
  }
  const int64_t group = std::max<int64_t>(std::min(BATCH_HELD / values, blocks(number, threads)), 1);
  at::parallel_for(0, blocks(number, group), std::max<int64_t>(GRAIN / (values * group), 1), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const int64_t start = i * group, count = std::min(group, number - start);
      const Tensor one = packed_batch(a, start, count, m, k, scratch(LEFT).take(group * m * k));
      const Tensor two = packed_batch(b, start, count, k, n, scratch(RIGHT).take(group * k * n));
      float* sums = to.direct() ? static_cast<float*>(to.at(start * m, 0)) : scratch(SUMS).take(group * m * n);
      Tensor sum = at::from_blob(sums, {count, m, n}, at::kFloat);
      at::bmm_out(sum, one, two);
      if (to.direct()) continue;
      to.plus ? to.write(sums, n, start * m, 0, count * m, n) : finish(to.type, sums, to.at(start * m, 0), count * m * n);
    }
  });
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

inline Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Type low, Type out) {
  if (a.dim() == 3 && b.stride(0) == 0) {  // one matrix for the whole batch: torch's `linear` of turned inputs
    const Tensor rows = a.reshape({a.size(0) * a.size(1), a.size(2)});
    return product(rows, b.select(0, 0), bias, low, out).view({a.size(0), a.size(1), b.size(2)});
  }
  const float* plus = bias.has_value() ? rounded_bias(*bias, low) : nullptr;
  const int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  const bool batched = a.dim() == 3;
  Tensor result = batched ? at::empty({a.size(0), m, n}, out) : at::empty({m, n}, out);
  const Result to{result.mutable_data_ptr<void>(), out, n, plus};
  const int64_t count = result.numel();
  if (count > 0 && k == 0) {
    const float* zeros = scratch(SUMS).take(n);
    std::fill_n(scratch(SUMS).take(n), n, 0.0f);
    to.write(zeros, 0, 0, 0, count / n, n);
  } else if (count > 0) {
    const Tensor left = in_lines(a, low), right = in_lines(b, low);
    batched ? multiply_batch(left, right, low, to) : multiply(operand(left, low), operand(right, low), to, m, k);
  }
  tidy();
  return result;
}

inline Tensor cast_matmul_cpu(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Type dtype, Type out) {
  TORCH_CHECK(a.dim() == b.dim() && (a.dim() == 2 || a.dim() == 3) && a.size(-1) == b.size(-2) &&
                  (a.dim() == 2 || a.size(0) == b.size(0)),
              "cast_matmul: ", a.sizes(), " times ", b.sizes());
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "cast_matmul rounds to float16 or bfloat16, not ", dtype);
  TORCH_CHECK(out == dtype || out == at::kFloat, "cast_matmul gives ", dtype, " or float32, not ", out);
  TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == b.size(-1)), "cast_matmul: the bias is ",
              bias.has_value() ? bias->sizes() : a.sizes(), " for ", b.size(-1), " columns");
  return product(a, b, bias, dtype, out);
}

}  // namespace amp
