// fp16 and bf16 numbers in memory, and their conversion one by one: to nearest, ties to even, as torch converts them.
#pragma once

#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace amp::c10 {

struct Half {
  uint16_t bits;
  Half() = default;
#if defined(__F16C__)
  Half(float x) : bits(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)) {}
  operator float() const { return _cvtsh_ss(bits); }
#else
  Half(float x) : bits(__builtin_bit_cast(uint16_t, static_cast<_Float16>(x))) {}
  operator float() const { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
#endif
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  BFloat16(float x) {
    const uint32_t all = __builtin_bit_cast(uint32_t, x);
    bits = x != x ? 0x7fc0 : static_cast<uint16_t>((all + 0x7fff + ((all >> 16) & 1)) >> 16);
  }
  operator float() const { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }
};

}  // namespace amp::c10
