// a @ b + bias: operands rounded to Low, sums in fp32 by torch's own product, one rounding to the result.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "pack.h"
#include "rounding.h"

namespace amp {

using at::Tensor;

// Memory for operands while they are fp32, one buffer per use and thread, kept from call to call: new memory costs more
// than the conversion into it. A buffer larger than KEPT bytes is freed after the call.
constexpr int64_t KEPT = int64_t(1) << 26;

// Bytes of all buffers of all threads.
inline std::atomic<int64_t>& scratch_bytes() {
  static std::atomic<int64_t> bytes{0};
  return bytes;
}

class Scratch {
 public:
  Scratch() = default;
  Scratch(Scratch&& other) noexcept : memory_(std::move(other.memory_)), size_(std::exchange(other.size_, 0)) {}
  ~Scratch() { release(); }

  float* take(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(float)) + 64;
    if (bytes > size_) {
      release();  // free the old buffer before allocating the new one
      memory_.reset(new char[bytes]);
      size_ = bytes;
      scratch_bytes() += size_;
    }
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) & ~uintptr_t(63));
  }
  void tidy() {
    if (size_ > KEPT) release();
  }

 private:
  void release() {
    memory_.reset();
    scratch_bytes() -= std::exchange(size_, 0);
  }

  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

enum Use { LEFT, RIGHT, SUMS, BIAS, USES };

inline Scratch& scratch(Use use) {
  thread_local Scratch pieces[USES];
  return pieces[use];
}

inline void tidy() {
  for (int use = 0; use < USES; ++use) scratch(static_cast<Use>(use)).tidy();
}

template <class Low>
void rounded_stretch(const Tensor& x, int64_t start, int64_t n, float* to) {
  if (x.scalar_type() == at::kFloat) {
    round<Low>(x.const_data_ptr<float>() + start, to, n);
  } else {
    widen(x.const_data_ptr<Low>() + start, to, n);
  }
}

// x as a dense tensor of Low or fp32, with the memory layout of x.
template <class Low>
Tensor readable(const Tensor& x) {
  Tensor dense = x.is_non_overlapping_and_dense() ? x : x.contiguous();
  const bool direct = x.scalar_type() == at::kFloat || x.scalar_type() == c10::CppTypeToScalarType<Low>::value;
  return direct ? dense : dense.to(c10::CppTypeToScalarType<Low>::value);
}

// The values of a dense tensor of Low or fp32, rounded to Low, as fp32, in the order that they have in memory.
template <class Low>
float* rounded_values(Use use, const Tensor& dense) {
  const int64_t n = dense.numel();
  float* to = scratch(use).take(n);
  conversions().add(n * static_cast<int64_t>(sizeof(float)));
  parallel(n, [&](int64_t start, int64_t end) { rounded_stretch<Low>(dense, start, end - start, to + start); });
  return to;
}

// The product of blocks is oneDNN's, as torch exports it (torch 2.13: at::native::cpublas::brgemm, for AVX-512). It
// needs packed blocks, so rounding an operand costs no more than packing it would.
constexpr int64_t ROWS = 64, COLUMNS = 64;             // of a block
constexpr int64_t HELD = int64_t(96) << 10;            // fp32 values of a that are packed at a time: in half an L2
constexpr int64_t PACKED = (int64_t(1) << 23) / 4;     // fp32 values of b that are packed at a time
constexpr int64_t LONGEST = 2048;                      // for longer sums, a block does not fit the cache
constexpr int64_t FEWEST = 32;                         // rows: for fewer, packing b costs more than it saves

inline bool blocks_work() {
#if AMP_LANES == 16
  static const bool work = [] {
    float a[ROWS] = {1.0f}, b[COLUMNS] = {2.0f}, c[1] = {0.0f};
    try {
      at::native::cpublas::brgemm(1, 1, 1, 1, 1, 1, false, a, b, c, false);
    } catch (const std::exception&) {  // a CPU or a build of torch without them
      return false;
    }
    return c[0] == 2.0f;
  }();
  return work;
#else
  return false;
#endif
}

template <class Low>
Operand<Low> operand(const Tensor& x) {
  const bool turned = x.stride(-1) != 1;
  return {x.const_data_ptr(), turned ? x.stride(-1) : x.stride(-2), turned, x.scalar_type() == at::kFloat};
}

