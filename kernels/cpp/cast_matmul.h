// a @ b + bias: operands rounded to a low-precision dtype, sums in fp32, one rounding to the result.
#pragma once

#include "panels.h"

namespace amp {

// A few rows times a large matrix: the matrix is read once, rounded in registers, and no copy of it is written. Decoding
// one token at a time spends most of its time here, and the bandwidth of the memory is the limit.
constexpr int64_t A_FEW = 16, A_FEW_SUMS = 8;  // rows, where columns of the matrix are contiguous, and where rows are
constexpr int64_t STRIP = 1 << 14;             // sums that stay in the cache while rows are added to them

inline void dot_rows(const float* rows, const Operand& b, const Result& to, int64_t m, int64_t first, int64_t last, int64_t k) {
  // Columns whose sums are written at a time: with more than four rows, all rows are to find them in the cache.
  const int64_t together = m > 4 ? STREAMS : 8 * STREAMS;
  float sums[A_FEW * 4 * STREAMS];
  for (int64_t column = first; column < last; column += together) {
    const int64_t width = std::min(together, last - column);
    if (b.type == at::kFloat && m > 4) {  // round the columns once, not for every four rows
      float* held = scratch(RIGHT).take(STREAMS * k);
      pack(Operand{b.data, b.stride, false, b.type, b.low}, column, 0, width, k, held, k);
      dot_columns(rows, Operand{held, k, true, at::kFloat, at::kFloat}, 0, sums, together, width, m, k);
    } else {
      dot_columns(rows, b, column, sums, together, width, m, k);
    }
    to.write(sums, together, 0, column, m, width);
  }
}

// The same where the rows of b are contiguous: they are added to the sums of a strip of columns.
inline void add_strip(const float* rows, const Operand& b, const Result& to, int64_t m, int64_t first, int64_t last, int64_t k) {
  const int64_t width = last - first;
  float* sums = scratch(SUMS).take(m * width);
  std::fill(sums, sums + m * width, 0.0f);
  add_rows(rows, b, first, sums, width, m, k);
  to.write(sums, width, 0, first, m, width);
}

inline void multiply_few(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t k) {
  const int64_t n = to.n;
  float* rows = scratch(LEFT).take(m * k);
  pack(a, 0, 0, m, k, rows, k);
  const int64_t unit = b.turned ? STREAMS : std::min(STRIP / m, blocks(blocks(n, at::get_num_threads()), 16) * 16);
  at::parallel_for(0, blocks(n, unit), std::max<int64_t>(GRAIN / k / unit, 1), [&](int64_t i, int64_t j) {
    if (b.turned) {
      dot_rows(rows, b, to, m, i * unit, std::min(j * unit, n), k);
    } else {
      for (; i < j; ++i) add_strip(rows, b, to, m, i * unit, std::min((i + 1) * unit, n), k);
    }
  });
}

// Of the two operands the smaller one is packed into panels, which transposes it if its columns are contiguous. The larger one is
// read as it is in memory; if that is the right one, the result comes out transposed, and is turned before it is written.
constexpr int64_t NARROW = 64;  // rows, for which a matrix that is larger than the cache is not packed into panels

inline void multiply_many(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t k) {
  const int64_t n = to.n;
  const bool flips = b.turned ? m * (k + n) < n * k : m <= NARROW && n * k > 4 * cache_values();
  if (flips) return multiply_tiled(transposed(b), transposed(a), to, n, m, k, true);
  multiply_tiled(a, b, to, m, n, k, false);
}

inline void multiply(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t k) {
  m <= (b.turned ? A_FEW : A_FEW_SUMS) ? multiply_few(a, b, to, m, k) : multiply_many(a, b, to, m, k);
}

}  // namespace amp
