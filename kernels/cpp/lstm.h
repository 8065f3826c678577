// The steps of an LSTM layer, forward and backward: see ../lstm.py for their definition. The rows of a batch are
// independent, so each thread takes some of them through all steps, and no thread waits for another.
#pragma once

#include "cast_matmul.h"

namespace amp {

// c = a @ b, or c += a @ b; b is [k, n] in consecutive blocks of COLUMNS columns.
class Blocks {
 public:
  explicit Blocks(const Tensor& b) : k_(b.size(0)), n_(b.size(1)), packed_(k_ * blocks(n_, COLUMNS) * COLUMNS) {
    const float* from = b.const_data_ptr<float>();
    for (int64_t column = 0; column < n_; column += COLUMNS) {
      const int64_t width = std::min(COLUMNS, n_ - column);
      for (int64_t i = 0; i < k_; ++i) {
        std::copy(from + i * n_ + column, from + i * n_ + column + width, packed_.data() + column * k_ + i * COLUMNS);
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
      multiply_block(a, block, c + column, n_, rows, width, k_, adds);
    }
  }

 private:
  int64_t k_, n_;
  std::vector<float> packed_;
};

// Writes a row of results to memory in their dtype, and reads the rounded values back into `row` for the next product.
inline void keep(float* row, Type type, void* to, int64_t n) {
  finish(type, row, to, n);
  if (type != at::kFloat) widen(type, to, row, n);
}

template <class F>
void by_rows(int64_t batch, const F& f) {
  at::parallel_for(0, batch, 1, [&](int64_t first, int64_t last) {
    f(first, last);
    if (blocks_work()) at::native::cpublas::brgemm_release(false);
  });
}

inline void lstm_forward(float* gates, const float* state, const float* cell, const Blocks& weight, Type type, void* out,
                         float* cells, int64_t length, int64_t batch, int64_t hidden, bool reverse) {
  by_rows(batch, [&](int64_t first, int64_t last) {
    const int64_t rows = last - first;
    std::vector<float> held(state + first * hidden, state + last * hidden);
    const float* before = cell + first * hidden;
    for (int64_t step = 0; step < length; ++step) {
      const int64_t at = ((reverse ? length - 1 - step : step) * batch + first) * hidden;
      weight.multiply(held.data(), gates + 4 * at, rows, true);
      for (int64_t r = 0; r < rows; ++r) {
        float* h = held.data() + r * hidden;
        lstm_step(gates + 4 * (at + r * hidden), before + r * hidden, cells + at + r * hidden, h, hidden);
        keep(h, type, advanced(out, type, at + r * hidden), hidden);
      }
      before = cells + at;
    }
  });
}

// At the start, `state` and `cell` are the gradients of the last step's values; at the end, those of the first step's.
inline void lstm_backward(Type type, const void* given, float* state, float* cell, const void* gates, const float* cells,
                          const float* first_cell, const Blocks& weight, void* sums, int64_t length, int64_t batch,
                          int64_t hidden, bool reverse) {
  by_rows(batch, [&](int64_t first, int64_t last) {
    const int64_t rows = last - first;
    std::vector<float> gate(4 * hidden), above(hidden), grown(rows * 4 * hidden);
    for (int64_t step = length - 1; step >= 0; --step) {
      const auto place = [&](int64_t s) { return ((reverse ? length - 1 - s : s) * batch + first) * hidden; };
      const int64_t at = place(step);
      const float* before = step == 0 ? first_cell + first * hidden : cells + place(step - 1);
      for (int64_t r = 0; r < rows; ++r) {
        widen(type, advanced(gates, type, 4 * (at + r * hidden)), gate.data(), 4 * hidden);
        if (given) widen(type, advanced(given, type, at + r * hidden), above.data(), hidden);
        float* to = grown.data() + r * 4 * hidden;
        lstm_step_backward(gate.data(), cells + at + r * hidden, before + r * hidden, above.data(), state + (first + r) * hidden,
                           cell + (first + r) * hidden, to, hidden);
        keep(to, type, advanced(sums, type, 4 * (at + r * hidden)), 4 * hidden);
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
  lstm_forward(gates.mutable_data_ptr<float>(), state.const_data_ptr<float>(), cell.const_data_ptr<float>(), Blocks(right),
               out.scalar_type(), out.mutable_data_ptr<void>(), cells.mutable_data_ptr<float>(), length, batch, hidden, reverse);
}

inline void lstm_backward_cpu(const std::optional<Tensor>& given, Tensor state, Tensor cell, const Tensor& gates, const Tensor& cells,
                              const Tensor& first_cell, const Tensor& right, Tensor sums, bool reverse) {
  check_dense({state, cell, gates, cells, first_cell, right, sums});
  if (given.has_value()) check_dense({*given});
  const int64_t length = cells.size(0), batch = cells.size(1), hidden = cells.size(2);
  lstm_backward(gates.scalar_type(), given.has_value() ? given->const_data_ptr() : nullptr, state.mutable_data_ptr<float>(),
                cell.mutable_data_ptr<float>(), gates.const_data_ptr(), cells.const_data_ptr<float>(),
                first_cell.const_data_ptr<float>(), Blocks(right), sums.mutable_data_ptr<void>(), length, batch, hidden, reverse);
}

}  // namespace amp
