// The exponential function of fp32 and what is made of it, in plain arithmetic for one value or for a vector of them.
#pragma once

#include "vectors.h"

namespace amp {

// A vector that the compiler knows arithmetic and comparisons of. (Loops over single values are not reliably vectorized: comparisons
// become branches.)
typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t VectorBits __attribute__((vector_size(LANES * 4)));
template <class T>
struct BitsOf {
  using type = VectorBits;
};
template <>
struct BitsOf<float> {
  using type = int32_t;
};

template <class T>
inline T get(const float* from) {
  T x;
  __builtin_memcpy(&x, from, sizeof(T));
  return x;
}
template <class T>
inline void put(float* to, T x) {
  __builtin_memcpy(to, &x, sizeof(T));
}

// f(i, zero): for vectors of values from i on as long as there are enough, and then one by one; zero is of the type to use.
template <class F>
inline __attribute__((always_inline)) void in_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, Vector{});
  for (; i < n; ++i) f(i, 0.0f);
}

// NaN stays NaN; x is clamped to -87 and 88. Within 2 units in the last place (a test checks it).
template <class T>
inline __attribute__((always_inline)) T exponential(T x) {
  using Bits = typename BitsOf<T>::type;
  x = x < -87.0f ? T{} - 87.0f : x;
  x = x > 88.0f ? T{} + 88.0f : x;
  const T shifted = x * 1.44269504f + 12582912.0f;  // the nearest integer is in the last bits
  const T whole = shifted - 12582912.0f;
  const T rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  T sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Bits power = (__builtin_bit_cast(Bits, shifted) - __builtin_bit_cast(int32_t, 12582912.0f) + 127) << 23;
  return sum * __builtin_bit_cast(T, power);
}

// NaN stays NaN. Within 2 units in the last place (a test checks it).
template <class T>
inline __attribute__((always_inline)) T sigmoid(T x) {
  return 1.0f / (1.0f + exponential(T{} - x));
}
template <class T>
inline __attribute__((always_inline)) T tangent(T x) {
  const T square = x * x;
  T near = square * -5.70498872745e-3f + 2.06390887954e-2f;
  near = near * square - 5.37397155531e-2f;
  near = near * square + 1.33314422036e-1f;
  near = near * square - 3.33332819422e-1f;
  near = near * square * x + x;
  const T far = 1.0f - 2.0f / (1.0f + exponential(x + x));
  return square < 0.390625f ? near : far;
}

}  // namespace amp
