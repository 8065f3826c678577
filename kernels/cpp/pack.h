// Packs blocks of a matrix, rounded to Low, as fp32 rows, even if they are columns in memory.
#pragma once

#include <type_traits>

#include "rounding.h"

namespace amp {

// A matrix in memory: element (r, c) is data[r * stride + c], or data[c * stride + r] if it is transposed.
template <class T>
struct Matrix {
  const T* data;
  int64_t stride;
  bool turned;
};

// A matrix of fp32 or Low, which is told when it is packed: what only packs it is compiled once.
template <class Low>
struct Operand {
  const void* data;
  int64_t stride;
  bool turned, wide;
};

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

#if AMP_LANES == 16
// Transposes 16 x 16 elements: pairs, then fours, then eights, then halves are exchanged.
template <class Low, class T>
inline void turn(const T* from, int64_t stride, float* to, int64_t step) {
  Floats a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = load_rounded<Low>(from + i * stride);
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

// Packs rows x columns elements, starting at (row, column), to `to`, whose rows are `step` apart.
template <class Low, class T>
void pack(Matrix<T> x, int64_t row, int64_t column, int64_t rows, int64_t columns, float* to, int64_t step) {
  if (!x.turned) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = x.data + (row + r) * x.stride + column;
      if constexpr (std::is_same_v<T, float>) {
        round<Low>(from, to + r * step, columns);
      } else {
        widen(from, to + r * step, columns);
      }
    }
    return;
  }
  const T* from = x.data + column * x.stride + row;
  int64_t r = 0;
#if AMP_LANES == 16
  for (; r + 16 <= rows; r += 16) {
    int64_t c = 0;
    for (; c + 16 <= columns; c += 16) turn<Low>(from + c * x.stride + r, x.stride, to + r * step + c, step);
    for (; c < columns; ++c) {
      for (int64_t i = r; i < r + 16; ++i) to[i * step + c] = rounded_one<Low>(from[c * x.stride + i]);
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[r * step + c] = rounded_one<Low>(from[c * x.stride + r]);
  }
}

template <class Low>
void pack(const Operand<Low>& x, int64_t row, int64_t column, int64_t rows, int64_t columns, float* to, int64_t step) {
  if (x.wide) {
    pack<Low>(Matrix<float>{static_cast<const float*>(x.data), x.stride, x.turned}, row, column, rows, columns, to, step);
  } else {
    pack<Low>(Matrix<Low>{static_cast<const Low*>(x.data), x.stride, x.turned}, row, column, rows, columns, to, step);
  }
}

}  // namespace amp