// The product of some of the rows, in one thread. As many rows as fit the cache are packed; then each block of columns
// is read once for all of them.
template <class Low, class Out>
void multiply_rows(Operand<Low> a, const float* packed, const float* plus, Out* to, int64_t first, int64_t last, int64_t k,
                   int64_t n, int64_t from_column, int64_t to_column) {
  const int64_t step = k + 16;  // rows a power of two apart would map to the same cache lines
  const int64_t group = std::max<int64_t>(HELD / step / ROWS, 1) * ROWS;
  float* rows = scratch(LEFT).take(std::min(group, last - first) * step);
  alignas(64) float tile[ROWS * COLUMNS];
  for (int64_t start = first; start < last; start += group) {
    const int64_t end = std::min(start + group, last);
    pack<Low>(a, start, 0, end - start, k, rows, step);
    for (int64_t column = from_column; column < to_column; column += COLUMNS) {
      const int64_t width = std::min(COLUMNS, to_column - column);
      const float* block = packed + (column - from_column) * k;
      for (int64_t row = start; row < end; row += ROWS) {
        const int64_t height = std::min(ROWS, end - row);
        Out* out = to + row * n + column;
        const bool direct = std::is_same_v<Out, float> && !plus;
        at::native::cpublas::brgemm(height, width, k, step, COLUMNS, direct ? n : COLUMNS, false, rows + (row - start) * step,
                                    block, direct ? reinterpret_cast<float*>(out) : tile, false);
        for (int64_t r = 0; !direct && r < height; ++r) {
          finish(tile + r * COLUMNS, plus ? plus + column : nullptr, out + r * n, width);
        }
      }
    }
  }
  at::native::cpublas::brgemm_release(false);
}

template <class Low>
void pack_columns(Operand<Low> b, float* packed, int64_t k, int64_t from_column, int64_t to_column) {
  for (int64_t column = from_column; column < to_column; column += COLUMNS) {
    const int64_t width = std::min(COLUMNS, to_column - column);
    pack<Low>(b, 0, column, k, width, packed + (column - from_column) * k, COLUMNS);
  }
}

inline int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

// A few rows times a large matrix: the matrix is read once, rounded in registers, and no copy of it is written. Decoding
// one token at a time spends most of its time here, and the bandwidth of the memory is the limit.
constexpr int64_t A_FEW = 16, A_FEW_SUMS = 8;        // rows, where columns of the matrix are contiguous, and where rows are
constexpr int SUMS_HELD = AMP_LANES == 16 ? 16 : 8;  // in registers: enough to hide the latency of an addition
constexpr int64_t STREAMS = 8;                       // columns that are read at the same time
constexpr int64_t STRIP = 1 << 14;                   // sums that stay in the cache while rows are added to them

// The sums of R rows and C columns, each contiguous in memory as in a linear layer's weight; rows of sums are `step` apart.
template <class Low, int R, int C, class B>
void dot_block(const float* rows, const B* columns, int64_t stride, float* to, int64_t step, int64_t k) {
  float sums[R * C] = {};
  int64_t i = 0;
#if AMP_LANES
  Floats lanes[R * C];
  for (int j = 0; j < R * C; ++j) lanes[j] = zeros();
  for (; i + AMP_LANES <= k; i += AMP_LANES) {
    for (int c = 0; c < C; ++c) {
      const Floats x = load_rounded<Low>(columns + c * stride + i);
      for (int r = 0; r < R; ++r) lanes[r * C + c] = multiply_add(load(rows + r * k + i), x, lanes[r * C + c]);
    }
  }
  for (int j = 0; j < R * C; ++j) sums[j] = total(lanes[j]);
#endif
  for (; i < k; ++i) {
    for (int c = 0; c < C; ++c) {
      const float x = rounded_one<Low>(columns[c * stride + i]);
      for (int r = 0; r < R; ++r) sums[r * C + c] += rows[r * k + i] * x;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) to[r * step + c] = sums[r * C + c];
  }
}

template <class Low, int R, class B>
void dot_group(const float* rows, const B* columns, int64_t stride, float* to, int64_t step, int64_t width, int64_t k) {
  constexpr int C = std::min<int>(SUMS_HELD / R, STREAMS);
  int64_t c = 0;
  for (; c + C <= width; c += C) dot_block<Low, R, C>(rows, columns + c * stride, stride, to + c, step, k);
  for (; c < width; ++c) dot_block<Low, R, 1>(rows, columns + c * stride, stride, to + c, step, k);
}

