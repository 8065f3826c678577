// The steps of an LSTM layer, forward and backward: see ../lstm.py for their definition. The rows of a batch are
// independent, so each thread takes some of them through all steps, and no thread waits for another.
#pragma once

#include <vector>

#include "cast_matmul.h"
#include "exponential.h"

namespace amp {

// Plain arithmetic that the compiler vectorizes; NaN stays NaN. Within 2 units in the last place (a test checks it).
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

// c = a @ b, or c += a @ b; b is [k, n] in consecutive blocks of COLUMNS columns.
class Blocks {
 public:
  explicit Blocks(const Tensor& b) : k_(b.size(0)), n_(b.size(1)), packed_(k_ * blocks(n_, COLUMNS) * COLUMNS) {
    const float* from = b.const_data_ptr<float>();
    for (int64_t column = 0; column < n_; column += COLUMNS) {
      const int64_t width = std::min(COLUMNS, n_ - column);
      for (int64_t i = 0; i < k_; ++i) {
        std::copy_n(from + i * n_ + column, width, packed_.data() + column * k_ + i * COLUMNS);
      }
    }
  }

  void multiply(const float* a, float* c, int64_t rows, bool adds) const {
    for (int64_t column = 0; column < n_; column += COLUMNS) {
      const int64_t width = std::min(COLUMNS, n_ - column);
      const float* block = packed_.data() + column * k_;
      if (blocks_work()) {
        at::native::cpublas::brgemm(rows, width, k_, k_, COLUMNS, n_, adds, a, block, c + column, false);
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        float sums[COLUMNS] = {};
        for (int64_t i = 0; i < k_; ++i) {
          const float x = a[r * k_ + i];
          for (int64_t j = 0; j < COLUMNS; ++j) sums[j] += x * block[i * COLUMNS + j];
        }
        float* to = c + r * n_ + column;
        for (int64_t j = 0; j < width; ++j) to[j] = adds ? to[j] + sums[j] : sums[j];
      }
    }
  }

