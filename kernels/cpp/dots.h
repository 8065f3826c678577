// Products of a few rows: sums of products of fp32 values with values of another dtype, which are widened or rounded in registers.
#pragma once

#include "pack.h"

namespace amp {

constexpr int SUMS_HELD = AMP_LANES == 16 ? 16 : 8;  // in registers: enough to hide the latency of an addition

// Adds up the lanes of the sums of R rows and C columns, and the products from `i` on, which fill no vector. For R and C this is
// not compiled again: most of the time goes into dot_block's loop.
template <class Low, class B>
__attribute__((noinline)) void dot_rest(int R, int C, const float* lanes, int64_t i, const float* rows, const B* columns,
                                        int64_t stride, float* to, int64_t step, int64_t k) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
#if AMP_LANES
      float sum = total(load(lanes + (r * C + c) * AMP_LANES));
#else
      float sum = 0.0f;
#endif
      for (int64_t j = i; j < k; ++j) sum += rows[r * k + j] * rounded_one<Low>(columns[c * stride + j]);
      to[r * step + c] = sum;
    }
  }
}

#if AMP_LANES
// to[0..7] = the sums of the lanes of eight vectors.
inline void totals(const Floats* lanes, float* to) {
#if AMP_LANES == 16
  const auto half = [&](int i) { return _mm256_add_ps(_mm512_castps512_ps256(lanes[i]), _mm512_extractf32x8_ps(lanes[i], 1)); };
#else
  const auto half = [&](int i) { return lanes[i]; };
#endif
  const __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(half(0), half(1)), _mm256_hadd_ps(half(2), half(3)));
  const __m256 second = _mm256_hadd_ps(_mm256_hadd_ps(half(4), half(5)), _mm256_hadd_ps(half(6), half(7)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(first), _mm256_extractf128_ps(first, 1)));
  _mm_storeu_ps(to + 4, _mm_add_ps(_mm256_castps256_ps128(second), _mm256_extractf128_ps(second, 1)));
}
#endif

// The sums of R rows and C columns, each contiguous in memory as in a linear layer's weight; rows of sums are `step` apart.
template <class Low, int R, int C, class B>
void dot_block(const float* rows, const B* columns, int64_t stride, float* to, int64_t step, int64_t k) {
  int64_t i = 0;
#if AMP_LANES
  // The processor finds out by itself that a column is read in order, but it finds out anew for every column and page: the next
  // columns are fetched while these are read, into the second cache (the first is too small: half as fast).
  Floats lanes[R * C];
  for (int j = 0; j < R * C; ++j) lanes[j] = zeros();
  for (; i + AMP_LANES <= k; i += AMP_LANES) {
    for (int c = 0; c < C; ++c) {
      __builtin_prefetch(columns + (c + C) * stride + i, 0, 2);
      const Floats x = load_rounded<Low>(columns + c * stride + i);
      for (int r = 0; r < R; ++r) lanes[r * C + c] = multiply_add(load(rows + r * k + i), x, lanes[r * C + c]);
    }
  }
  if constexpr (R == 1 && C == 8) {
    if (i == k) return totals(lanes, to);
  }
  alignas(64) float held[R * C * AMP_LANES];
  for (int j = 0; j < R * C; ++j) store(held + j * AMP_LANES, lanes[j]);
#else
  const float* held = nullptr;
#endif
  dot_rest<Low>(R, C, held, i, rows, columns, stride, to, step, k);
}

template <class Low, int R, class B>
void dot_group(const float* rows, const B* columns, int64_t stride, float* to, int64_t step, int64_t width, int64_t k) {
  constexpr int C = SUMS_HELD / R < STREAMS ? SUMS_HELD / R : STREAMS;
  int64_t c = 0;
  for (; c + C <= width; c += C) dot_block<Low, R, C>(rows, columns + c * stride, stride, to + c, step, k);
  for (; c < width; ++c) {  // the last columns, row by row
    for (int r = 0; r < R; ++r) dot_block<Low, 1, 1>(rows + r * k, columns + c * stride, stride, to + r * step + c, step, k);
  }
}

template <class Low, class B>
void dot_columns(const float* rows, const B* columns, int64_t stride, float* to, int64_t step, int64_t width, int64_t m,
                 int64_t k) {
  int64_t r = 0;
  for (; r + 4 <= m; r += 4) dot_group<Low, 4>(rows + r * k, columns, stride, to + r * step, step, width, k);
  for (; r + 2 <= m; r += 2) dot_group<Low, 2>(rows + r * k, columns, stride, to + r * step, step, width, k);
  for (; r < m; ++r) dot_group<Low, 1>(rows + r * k, columns, stride, to + r * step, step, width, k);
}

// K contiguous rows at a time are added to the sums of a strip of columns.
template <class Low, int K, class B>
void add_some(const float* a, int64_t step, const B* from, int64_t stride, float* sums, int64_t width, int64_t m) {
  int64_t c = 0;
#if AMP_LANES
  for (; c + AMP_LANES <= width; c += AMP_LANES) {
    Floats x[K];
    for (int i = 0; i < K; ++i) x[i] = load_rounded<Low>(from + i * stride + c);
    for (int64_t r = 0; r < m; ++r) {
      Floats sum = load(sums + r * width + c);
      for (int i = 0; i < K; ++i) sum = multiply_add(fill(a[r * step + i]), x[i], sum);
      store(sums + r * width + c, sum);
    }
  }
#endif
  for (; c < width; ++c) {
    for (int64_t r = 0; r < m; ++r) {
      for (int i = 0; i < K; ++i) sums[r * width + c] += a[r * step + i] * rounded_one<Low>(from[i * stride + c]);
    }
  }
}

template <class Low, class B>
void add_rows(const float* a, const B* from, int64_t stride, float* sums, int64_t width, int64_t m, int64_t k) {
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) add_some<Low, 8>(a + i, k, from + i * stride, stride, sums, width, m);
  for (; i < k; ++i) add_some<Low, 1>(a + i, k, from + i * stride, stride, sums, width, m);
}

}  // namespace amp