template <class Low, class B>
void dot_columns(const float* rows, const B* columns, int64_t stride, float* to, int64_t step, int64_t width, int64_t m,
                 int64_t k) {
  int64_t r = 0;
  for (; r + 4 <= m; r += 4) dot_group<Low, 4>(rows + r * k, columns, stride, to + r * step, step, width, k);
  for (; r + 2 <= m; r += 2) dot_group<Low, 2>(rows + r * k, columns, stride, to + r * step, step, width, k);
  for (; r < m; ++r) dot_group<Low, 1>(rows + r * k, columns, stride, to + r * step, step, width, k);
}

template <class Low, class Out, class B>
void dot_rows(const float* rows, Matrix<B> b, const float* plus, Out* to, int64_t m, int64_t first, int64_t last, int64_t k,
              int64_t n) {
  float sums[A_FEW * STREAMS];
  for (int64_t column = first; column < last; column += STREAMS) {
    const int64_t width = std::min(STREAMS, last - column);
    const B* from = b.data + column * b.stride;
    bool done = false;
    if constexpr (std::is_same_v<B, float>) {
      if (m > 4) {  // round the columns once, not for every four rows
        float* held = scratch(RIGHT).take(STREAMS * k);
        for (int64_t c = 0; c < width; ++c) round<Low>(from + c * b.stride, held + c * k, k);
        dot_columns<Exact>(rows, held, k, sums, STREAMS, width, m, k);
        done = true;
      }
    }
    if (!done) dot_columns<Low>(rows, from, b.stride, sums, STREAMS, width, m, k);
    for (int64_t r = 0; r < m; ++r) finish(sums + r * STREAMS, plus ? plus + column : plus, to + r * n + column, width);
  }
}

// The same where the rows of b are contiguous: K of them at a time are added to the sums of a strip of columns.
template <class Low, int K, class B>
void add_rows(const float* a, int64_t step, const B* from, int64_t stride, float* sums, int64_t width, int64_t m) {
  int64_t c = 0;
#if AMP_LANES
  for (; c + AMP_LANES <= width; c += AMP_LANES) {
    Floats x[K];
    for (int i = 0; i < K; ++i) x[i] = load_rounded<Low>(from + i * stride + c);
    for (int64_t r = 0; r < m; ++r) {
      Floats sum = load(sums + r * width + c);
      for (int i = 0; i < K; ++i) sum = multiply_add(fill(a[r * step + i]), x[i], sum);
      store(sums + r * width + c, sum);
    }
  }
#endif
  for (; c < width; ++c) {
    for (int64_t r = 0; r < m; ++r) {
      for (int i = 0; i < K; ++i) sums[r * width + c] += a[r * step + i] * rounded_one<Low>(from[i * stride + c]);
    }
  }
}

template <class Low, class Out, class B>
void add_strip(const float* rows, Matrix<B> b, const float* plus, Out* to, int64_t m, int64_t first, int64_t last, int64_t k,
               int64_t n) {
  const int64_t width = last - first;
  float* sums = scratch(SUMS).take(m * width);
  std::fill(sums, sums + m * width, 0.0f);
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) add_rows<Low, 8>(rows + i, k, b.data + i * b.stride + first, b.stride, sums, width, m);
  for (; i < k; ++i) add_rows<Low, 1>(rows + i, k, b.data + i * b.stride + first, b.stride, sums, width, m);
  for (int64_t r = 0; r < m; ++r) finish(sums + r * width, plus ? plus + first : nullptr, to + r * n + first, width);
}

template <class Low, class Out, class B>
void multiply_few(Operand<Low> a, Matrix<B> b, const float* plus, Out* to, int64_t m, int64_t k, int64_t n) {
  float* rows = scratch(LEFT).take(m * k);
  pack<Low>(a, 0, 0, m, k, rows, k);
  const int64_t unit = b.turned ? STREAMS : std::min(STRIP / m, blocks(blocks(n, at::get_num_threads()), 16) * 16);
  at::parallel_for(0, blocks(n, unit), std::max<int64_t>(GRAIN / k / unit, 1), [&](int64_t i, int64_t j) {
    if (b.turned) {
      dot_rows<Low>(rows, b, plus, to, m, i * unit, std::min(j * unit, n), k, n);
    } else {
      for (; i < j; ++i) add_strip<Low>(rows, b, plus, to, m, i * unit, std::min((i + 1) * unit, n), k, n);
    }
  });
}

// More rows, and sums too long for packed blocks, or a CPU without them: a part of b at a time is rounded into memory that
// stays in the cache, and multiplied by torch's own product. b is read from memory once, and is half as many bytes as in
// fp32 if it is low. A part is some columns, or, where rows are contiguous, some rows, whose products are added up in fp32.
constexpr int64_t PANEL_ROWS = 1024;          // of a that are rounded at a time
constexpr int64_t PANEL = 256;                // columns of b
constexpr int64_t PANEL_VALUES = 1 << 18;     // of b, if it is taken by rows
constexpr int64_t BY_ROWS = 256;              // rows of a: for more, adding up the sums costs more than packing columns

