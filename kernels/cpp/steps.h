// Loops of attention and of an LSTM's steps: see loops.h. Plain arithmetic that the compiler vectorizes.
#pragma once

#include "exponential.h"
#include "loops.h"

namespace amp {

Greatest exponentials(float* scores, const float* mask, int64_t step, float scale, int64_t n) {
  float most = -__builtin_inff();
  if (mask) {
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < n; ++j) {
      scores[j] = scores[j] * scale + mask[j * step];
      most = scores[j] > most ? scores[j] : most;
    }
  } else {
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < n; ++j) {
      scores[j] = scores[j] * scale + 0.0f;
      most = scores[j] > most ? scores[j] : most;
    }
  }
  const float from = most == -__builtin_inff() ? 0.0f : most;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) {
    const float x = scores[j] - from;
    scores[j] = x < -87.0f ? 0.0f : exponential(x);
    sum += scores[j];
  }
  return {from, sum};
}

// NaN stays NaN. Within 2 units in the last place (a test checks it).
inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
inline float tangent(float x) {
  const float square = x * x;
  float near = -5.70498872745e-3f;
  near = near * square + 2.06390887954e-2f;
  near = near * square - 5.37397155531e-2f;
  near = near * square + 1.33314422036e-1f;
  near = near * square - 3.33332819422e-1f;
  near = near * square * x + x;
  const float far = 1.0f - 2.0f / (1.0f + exponential(2.0f * x));
  return square < 0.390625f ? near : far;
}

void lstm_step(float* gates, const float* earlier_cell, float* cell, float* state, int64_t hidden) {
  float* __restrict i = gates;
  float* __restrict f = i + hidden;
  float* __restrict g = f + hidden;
  float* __restrict o = g + hidden;
  float* __restrict c = cell;
  float* __restrict h = state;
  const float* __restrict earlier = earlier_cell;
#pragma omp simd
  for (int64_t j = 0; j < hidden; ++j) {
    i[j] = sigmoid(i[j]);
    f[j] = sigmoid(f[j]);
    g[j] = tangent(g[j]);
    o[j] = sigmoid(o[j]);
    c[j] = f[j] * earlier[j] + i[j] * g[j];
    h[j] = o[j] * tangent(c[j]);
  }
}

void lstm_step_backward(const float* gates, const float* cell, const float* earlier_cell, const float* given, const float* state,
                        float* cell_gradient, float* sums, int64_t hidden) {
  const float* __restrict i = gates;
  const float* __restrict f = i + hidden;
  const float* __restrict g = f + hidden;
  const float* __restrict o = g + hidden;
  const float* __restrict c = cell;
  const float* __restrict earlier = earlier_cell;
  const float* __restrict more = given;
  const float* __restrict dh = state;
  float* __restrict dc = cell_gradient;
  float* __restrict to = sums;
#pragma omp simd
  for (int64_t j = 0; j < hidden; ++j) {
    const float squashed = tangent(c[j]);
    const float grad = dh[j] + more[j];
    const float inner = dc[j] + grad * o[j] * (1.0f - squashed * squashed);
    to[j] = inner * g[j] * (i[j] * (1.0f - i[j]));
    to[hidden + j] = inner * earlier[j] * (f[j] * (1.0f - f[j]));
    to[2 * hidden + j] = inner * i[j] * (1.0f - g[j] * g[j]);
    to[3 * hidden + j] = grad * squashed * (o[j] * (1.0f - o[j]));
    dc[j] = inner * f[j];
  }
}

void multiply_block(const float* a, const float* block, float* c, int64_t step, int64_t rows, int64_t width, int64_t k, bool adds) {
  for (int64_t r = 0; r < rows; ++r) {
    float sums[COLUMNS] = {};
    for (int64_t i = 0; i < k; ++i) {
      const float x = a[r * k + i];
      for (int64_t j = 0; j < COLUMNS; ++j) sums[j] += x * block[i * COLUMNS + j];
    }
    float* to = c + r * step;
    for (int64_t j = 0; j < width; ++j) to[j] = adds ? to[j] + sums[j] : sums[j];
  }
}

}  // namespace amp
