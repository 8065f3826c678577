// The loops over values in memory, for every dtype: the dtype is an argument, so that what calls them is compiled once. They are
// compiled in loops.cpp, with vectors as wide as the CPU's registers.
#pragma once

#include "vectors.h"

namespace amp {

namespace at {
enum class ScalarType { Float, Half, BFloat16, Other };
constexpr ScalarType kFloat = ScalarType::Float, kHalf = ScalarType::Half, kBFloat16 = ScalarType::BFloat16;
}  // namespace at

using Type = at::ScalarType;

inline int64_t bytes_of(Type type) { return type == at::kFloat ? 4 : 2; }
inline const void* advanced(const void* from, Type type, int64_t count) {
  return static_cast<const char*>(from) + count * bytes_of(type);
}
inline void* advanced(void* to, Type type, int64_t count) { return static_cast<char*>(to) + count * bytes_of(type); }

// A matrix in memory: element (r, c) is number r * stride + c, or c * stride + r if it is transposed. Values of fp32 are rounded
// to `low` as they are read; `low` may be fp32 too, for pack and dot_columns.
struct Operand {
  const void* data;
  int64_t stride;
  bool turned;
  Type type, low;
  const void* at(int64_t row, int64_t column) const {
    return advanced(data, type, turned ? column * stride + row : row * stride + column);
  }
};

inline Operand transposed(const Operand& x) { return {x.data, x.stride, !x.turned, x.type, x.low}; }

constexpr int64_t STREAMS = 8;  // columns that dot_columns reads at the same time

// Packs rows x columns elements, starting at (row, column), as fp32 rows, `step` apart.
void pack(const Operand& x, int64_t row, int64_t column, int64_t rows, int64_t columns, float* to, int64_t step);

// to[i] = from[i * stride], in fp32.
void widen_every(Type type, const void* from, int64_t stride, float* to, int64_t n);

// The sum of n values, in fp32.
float total_of(Type type, const void* from, int64_t n);

// values += more.
void add_values(float* values, const float* more, int64_t n);

// The same for rows: of `count` values, which follow each other in `more`. In whole vectors: up to LANES - 1 values behind the last row
// are read, and those of `values` are written again.
void add_values(float* values, int64_t step, const float* more, int64_t count, int64_t rows);

// Rows of fp32 values, `stride` apart in `from` and `step` apart in `to`: the values from `begin` to `end` of a row come from there, and
// the others are zeros. In whole vectors: up to LANES - 1 values behind the last row are read and written too.
void place_rows(const float* from, int64_t stride, float* to, int64_t step, int64_t begin, int64_t end, int64_t rows);

// Adds to the values of each row.
void add_to_rows(float* values, int64_t step, const float* plus, int64_t rows, int64_t n);

// Rows of n values in fp32: from `from`, `stride` apart, to `to`, `step` apart.
inline void widen(Type type, const void* from, int64_t stride, float* to, int64_t step, int64_t rows, int64_t n) {
  pack(Operand{from, stride, false, type, type}, 0, 0, rows, n, to, step);
}
inline void widen(Type type, const void* from, float* to, int64_t n) { widen(type, from, 0, to, 0, 1, n); }

// to = from + plus, rounded once: rows of n values, which are `stride` apart in fp32 and `step` apart in the result.
void finish(Type type, const float* from, int64_t stride, const float* plus, void* to, int64_t step, int64_t rows, int64_t n);
inline void finish(Type type, const float* from, void* to, int64_t n) { finish(type, from, 0, nullptr, to, 0, 1, n); }

// What is done with low-precision results, with a rounding after each step: another matrix of the same form is added, one is multiplied
// with, and what is negative becomes 0.
struct Afterwards {
  const void *plus = nullptr, *times = nullptr;
  bool relu = false;
  bool any() const { return plus || times || relu; }
  Afterwards from(Type type, int64_t place) const {
    return {plus ? advanced(plus, type, place) : nullptr, times ? advanced(times, type, place) : nullptr, relu};
  }
};
// The rows of all three matrices are `step` apart.
void afterwards(Type type, const Afterwards& then, void* to, int64_t step, int64_t rows, int64_t n);

// to[r * step + c] = the product of row r of `rows` and column c of `b`, which is transposed: each is k contiguous values.
void dot_columns(const float* rows, const Operand& b, int64_t column, float* to, int64_t step, int64_t width, int64_t m, int64_t k);

// sums[r * width + c] += the sum over i of a[r * k + i] * b[i, column + c], for all k rows of b and `width` columns, in order.
void add_rows(const float* a, const Operand& b, int64_t column, float* sums, int64_t width, int64_t m, int64_t k);

// fp32 values, as the left operand of a product: element (r, i) is number r * row + i * step.
struct Rows {
  const float* data;
  int64_t row, step;
};

constexpr int64_t PANEL_VECTORS = AMP_LANES == 16 ? 4 : 3;  // of a panel, at most
constexpr int64_t TILE_HEIGHT = AMP_LANES == 16 ? 6 : 8;    // rows that fill whole tiles of such a panel

// c = a @ panel, or c += a @ panel: a panel is k rows of one to PANEL_VECTORS vectors, which follow each other in memory; rows of c
// are `step` apart.
void multiply_panel(const Rows& a, const float* panel, int64_t vectors, float* c, int64_t step, int64_t rows, int64_t k, bool adds);

// The same, where row i of the right operand is at b + places[i]; a's rows are contiguous.
void multiply_right_at(const Rows& a, const float* b, const int32_t* places, int64_t vectors, float* c, int64_t step, int64_t rows,
                       int64_t k, bool adds);
// The same with a panel, where row r of the left operand is at a + places[r] and contiguous.
void multiply_left_at(const float* a, const int32_t* places, const float* panel, int64_t vectors, float* c, int64_t step, int64_t rows,
                      int64_t k, bool adds);

// to[t] += the sum over all results of gradient[row, column] * pixels[places[t] + row * pitch + column]; rows of the gradient are
// contiguous. Up to LANES - 1 values behind the last row of both are read.
void add_tap_sums(const float* gradient, const float* pixels, int64_t pitch, const int32_t* places, int64_t taps, int64_t rows,
                  int64_t count, float* to);

// Scores to probabilities, which are not divided by their sum yet; the greatest score (0 if all are -inf) and the sum.
struct Greatest {
  float score, sum;
};
Greatest exponentials(float* scores, const float* mask, int64_t step, float scale, int64_t n);

// Scores to probabilities, with the logarithm of their sum from the forward, and their gradients to those of the scores.
// `given`, `result`: a row of the gradient of the results, and of the results.
void attention_slopes(float* scores, float* slopes, const float* mask, int64_t step, float scale, float log, const float* given,
                      const float* result, int64_t width, int64_t n);

// One step of an LSTM's row: `cell` and `state` are written. The gates' parts that come from the inputs are replaced by the activated
// gates if these are kept for the backward.
void lstm_step(float* gates, const float* sums, const float* earlier_cell, float* cell, float* state, int64_t hidden, bool keeps);
// Its backward: the gradients of the gates' sums are written, and `cell_gradient` becomes that of the earlier cell.
void lstm_step_backward(const float* gates, const float* cell, const float* earlier_cell, const float* given, const float* state,
                        float* cell_gradient, float* sums, int64_t hidden);

}  // namespace amp
