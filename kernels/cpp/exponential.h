// The exponential function of fp32, in plain arithmetic that the compiler vectorizes.
#pragma once

#include <cstdint>

namespace amp {

// NaN stays NaN; x is clamped to -87 and 88. Within 2 units in the last place (a test checks it).
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // the nearest integer is in the last bits
  const float whole = shifted - 12582912.0f;
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const int32_t power = (__builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, 12582912.0f) + 127) << 23;
  return sum * __builtin_bit_cast(float, power);
}

}  // namespace amp