 private:
  int64_t k_, n_;
  std::vector<float> packed_;
};

// Writes a row of results to memory in their dtype, and reads the rounded values back into `row` for the next product.
template <class Out>
void keep(float* row, Out* to, int64_t n) {
  finish<Out>(row, nullptr, to, n);
  if (!std::is_same_v<Out, float>) widen(to, row, n);
}

template <class F>
void by_rows(int64_t batch, const F& f) {
  at::parallel_for(0, batch, 1, [&](int64_t first, int64_t last) {
    f(first, last);
    if (blocks_work()) at::native::cpublas::brgemm_release(false);
  });
}

template <class Out>
void lstm_forward(float* gates, const float* state, const float* cell, const Blocks& weight, Out* out, float* cells,
                  int64_t length, int64_t batch, int64_t hidden, bool reverse) {
  by_rows(batch, [&](int64_t first, int64_t last) {
    const int64_t rows = last - first;
    std::vector<float> held(state + first * hidden, state + last * hidden);
    const float* before = cell + first * hidden;
    for (int64_t step = 0; step < length; ++step) {
      const int64_t at = ((reverse ? length - 1 - step : step) * batch + first) * hidden;
      weight.multiply(held.data(), gates + 4 * at, rows, true);
      for (int64_t r = 0; r < rows; ++r) {
        float* __restrict i = gates + 4 * (at + r * hidden);
        float* __restrict f = i + hidden;
        float* __restrict g = f + hidden;
        float* __restrict o = g + hidden;
        float* __restrict c = cells + at + r * hidden;
        float* __restrict h = held.data() + r * hidden;
        const float* __restrict earlier = before + r * hidden;
#pragma omp simd
        for (int64_t j = 0; j < hidden; ++j) {
          i[j] = sigmoid(i[j]);
          f[j] = sigmoid(f[j]);
          g[j] = tangent(g[j]);
          o[j] = sigmoid(o[j]);
          c[j] = f[j] * earlier[j] + i[j] * g[j];
          h[j] = o[j] * tangent(c[j]);
        }
        keep(h, out + at + r * hidden, hidden);
      }
      before = cells + at;
    }
  });
}

// At the start, `state` and `cell` are the gradients of the last step's values; at the end, those of the first step's.
template <class Out>
void lstm_backward(const Out* given, float* state, float* cell, const Out* gates, const float* cells, const float* first_cell,
                   const Blocks& weight, Out* sums, int64_t length, int64_t batch, int64_t hidden, bool reverse) {
  by_rows(batch, [&](int64_t first, int64_t last) {
    const int64_t rows = last - first;
    std::vector<float> gate(4 * hidden), above(hidden), grown(rows * 4 * hidden);
    for (int64_t step = length - 1; step >= 0; --step) {
      const auto place = [&](int64_t s) { return ((reverse ? length - 1 - s : s) * batch + first) * hidden; };
      const int64_t at = place(step);
      const float* before = step == 0 ? first_cell + first * hidden : cells + place(step - 1);
      for (int64_t r = 0; r < rows; ++r) {
        widen(gates + 4 * (at + r * hidden), gate.data(), 4 * hidden);
        if (given) widen(given + at + r * hidden, above.data(), hidden);
        const float* __restrict i = gate.data();
        const float* __restrict f = i + hidden;
        const float* __restrict g = f + hidden;
        const float* __restrict o = g + hidden;
        const float* __restrict c = cells + at + r * hidden;
        const float* __restrict earlier = before + r * hidden;
        const float* __restrict more = above.data();
        const float* __restrict dh = state + (first + r) * hidden;
        float* __restrict dc = cell + (first + r) * hidden;
        float* __restrict to = grown.data() + r * 4 * hidden;
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
        keep(to, sums + 4 * (at + r * hidden), 4 * hidden);
      }
      weight.multiply(grown.data(), state + first * hidden, rows, false);
    }
  });
}

inline void check_dense(std::initializer_list<Tensor> tensors) {
  for (const Tensor& x : tensors) TORCH_CHECK(x.is_contiguous() && x.is_cpu(), "the steps of an LSTM want dense CPU tensors");
}

inline void lstm_forward_cpu(Tensor gates, const Tensor& state, const Tensor& cell, const Tensor& right, Tensor out,
                             Tensor cells, bool reverse) {
  check_dense({gates, state, cell, right, out, cells});
  const int64_t length = out.size(0), batch = out.size(1), hidden = out.size(2);
  const Blocks weight(right);
  const auto run = [&](auto zero) {
    using Out = decltype(zero);
    lstm_forward<Out>(gates.mutable_data_ptr<float>(), state.const_data_ptr<float>(), cell.const_data_ptr<float>(), weight,
                      out.mutable_data_ptr<Out>(), cells.mutable_data_ptr<float>(), length, batch, hidden, reverse);
  };
  out.scalar_type() == at::kHalf ? run(c10::Half()) : out.scalar_type() == at::kBFloat16 ? run(c10::BFloat16()) : run(float());
}

inline void lstm_backward_cpu(const std::optional<Tensor>& given, Tensor state, Tensor cell, const Tensor& gates, const Tensor& cells,
                              const Tensor& first_cell, const Tensor& right, Tensor sums, bool reverse) {
  check_dense({state, cell, gates, cells, first_cell, right, sums});
  if (given.has_value()) check_dense({*given});
  const int64_t length = cells.size(0), batch = cells.size(1), hidden = cells.size(2);
  const Blocks weight(right);
  const auto run = [&](auto zero) {
    using Out = decltype(zero);
    lstm_backward<Out>(given.has_value() ? given->const_data_ptr<Out>() : nullptr, state.mutable_data_ptr<float>(),
                       cell.mutable_data_ptr<float>(), gates.const_data_ptr<Out>(), cells.const_data_ptr<float>(),
                       first_cell.const_data_ptr<float>(), weight, sums.mutable_data_ptr<Out>(), length, batch, hidden, reverse);
  };
  gates.scalar_type() == at::kHalf ? run(c10::Half()) : gates.scalar_type() == at::kBFloat16 ? run(c10::BFloat16()) : run(float());
}

}  // namespace amp
