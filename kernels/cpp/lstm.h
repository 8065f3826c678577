// An LSTM layer, forward, and the steps of its backward: see ../lstm.py for their definition. The rows of a batch are
// independent, so each thread takes some of them through all steps, and no thread waits for another.
#pragma once

#include "batched.h"

namespace amp {

// Writes a row of results to memory in their dtype, and reads the rounded values back into `row` for the next product.
inline void keep(float* row, Type type, void* to, int64_t n) {
  finish(type, row, to, n);
  if (type != at::kFloat) widen(type, to, row, n);
}

// Where the steps of a layer go: `gates` (in fp32: the inputs' part of the sums at first) and `cells` of all steps if they are kept.
struct Steps {
  int64_t length, batch, hidden;
  bool reverse;
  Type type;
  float* gates;
  void* out;
  float* cells;      // or null
  void* low_gates;   // or null
  float* last_cell;  // of the last step
  int64_t place(int64_t step) const { return (reverse ? length - 1 - step : step) * batch * hidden; }
};

// The weights of the steps' products, all rows of a batch by the matrix `weight`: packed in fp32, for the rows of each thread. Where
// rows are few and the matrix is large, reading it takes the time: it is read as it is, and all threads share each step.
class StepWeights {
 public:
  StepWeights(const Operand& weight, int64_t batch, int64_t k, int64_t n)
      : weight_(weight), k_(k), n_(n), few_(batch <= FEW && k * n >= MANY && weight.low != at::kFloat), right_(k, n, vectors(batch)) {
    if (!few_) right_.pack(weight, scratch(RIGHT).take(right_.values()));
  }
  int64_t width() const { return few_ ? n_ : right_.width(); }  // of a row of sums
  void multiply(const float* rows, float* sums, int64_t number) const {
    if (!few_) return right_.multiply({rows, k_, 1}, sums, width(), number, k_, n_, false);
    const Result to{sums, at::kFloat, n_, nullptr};
    multiply_few({rows, k_, false, at::kFloat, at::kFloat}, weight_, to, number, k_);
  }
  // Runs f(first, last) for all rows, side by side.
  template <class F>
  void for_rows(int64_t batch, const F& f) const {
    few_ ? f(0, batch) : at::parallel_for(0, batch, 1, f);
  }

 private:
  static constexpr int64_t FEW = 4, MANY = int64_t(1) << 18;
  Operand weight_;
  int64_t k_, n_;
  bool few_;
  Right right_;

