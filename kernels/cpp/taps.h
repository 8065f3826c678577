// The gradient of one filter that reads one channel: see loops.h.
#pragma once

#include "exponential.h"
#include "loops.h"

namespace amp {

// to[t] += the sum over all results of gradient[row, column] * pixels[places[t] + row * pitch + column], for K weights.
template <int K>
void add_tap_sums(const float* gradient, const float* pixels, int64_t pitch, const int32_t* places, int64_t rows, int64_t count,
                  float* to) {
  Vector sums[K] = {};
  VectorBits lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  for (int64_t r = 0; r < rows; ++r, gradient += count, pixels += pitch) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
      const Vector slope = get<Vector>(gradient + i);
#pragma GCC unroll 16
      for (int t = 0; t < K; ++t) sums[t] += slope * get<Vector>(pixels + places[t] + i);
    }
    if (i == count) continue;
    // What is behind the last result may be an infinity, which a slope of zero would not keep out.
    const VectorBits there = lanes < static_cast<int32_t>(count - i);
    const Vector slope = there ? get<Vector>(gradient + i) : Vector{};
#pragma GCC unroll 16
    for (int t = 0; t < K; ++t) sums[t] += slope * (there ? get<Vector>(pixels + places[t] + i) : Vector{});
  }
  for (int t = 0; t < K; ++t) {
    for (int64_t i = 0; i < LANES; ++i) to[t] += sums[t][i];
  }
}

}  // namespace amp
