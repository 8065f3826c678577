// Packs blocks of a matrix, rounded to Low, as fp32 rows, even if they are columns in memory: see loops.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "rounding.h"

namespace amp {

// Stands for a low-precision dtype where values are rounded already.
struct Exact {};

template <class Low>
inline float rounded_one(float x) {
  if constexpr (std::is_same_v<Low, Exact>) {
    return x;
  } else {
    return static_cast<float>(static_cast<Low>(x));
  }
}
template <class Low>
inline float rounded_one(Low x) {
  return static_cast<float>(x);
}

#if AMP_LANES
template <class Low>
inline Floats load_rounded(const float* from) {
  if constexpr (std::is_same_v<Low, Exact>) {
    return load(from);
  } else {
    return rounded(load(from), Low());
  }
}
template <class Low>
inline Floats load_rounded(const Low* from) {
  return load(from);
}
#endif

#if AMP_LANES
// Of rows that are read side by side, one cache line each, the processor follows only some by itself: the next lines are fetched.
template <class T>
inline void fetch_next_line(const T* from) {
  __builtin_prefetch(from + 64 / sizeof(T), 0, 3);
}
#endif

#if AMP_LANES == 8
// Transposes 8 x 8 elements: pairs, then fours, then halves are exchanged.
template <class Low, class T>
inline void turn(const T* from, int64_t stride, float* to, int64_t step) {
  Floats a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    fetch_next_line(from + i * stride);
    a[i] = load_rounded<Low>(from + i * stride);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store(to + i * step, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    store(to + (i + 4) * step, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
#elif AMP_LANES == 16
// Transposes 16 x 16 elements: pairs, then fours, then eights, then halves are exchanged.
template <class Low, class T>
inline void turn(const T* from, int64_t stride, float* to, int64_t step) {
  Floats a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    fetch_next_line(from + i * stride);
    a[i] = load_rounded<Low>(from + i * stride);
  }
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d one = _mm512_castps_pd(b[i + j]), two = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(one, two));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(one, two));
    }
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    store(to + i * step, _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88));
    store(to + (i + 4) * step, _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88));
    store(to + (i + 8) * step, _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd));
    store(to + (i + 12) * step, _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd));
  }
}
#endif

// Packs rows x columns elements of rows in memory that are `stride` apart.
template <class Low, class T>
void pack_lines(const T* from, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t step) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
#if AMP_LANES
    for (; c + AMP_LANES <= columns; c += AMP_LANES) store(to + r * step + c, load_rounded<Low>(from + r * stride + c));
#endif
    for (; c < columns; ++c) to[r * step + c] = rounded_one<Low>(from[r * stride + c]);
  }
}

#if AMP_LANES
// Transposes a block of at most as many rows and columns as a vector has lanes.
template <class Low, class T>
void turn_some(const T* from, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t step) {
  alignas(64) float lines[AMP_LANES * AMP_LANES], turned[AMP_LANES * AMP_LANES];
  for (int64_t c = 0; c < AMP_LANES; ++c) {
    float* line = lines + c * AMP_LANES;
    const T* values = from + c * stride;
    if (c < columns && rows == AMP_LANES) {
      store(line, load_rounded<Low>(values));
    } else {
      for (int64_t r = 0; r < AMP_LANES; ++r) line[r] = c < columns && r < rows ? rounded_one<Low>(values[r]) : 0.0f;
    }
  }
  turn<Exact>(lines, AMP_LANES, turned, AMP_LANES);
  for (int64_t r = 0; r < rows; ++r) __builtin_memcpy(to + r * step, turned + r * AMP_LANES, columns * sizeof(float));
}
#endif

// The same of columns in memory that are `stride` apart.
template <class Low, class T>
void pack_turned(const T* from, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t step) {
  int64_t r = 0;
#if AMP_LANES
  constexpr int64_t FEW = 8;  // rows or columns, for which one value after the other is faster
  for (; r < rows && std::min(rows - r, columns) >= FEW; r += AMP_LANES) {
    const int64_t high = std::min<int64_t>(rows - r, AMP_LANES);
    for (int64_t c = 0; c < columns; c += AMP_LANES) {
      const int64_t wide = std::min<int64_t>(columns - c, AMP_LANES);
      const T* block = from + c * stride + r;
      float* place = to + r * step + c;
      high == AMP_LANES && wide == AMP_LANES ? turn<Low>(block, stride, place, step) : turn_some<Low>(block, stride, high, wide, place, step);
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[r * step + c] = rounded_one<Low>(from[c * stride + r]);
  }
}

}  // namespace amp