  // Narrow panels take eight rows at a time, wide ones six (tiles.h): a thread's last rows are to fill a tile.
  static int64_t vectors(int64_t batch) {
    const int64_t rows = blocks(batch, at::get_num_threads());
    return PANEL_VECTORS == 4 && blocks(rows, 8) < blocks(rows, TILE_HEIGHT) ? 3 : PANEL_VECTORS;
  }
};

// All steps of some rows.
inline void lstm_rows(const Steps& s, const StepWeights& weight, const float* state, const float* cell, int64_t first, int64_t last) {
  const int64_t rows = last - first, hidden = s.hidden, width = weight.width(), values = rows * hidden;
  std::vector<float> held(state + first * hidden, state + last * hidden), sums(rows * width), spare(s.cells ? 0 : 2 * values);
  const float* before = cell + first * hidden;
  for (int64_t step = 0; step < s.length; ++step) {
    const int64_t at = s.place(step) + first * hidden;
    float* now = s.cells ? s.cells + at : spare.data() + step % 2 * values;
    weight.multiply(held.data(), sums.data(), rows);
    for (int64_t r = 0; r < rows; ++r) {
      float *h = held.data() + r * hidden, *gates = s.gates + 4 * (at + r * hidden);
      lstm_step(gates, sums.data() + r * width, before + r * hidden, now + r * hidden, h, hidden, s.cells != nullptr);
      keep(h, s.type, advanced(s.out, s.type, at + r * hidden), hidden);
    }
    if (s.low_gates) finish(s.type, s.gates + 4 * at, advanced(s.low_gates, s.type, 4 * at), 4 * values);
    before = now;
  }
  std::copy(before, before + values, s.last_cell + first * hidden);
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> lstm_layer_cpu(const Tensor& x, const Tensor& h, const Tensor& c,
                                                                         const Tensor& w_ih, const Tensor& w_hh,
                                                                         const std::optional<Tensor>& b_ih,
                                                                         const std::optional<Tensor>& b_hh, bool reverse,
                                                                         bool keeps) {
  const Type type = x.scalar_type();
  const auto check = [](const Tensor& one) {
    TORCH_CHECK(one.scalar_type() != Type::Other && one.is_cpu(), "an LSTM layer is for float32, float16 and bfloat16 on a CPU");
  };
  for (const Tensor* one : {&x, &h, &c, &w_ih, &w_hh}) check(*one);
  const int64_t length = x.size(0), batch = x.size(1), hidden = w_hh.size(1);
  std::vector<float> plus;
  for (const std::optional<Tensor>& bias : {b_ih, b_hh}) {
    if (!bias) continue;
    check(*bias);
    const std::vector<float> more = in_fp32(*bias);
    if (plus.empty()) plus.resize(more.size());
    for (size_t i = 0; i < more.size(); ++i) plus[i] += more[i];
  }
  const Tensor gates = at::empty({length, batch, 4 * hidden}, at::kFloat), out = at::empty({length, batch, hidden}, type);
  const Tensor cells = keeps ? at::empty({length, batch, hidden}, at::kFloat) : at::empty({0}, at::kFloat);
  const bool rounds = keeps && type != at::kFloat;
  const Tensor low_gates = rounds ? at::empty(gates.sizes(), type) : gates;
  const Tensor state = at::empty({batch, hidden}, type), cell = at::empty({batch, hidden}, type);
  const std::vector<float> first_state = in_fp32(h), first_cell = in_fp32(c);
  std::vector<float> last_cell(first_cell.begin(), first_cell.end());  // a copy would need a newer C++ library: see test_build.py
  if (length * batch * hidden > 0) {
    const Tensor rows = in_lines(x.reshape({length * batch, x.size(2)}), type), weight = in_lines(w_ih, type);
    const Result to{gates.mutable_data_ptr<void>(), at::kFloat, 4 * hidden, plus.empty() ? nullptr : plus.data()};
    multiply(operand(rows, type), transposed(operand(weight, type)), to, length * batch, x.size(2));
    const Tensor turned = in_lines(w_hh, type);
    const StepWeights weights(transposed(operand(turned, type)), batch, hidden, 4 * hidden);
    const Steps steps{length, batch, hidden, reverse, type, gates.mutable_data_ptr<float>(), out.mutable_data_ptr<void>(),
                      keeps ? cells.mutable_data_ptr<float>() : nullptr, rounds ? low_gates.mutable_data_ptr<void>() : nullptr,
                      last_cell.data()};
    weights.for_rows(batch, [&](int64_t i, int64_t end) {
      lstm_rows(steps, weights, first_state.data(), first_cell.data(), i, end);
    });
    tidy();
    const void* last = advanced(out.const_data_ptr(), type, steps.place(length - 1));
    std::copy(static_cast<const char*>(last), static_cast<const char*>(last) + batch * hidden * bytes_of(type),
              state.mutable_data_ptr<char>());
  } else {
    finish(type, first_state.data(), state.mutable_data_ptr<void>(), batch * hidden);
  }
  finish(type, last_cell.data(), cell.mutable_data_ptr<void>(), batch * hidden);
  return {out, state, cell, keeps ? low_gates : at::empty({0}, type), cells};
}

// At the start, `state` and `cell` are the gradients of the last step's values; at the end, those of the first step's.
inline void lstm_backward(Type type, const void* given, float* state, float* cell, const void* gates, const float* cells,
                          const float* first_cell, const StepWeights& weight, void* sums, int64_t length, int64_t batch,
                          int64_t hidden, bool reverse) {
  weight.for_rows(batch, [&](int64_t first, int64_t last) {
    const int64_t rows = last - first, width = weight.width();
    std::vector<float> gate(4 * hidden), above(hidden), grown(rows * 4 * hidden), below(rows * width);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy(state + (first + r) * hidden, state + (first + r + 1) * hidden, below.data() + r * width);
    }
    for (int64_t step = length - 1; step >= 0; --step) {
      const auto place = [&](int64_t s) { return ((reverse ? length - 1 - s : s) * batch + first) * hidden; };
      const int64_t at = place(step);
      const float* before = step == 0 ? first_cell + first * hidden : cells + place(step - 1);
      for (int64_t r = 0; r < rows; ++r) {
        widen(type, advanced(gates, type, 4 * (at + r * hidden)), gate.data(), 4 * hidden);
        if (given) widen(type, advanced(given, type, at + r * hidden), above.data(), hidden);
        float* to = grown.data() + r * 4 * hidden;
        lstm_step_backward(gate.data(), cells + at + r * hidden, before + r * hidden, above.data(), below.data() + r * width,
                           cell + (first + r) * hidden, to, hidden);
        keep(to, type, advanced(sums, type, 4 * (at + r * hidden)), 4 * hidden);
      }
      weight.multiply(grown.data(), below.data(), rows);
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::copy(below.data() + r * width, below.data() + r * width + hidden, state + (first + r) * hidden);
    }
  });
}

inline void check_dense(std::initializer_list<Tensor> tensors) {
  for (const Tensor& x : tensors) TORCH_CHECK(x.is_contiguous() && x.is_cpu(), "the steps of an LSTM want dense CPU tensors");
}

inline void lstm_backward_cpu(const std::optional<Tensor>& given, Tensor state, Tensor cell, const Tensor& gates, const Tensor& cells,
                              const Tensor& first_cell, const Tensor& w_hh, Tensor sums, bool reverse) {
  check_dense({state, cell, gates, cells, first_cell, sums});
  if (given.has_value()) check_dense({*given});
  const int64_t length = cells.size(0), batch = cells.size(1), hidden = cells.size(2);
  const Type type = gates.scalar_type();
  const Tensor dense = in_lines(w_hh, type);
  const StepWeights weight(operand(dense, type), batch, 4 * hidden, hidden);
  lstm_backward(type, given.has_value() ? given->const_data_ptr() : nullptr, state.mutable_data_ptr<float>(),
                cell.mutable_data_ptr<float>(), gates.const_data_ptr(), cells.const_data_ptr<float>(),
                first_cell.const_data_ptr<float>(), weight, sums.mutable_data_ptr<void>(), length, batch, hidden, reverse);
  tidy();
}

}  // namespace amp
