// Converts memory between fp32 and a low-precision dtype, with vectors as wide as the CPU's registers. There is a library
// for each kind of CPU (../capability.py), and the one that is loaded uses instructions that the CPU has.
//
// Rounding is to nearest, ties to even, and NaN stays NaN: bit-identical to torch's own casts (a test checks it).
#pragma once

#include "numbers.h"
#include "vectors.h"

#if AMP_LANES
#include <immintrin.h>
#endif

namespace amp {

#if AMP_LANES == 16
using Floats = __m512;
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
inline Floats multiply_add(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats fill(float x) { return _mm512_set1_ps(x); }
inline float total(Floats x) { return _mm512_reduce_add_ps(x); }

// The bits of a bf16 number, in the upper half of each lane; the lower half is undefined.
inline __m512i bf16_bits(Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_mask_sub_epi32(half, odd, half, _mm512_set1_epi32(-1));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
}
inline __m256i half_bits(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats load(const c10::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats load(const c10::Half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store(c10::BFloat16* to, Floats x) {
  const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(x), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
}
inline void store(c10::Half* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half_bits(x)); }
inline Floats rounded(Floats x, c10::BFloat16) {
  return _mm512_castsi512_ps(_mm512_and_si512(bf16_bits(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Floats rounded(Floats x, c10::Half) { return _mm512_cvtph_ps(half_bits(x)); }

#elif AMP_LANES == 8
using Floats = __m256;
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats add(Floats x, Floats y) { return _mm256_add_ps(x, y); }
inline Floats multiply_add(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats fill(float x) { return _mm256_set1_ps(x); }
inline float total(Floats x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline __m256i bf16_bits(Floats x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}
inline __m128i half_bits(Floats x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats load(const c10::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Floats load(const c10::Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store(c10::BFloat16* to, Floats x) {
  const __m256i bits = _mm256_srli_epi32(bf16_bits(x), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}
inline void store(c10::Half* to, Floats x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half_bits(x)); }
inline Floats rounded(Floats x, c10::BFloat16) {
  return _mm256_castsi256_ps(_mm256_and_si256(bf16_bits(x), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Floats rounded(Floats x, c10::Half) { return _mm256_cvtph_ps(half_bits(x)); }
#endif

#if AMP_LANES == 16
inline Floats multiply(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
inline Floats positive(Floats x) { return _mm512_max_ps(zeros(), x); }  // or 0; NaN stays NaN
#elif AMP_LANES == 8
inline Floats multiply(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
inline Floats positive(Floats x) { return _mm256_max_ps(zeros(), x); }
#endif

#if AMP_LANES
// Two vectors, one after the other.
template <class Out>
inline void store_two(Out* to, Floats x, Floats y) {
  store(to, x);
  store(to + AMP_LANES, y);
}
#if AMP_LANES == 16
inline void store_two(c10::BFloat16* to, Floats x, Floats y) {
  const __m512i low = _mm512_srli_epi32(bf16_bits(x), 16), high = _mm512_srli_epi32(bf16_bits(y), 16);
  const __m512i mixed = _mm512_packus_epi32(low, high);  // of each 128 bits of both
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), mixed));
}
#endif
#endif

// to = from + add, rounded once. `Out` may be float.
template <class Out>
inline __attribute__((always_inline)) void finish(const float* from, const float* plus, Out* to, int64_t n) {
  int64_t i = 0;
#if AMP_LANES
  constexpr int64_t TWO = 2 * AMP_LANES;
  const auto sum = [&](int64_t j) { return plus ? add(load(from + j), load(plus + j)) : load(from + j); };
  for (; i + TWO <= n; i += TWO) store_two(to + i, sum(i), sum(i + AMP_LANES));
  for (; i + AMP_LANES <= n; i += AMP_LANES) store(to + i, sum(i));
#endif
  for (; i < n; ++i) to[i] = static_cast<Out>(plus ? from[i] + plus[i] : from[i]);
}

}  // namespace amp
