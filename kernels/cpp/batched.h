// A batch of products: as many at a time as stay in the cache are rounded and multiplied by torch's own batched product; large
// ones, and those of a few rows, one by one, as single products are (cast_matmul.h).
#pragma once

#include "cast_matmul.h"

namespace amp {

constexpr int64_t BATCH_HELD = int64_t(1) << 18;  // fp32 values of operands and results: 1 MB

// The operands of a batch: matrix i begins `i * step` elements after the first.
template <class Low>
struct Batch {
  Operand<Low> first;
  int64_t step;
  explicit Batch(const Tensor& x) : first(operand<Low>(x)), step(x.stride(0)) {}
  Operand<Low> item(int64_t i) const {
    const int64_t bytes = i * step * static_cast<int64_t>(first.wide ? sizeof(float) : sizeof(Low));
    return {static_cast<const char*>(first.data) + bytes, first.stride, first.turned, first.wide};
  }
};

// Packs matrices as they are in memory: `lines` contiguous lines of `length` elements each.
template <class Low>
void pack_batch(const Batch<Low>& x, int64_t start, int64_t count, int64_t lines, int64_t length, float* to) {
  const bool wide = x.first.wide;
  if (x.first.stride == length && x.step == lines * length) {
    return pack<Low>(Operand<Low>{x.item(start).data, 0, false, wide}, 0, 0, 1, count * lines * length, to, 0);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Operand<Low> matrix{x.item(start + i).data, x.first.stride, false, wide};
    pack<Low>(matrix, 0, 0, lines, length, to + i * lines * length, length);
  }
}

template <class Low>
Tensor packed_batch(const Batch<Low>& x, int64_t start, int64_t count, int64_t rows, int64_t columns, float* to) {
  if (!x.first.turned) {
    pack_batch<Low>(x, start, count, rows, columns, to);
    return at::from_blob(to, {count, rows, columns}, at::kFloat);
  }
  pack_batch<Low>(x, start, count, columns, rows, to);
  return at::from_blob(to, {count, rows, columns}, {rows * columns, 1, rows}, at::kFloat);
}

template <class Low, class Out>
void multiply_batch(const Tensor& left, const Tensor& right, const float* plus, Out* to) {
  const Batch<Low> a(left), b(right);
  const int64_t number = left.size(0), m = left.size(1), k = left.size(2), n = right.size(2);
  const int64_t threads = at::get_num_threads(), values = m * k + k * n + m * n;
  const bool few = m <= (b.first.turned ? A_FEW : A_FEW_SUMS);
  if (few || 2 * values > BATCH_HELD) {
    const auto some = [&](int64_t i, int64_t end) {
      for (; i < end; ++i) multiply<Low, Out>(a.item(i), b.item(i), plus, to + i * m * n, m, k, n);
    };
    number < threads ? some(0, number) : at::parallel_for(0, number, std::max<int64_t>(GRAIN / values, 1), some);
    return;
  }
  const int64_t group = std::clamp<int64_t>(BATCH_HELD / values, 1, blocks(number, threads));
  const bool direct = std::is_same_v<Out, float> && !plus;
  at::parallel_for(0, blocks(number, group), std::max<int64_t>(GRAIN / (values * group), 1), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const int64_t start = i * group, count = std::min(group, number - start);
      const Tensor one = packed_batch<Low>(a, start, count, m, k, scratch(LEFT).take(group * m * k));
      const Tensor two = packed_batch<Low>(b, start, count, k, n, scratch(RIGHT).take(group * k * n));
      Out* out = to + start * m * n;
      float* sums = direct ? reinterpret_cast<float*>(out) : scratch(SUMS).take(group * m * n);
      Tensor sum = at::from_blob(sums, {count, m, n}, at::kFloat);
      at::bmm_out(sum, one, two);
      if (direct) continue;
      if (!plus) finish<Out>(sums, nullptr, out, count * m * n);
      for (int64_t r = 0; plus && r < count * m; ++r) finish(sums + r * n, plus, out + r * n, n);
    }
  });
}

}  // namespace amp