template <class Low>
Tensor column_panel(Operand<Low> b, int64_t first, int64_t width, int64_t k) {
  float* panel = scratch(RIGHT).take(width * k);
  if (b.turned) {
    pack<Low>(Operand<Low>{b.data, b.stride, false, b.wide}, first, 0, width, k, panel, k);
    return at::from_blob(panel, {k, width}, {1, k}, at::kFloat);
  }
  pack<Low>(b, 0, first, k, width, panel, width);
  return at::from_blob(panel, {k, width}, at::kFloat);
}

// The product of all rows with some columns, in one thread.
template <class Low, class Out>
void multiply_panel(const Tensor& left, Operand<Low> b, const float* plus, Out* to, int64_t first, int64_t width, int64_t n) {
  const int64_t m = left.size(0), k = left.size(1);
  const bool direct = std::is_same_v<Out, float> && !plus;
  float* sums = direct ? reinterpret_cast<float*>(to) + first : scratch(SUMS).take(m * width);
  Tensor sum = at::from_blob(sums, {m, width}, {direct ? n : width, 1}, at::kFloat);
  if (b.turned || m > BY_ROWS) {
    at::mm_out(sum, left, column_panel<Low>(b, first, width, k));
  } else {
    const int64_t step = std::max<int64_t>(PANEL_VALUES / width / 8, 1) * 8;
    float* panel = scratch(RIGHT).take(std::min(step, k) * width);
    for (int64_t i = 0; i < k; i += step) {
      const int64_t depth = std::min(step, k - i);
      pack<Low>(b, i, first, depth, width, panel, width);
      const Tensor right = at::from_blob(panel, {depth, width}, at::kFloat), part = left.narrow(1, i, depth);
      i == 0 ? at::mm_out(sum, part, right) : at::addmm_out(sum, sum, part, right);
    }
  }
  for (int64_t r = 0; !direct && r < m; ++r) {
    finish(sums + r * width, plus ? plus + first : nullptr, to + r * n + first, width);
  }
}

template <class Low, class Out>
void multiply_panels(Operand<Low> a, Operand<Low> b, const float* plus, Out* to, int64_t m, int64_t k, int64_t n) {
  const int64_t share = blocks(blocks(n, at::get_num_threads()), 16) * 16;  // columns of a thread
  const int64_t columns = b.turned || m > BY_ROWS ? std::min(PANEL, share) : share;
  for (int64_t start = 0; start < m; start += PANEL_ROWS) {
    const int64_t height = std::min(PANEL_ROWS, m - start);
    float* rows = scratch(LEFT).take(height * k);
    const Operand<Low> lines{a.data, a.stride, false, a.wide};  // as they are in memory: torch's product takes either order
    if (a.turned) {
      at::parallel_for(0, k, std::max<int64_t>(GRAIN / height, 1), [&](int64_t i, int64_t j) {
        pack<Low>(lines, i, start, j - i, height, rows + i * height, height);
      });
    } else {
      at::parallel_for(0, height, std::max<int64_t>(GRAIN / k, 1), [&](int64_t i, int64_t j) {
        pack<Low>(lines, start + i, 0, j - i, k, rows + i * k, k);
      });
    }
    at::parallel_for(0, blocks(n, columns), 1, [&](int64_t i, int64_t j) {
      const Tensor left = a.turned ? at::from_blob(rows, {height, k}, {1, height}, at::kFloat)
                                   : at::from_blob(rows, {height, k}, at::kFloat);
      for (int64_t first = i * columns; first < std::min(j * columns, n); first += columns) {
        multiply_panel<Low>(left, b, plus, to + start * n, first, std::min(columns, n - first), n);
      }
      tidy();
    });
  }
}

