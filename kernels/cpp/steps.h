// Loops of attention and of an LSTM's steps: see loops.h.
#pragma once

#include "exponential.h"
#include "loops.h"

namespace amp {

namespace {

// x and the lanes of a vector, as one value.
float added(float x, Vector lanes) {
  for (int64_t i = 0; i < LANES; ++i) x += lanes[i];
  return x;
}

// scores = scores * scale + mask.
void scale_scores(float* scores, const float* mask, int64_t step, float scale, int64_t n) {
  if (!mask) return in_vectors(n, [&](int64_t j, auto zero) { put(scores + j, get<decltype(zero)>(scores + j) * scale); });
  if (step != 1) {
    for (int64_t j = 0; j < n; ++j) scores[j] = scores[j] * scale + mask[j * step];
    return;
  }
  in_vectors(n, [&](int64_t j, auto zero) {
    using T = decltype(zero);
    put(scores + j, get<T>(scores + j) * scale + get<T>(mask + j));
  });
}

// The sum of a loop's terms: lanes are added up at the end.
struct Sum {
  Vector lanes{};
  float rest = 0.0f;
  void add(Vector x) { lanes += x; }
  void add(float x) { rest += x; }
  float total() const { return added(rest, lanes); }
};

struct Most {
  Vector lanes = Vector{} - __builtin_inff();
  float rest = -__builtin_inff();
  void take(Vector x) { lanes = x > lanes ? x : lanes; }
  void take(float x) { rest = x > rest ? x : rest; }
  float value() const {
    float most = rest;
    for (int64_t i = 0; i < LANES; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
  }
};

// exp(x), and 0 where that is less than the least that `exponential` gives.
template <class T>
inline __attribute__((always_inline)) T probability(T x) {
  return x < -87.0f ? T{} : exponential(x);
}

}  // namespace

Greatest exponentials(float* scores, const float* mask, int64_t step, float scale, int64_t n) {
  scale_scores(scores, mask, step, scale, n);
  Most most;
  in_vectors(n, [&](int64_t j, auto zero) { most.take(get<decltype(zero)>(scores + j)); });
  const float greatest = most.value(), from = greatest == -__builtin_inff() ? 0.0f : greatest;
  Sum sum;
  in_vectors(n, [&](int64_t j, auto zero) {
    const auto x = probability(get<decltype(zero)>(scores + j) - from);
    put(scores + j, x);
    sum.add(x);
  });
  return {from, sum.total()};
}

void attention_slopes(float* scores, float* slopes, const float* mask, int64_t step, float scale, float log, const float* given,
                      const float* result, int64_t width, int64_t n) {
  Sum products;
  in_vectors(width, [&](int64_t j, auto zero) {
    using T = decltype(zero);
    products.add(get<T>(given + j) * get<T>(result + j));
  });
  const float sum = products.total();
  scale_scores(scores, mask, step, scale, n);
  in_vectors(n, [&](int64_t j, auto zero) {
    using T = decltype(zero);
    const T share = probability(get<T>(scores + j) - log);
    put(scores + j, share);
    put(slopes + j, share * (get<T>(slopes + j) - sum) * scale);
  });
}

void lstm_step(float* gates, const float* sums, const float* earlier_cell, float* cell, float* state, int64_t hidden, bool keeps) {
  in_vectors(hidden, [&](int64_t j, auto zero) {
    using T = decltype(zero);
    const auto gate = [&](int64_t number) { return get<T>(gates + number * hidden + j) + get<T>(sums + number * hidden + j); };
    const T i = sigmoid(gate(0)), f = sigmoid(gate(1)), g = tangent(gate(2)), o = sigmoid(gate(3));
    const T c = f * get<T>(earlier_cell + j) + i * g;
    put(cell + j, c);
    if (keeps) {
      put(gates + j, i);
      put(gates + hidden + j, f);
      put(gates + 2 * hidden + j, g);
      put(gates + 3 * hidden + j, o);
    }
    put(state + j, o * tangent(c));
  });
}

void lstm_step_backward(const float* gates, const float* cell, const float* earlier_cell, const float* given, const float* state,
                        float* cell_gradient, float* sums, int64_t hidden) {
  in_vectors(hidden, [&](int64_t j, auto zero) {
    using T = decltype(zero);
    const T i = get<T>(gates + j), f = get<T>(gates + hidden + j), g = get<T>(gates + 2 * hidden + j);
    const T o = get<T>(gates + 3 * hidden + j), squashed = tangent(get<T>(cell + j));
    const T grad = get<T>(state + j) + get<T>(given + j);
    const T inner = get<T>(cell_gradient + j) + grad * o * (1.0f - squashed * squashed);
    put(sums + j, inner * g * (i * (1.0f - i)));
    put(sums + hidden + j, inner * get<T>(earlier_cell + j) * (f * (1.0f - f)));
    put(sums + 2 * hidden + j, inner * i * (1.0f - g * g));
    put(sums + 3 * hidden + j, grad * squashed * (o * (1.0f - o)));
    put(cell_gradient + j, inner * f);
  });
}

}  // namespace amp