template <class Low, class Out>
void multiply(Operand<Low> a, Operand<Low> b, const float* plus, Out* to, int64_t m, int64_t k, int64_t n) {
  if (m <= (b.turned ? A_FEW : A_FEW_SUMS)) {
    if (b.wide) {
      const Matrix<float> right{static_cast<const float*>(b.data), b.stride, b.turned};
      return multiply_few<Low, Out>(a, right, plus, to, m, k, n);
    }
    const Matrix<Low> right{static_cast<const Low*>(b.data), b.stride, b.turned};
    return multiply_few<Low, Out>(a, right, plus, to, m, k, n);
  }
  if (m < FEWEST || k > LONGEST || !blocks_work()) return multiply_panels<Low, Out>(a, b, plus, to, m, k, n);
  const int64_t group = std::max<int64_t>(PACKED / k / COLUMNS, 1) * COLUMNS;
  const int64_t threads = at::get_num_threads();
  const int64_t share = blocks(blocks(m, threads), 16) * 16;  // rows of a thread
  for (int64_t start = 0; start < n; start += group) {
    const int64_t end = std::min(start + group, n);
    float* packed = scratch(RIGHT).take(blocks(end - start, COLUMNS) * COLUMNS * k);
    at::parallel_for(0, blocks(end - start, COLUMNS), std::max<int64_t>(GRAIN / k / COLUMNS, 1), [&](int64_t i, int64_t j) {
      const int64_t first = start + i * COLUMNS, last = std::min(start + j * COLUMNS, end);
      pack_columns<Low>(b, packed + (first - start) * k, k, first, last);
    });
    at::parallel_for(0, blocks(m, share), 1, [&](int64_t i, int64_t j) {
      multiply_rows<Low, Out>(a, packed, plus, to, i * share, std::min(j * share, m), k, n, start, end);
      tidy();
    });
  }
}

// x in Low or fp32, with contiguous elements in one of the last two dimensions.
template <class Low>
Tensor in_lines(const Tensor& x) {
  const bool direct = x.scalar_type() == at::kFloat || x.scalar_type() == c10::CppTypeToScalarType<Low>::value;
  const Tensor known = direct ? x : x.to(c10::CppTypeToScalarType<Low>::value);
  return known.stride(-1) == 1 || known.stride(-2) == 1 ? known : known.contiguous();
}

// The products of a batch: see batched.h.
template <class Low, class Out>
void multiply_batch(const Tensor& left, const Tensor& right, const float* plus, Out* to);

template <class Low, class Out>
Tensor cast_matmul(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  if (a.dim() == 3 && b.stride(0) == 0) {  // one matrix for the whole batch: torch's `linear` of turned inputs
    const Tensor rows = a.reshape({a.size(0) * a.size(1), a.size(2)});
    return cast_matmul<Low, Out>(rows, b.select(0, 0), bias).view({a.size(0), a.size(1), b.size(2)});
  }
  const float* plus = bias.has_value() ? rounded_values<Low>(BIAS, readable<Low>(bias->contiguous())) : nullptr;
  const int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  const bool batched = a.dim() == 3;
  const auto outs = a.options().dtype(c10::CppTypeToScalarType<Out>::value);
  Tensor result = batched ? at::empty({a.size(0), m, n}, outs) : at::empty({m, n}, outs);
  Out* to = result.template mutable_data_ptr<Out>();
  if (k == 0) {
    for (int64_t i = 0; i < result.numel(); ++i) to[i] = static_cast<Out>(plus ? plus[i % n] : 0.0f);
  } else if (result.numel() > 0) {
    const Tensor left = in_lines<Low>(a), right = in_lines<Low>(b);
    if (batched) {
      multiply_batch<Low, Out>(left, right, plus, to);
    } else {
      multiply<Low, Out>(operand<Low>(left), operand<Low>(right), plus, to, m, k, n);
    }
  }
  tidy();
  return result;
}

inline Tensor cast_matmul_cpu(
    const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, at::ScalarType dtype, at::ScalarType out) {
  TORCH_CHECK(a.dim() == b.dim() && (a.dim() == 2 || a.dim() == 3) && a.size(-1) == b.size(-2) &&
                  (a.dim() == 2 || a.size(0) == b.size(0)),
              "cast_matmul: ", a.sizes(), " times ", b.sizes());
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "cast_matmul rounds to float16 or bfloat16, not ", dtype);
  TORCH_CHECK(out == dtype || out == at::kFloat, "cast_matmul gives ", dtype, " or float32, not ", out);
  TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == b.size(-1)), "cast_matmul: the bias is ",
              bias.has_value() ? bias->sizes() : a.sizes(), " for ", b.size(-1), " columns");
  if (dtype == at::kHalf) {
    return out == at::kFloat ? cast_matmul<c10::Half, float>(a, b, bias) : cast_matmul<c10::Half, c10::Half>(a, b, bias);
  }
  return out == at::kFloat ? cast_matmul<c10::BFloat16, float>(a, b, bias)
                           : cast_matmul<c10::BFloat16, c10::BFloat16>(a, b, bias);
}

}  // namespace amp
