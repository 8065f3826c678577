// a @ b + bias: operands rounded to a low-precision dtype, sums in fp32 by torch's own product, one rounding to the result.
#pragma once

#include "scratch.h"

namespace amp {

// The product of blocks is oneDNN's, as torch exports it (torch 2.13: at::native::cpublas::brgemm, for AVX-512). It
// needs packed blocks, so rounding an operand costs no more than packing it would.
constexpr int64_t ROWS = 64;                           // of a block
constexpr int64_t HELD = int64_t(96) << 10;            // fp32 values of a that are packed at a time: in half an L2
constexpr int64_t PACKED = (int64_t(1) << 23) / 4;     // fp32 values of b that are packed at a time
constexpr int64_t LONGEST = 2048;                      // for longer sums, a block does not fit the cache
constexpr int64_t FEWEST = 32;                         // rows: for fewer, packing b costs more than it saves

inline bool blocks_work() {
#if defined(__AVX512F__)
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

inline Operand operand(const Tensor& x, Type low) {
  const bool turned = x.stride(-1) != 1;
  return {x.const_data_ptr(), turned ? x.stride(-1) : x.stride(-2), turned, x.scalar_type(), low};
}

// Where a product goes: rows of n values. `plus`: what is added to each of them, or null.
struct Result {
  void* data;
  Type type;
  int64_t n;
  const float* plus;
  bool direct() const { return type == at::kFloat && !plus; }  // as it is added up: no step in between
  void* at(int64_t row, int64_t column) const { return advanced(data, type, row * n + column); }
  Result from(int64_t row) const { return {at(row, 0), type, n, plus}; }
  void write(const float* sums, int64_t stride, int64_t row, int64_t column, int64_t rows, int64_t columns) const {
    finish(type, sums, stride, plus ? plus + column : nullptr, at(row, column), n, rows, columns);
  }
};

// The product of some of the rows, in one thread. As many rows as fit the cache are packed; then each block of columns
// is read once for all of them.
inline void multiply_rows(const Operand& a, const float* packed, const Result& to, int64_t first, int64_t last, int64_t k,
                          int64_t from_column, int64_t to_column) {
  const int64_t step = k + 16;  // rows a power of two apart would map to the same cache lines
  const int64_t group = std::max<int64_t>(HELD / step / ROWS, 1) * ROWS;
  float* rows = scratch(LEFT).take(std::min(group, last - first) * step);
  const bool direct = to.direct();
  alignas(64) float tile[ROWS * COLUMNS];
  for (int64_t start = first; start < last; start += group) {
    const int64_t end = std::min(start + group, last);
    pack(a, start, 0, end - start, k, rows, step);
    for (int64_t column = from_column; column < to_column; column += COLUMNS) {
      const int64_t width = std::min(COLUMNS, to_column - column);
      const float* block = packed + (column - from_column) * k;
      for (int64_t row = start; row < end; row += ROWS) {
        const int64_t height = std::min(ROWS, end - row);
        float* sums = direct ? static_cast<float*>(to.at(row, column)) : tile;
        at::native::cpublas::brgemm(height, width, k, step, COLUMNS, direct ? to.n : COLUMNS, false,
                                    rows + (row - start) * step, block, sums, false);
        if (!direct) to.write(tile, COLUMNS, row, column, height, width);
      }
    }
  }
  at::native::cpublas::brgemm_release(false);
}

inline void pack_columns(const Operand& b, float* packed, int64_t k, int64_t from_column, int64_t to_column) {
  for (int64_t column = from_column; column < to_column; column += COLUMNS) {
    const int64_t width = std::min(COLUMNS, to_column - column);
    pack(b, 0, column, k, width, packed + (column - from_column) * k, COLUMNS);
  }
}

// A few rows times a large matrix: the matrix is read once, rounded in registers, and no copy of it is written. Decoding
// one token at a time spends most of its time here, and the bandwidth of the memory is the limit.
constexpr int64_t A_FEW = 16, A_FEW_SUMS = 8;  // rows, where columns of the matrix are contiguous, and where rows are
constexpr int64_t STRIP = 1 << 14;             // sums that stay in the cache while rows are added to them

inline void dot_rows(const float* rows, const Operand& b, const Result& to, int64_t m, int64_t first, int64_t last, int64_t k) {
  float sums[A_FEW * STREAMS];
  for (int64_t column = first; column < last; column += STREAMS) {
    const int64_t width = std::min(STREAMS, last - column);
    if (b.type == at::kFloat && m > 4) {  // round the columns once, not for every four rows
      float* held = scratch(RIGHT).take(STREAMS * k);
      pack(Operand{b.data, b.stride, false, b.type, b.low}, column, 0, width, k, held, k);
      dot_columns(rows, Operand{held, k, true, at::kFloat, at::kFloat}, 0, sums, STREAMS, width, m, k);
    } else {
      dot_columns(rows, b, column, sums, STREAMS, width, m, k);
    }
    to.write(sums, STREAMS, 0, column, m, width);
  }
}

// The same where the rows of b are contiguous: they are added to the sums of a strip of columns.
inline void add_strip(const float* rows, const Operand& b, const Result& to, int64_t m, int64_t first, int64_t last, int64_t k) {
  const int64_t width = last - first;
  float* sums = scratch(SUMS).take(m * width);
  std::fill(sums, sums + m * width, 0.0f);
  add_rows(rows, b, first, sums, width, m, k);
  to.write(sums, width, 0, first, m, width);
}

inline void multiply_few(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t k) {
  const int64_t n = to.n;
  float* rows = scratch(LEFT).take(m * k);
  pack(a, 0, 0, m, k, rows, k);
  const int64_t unit = b.turned ? STREAMS : std::min(STRIP / m, blocks(blocks(n, at::get_num_threads()), 16) * 16);
  at::parallel_for(0, blocks(n, unit), std::max<int64_t>(GRAIN / k / unit, 1), [&](int64_t i, int64_t j) {
    if (b.turned) {
      dot_rows(rows, b, to, m, i * unit, std::min(j * unit, n), k);
    } else {
      for (; i < j; ++i) add_strip(rows, b, to, m, i * unit, std::min((i + 1) * unit, n), k);
    }
  });
}

// More rows, and sums too long for packed blocks, or a CPU without them: a part of b at a time is rounded into memory that
// stays in the cache, and multiplied by torch's own product. b is read from memory once, and is half as many bytes as in
// fp32 if it is low. A part is some columns, or, where rows are contiguous, some rows, whose products are added up in fp32.
constexpr int64_t PANEL_ROWS = 1024;          // of a that are rounded at a time
constexpr int64_t PANEL = 256;                // columns of b
constexpr int64_t PANEL_VALUES = 1 << 18;     // of b, if it is taken by rows
constexpr int64_t DIRECT_VALUES = 1 << 22;    // of a, if sums are the result: 16 MB
constexpr int64_t BY_ROWS = 256;              // rows of a: for more, adding up the sums costs more than packing columns

inline Tensor column_panel(const Operand& b, int64_t first, int64_t width, int64_t k) {
  float* panel = scratch(RIGHT).take(width * k);
  if (b.turned) {
    pack(Operand{b.data, b.stride, false, b.type, b.low}, first, 0, width, k, panel, k);
    return at::from_blob(panel, {k, width}, {1, k}, at::kFloat);
  }
  pack(b, 0, first, k, width, panel, width);
  return at::from_blob(panel, {k, width}, at::kFloat);
}

// The product of all rows with some columns, in one thread.
inline void multiply_panel(const Tensor& left, const Operand& b, const Result& to, int64_t first, int64_t width) {
  const int64_t m = left.size(0), k = left.size(1);
  const bool direct = to.direct();
  float* sums = direct ? static_cast<float*>(to.at(0, first)) : scratch(SUMS).take(m * width);
  Tensor sum = at::from_blob(sums, {m, width}, {direct ? to.n : width, 1}, at::kFloat);
  if (b.turned || m > BY_ROWS) {
    at::mm_out(sum, left, column_panel(b, first, width, k));
  } else {
    const int64_t step = std::max<int64_t>(PANEL_VALUES / width / 8, 1) * 8;
    float* panel = scratch(RIGHT).take(std::min(step, k) * width);
    for (int64_t i = 0; i < k; i += step) {
      const int64_t depth = std::min(step, k - i);
      pack(b, i, first, depth, width, panel, width);
      const Tensor right = at::from_blob(panel, {depth, width}, at::kFloat), part = left.narrow(1, i, depth);
      i == 0 ? at::mm_out(sum, part, right) : at::addmm_out(sum, sum, part, right);
    }
  }
  if (!direct) to.write(sums, width, 0, first, m, width);
}

inline void multiply_panels(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t k) {
  const int64_t n = to.n;
  const int64_t share = blocks(blocks(n, at::get_num_threads()), 16) * 16;  // columns of a thread
  // Sums that are the result need no memory of their own, so parts of both operands can be larger: torch's product packs each of
  // them once per pair.
  const int64_t most = to.direct() ? std::max(PANEL, std::min(4 * PANEL, DIRECT_VALUES / 2 / k)) : PANEL;
  const int64_t columns = b.turned || m > BY_ROWS ? std::min(most, share) : share;
  const int64_t tall = to.direct() ? std::max(PANEL_ROWS, DIRECT_VALUES / k) : PANEL_ROWS;
  for (int64_t start = 0; start < m; start += tall) {
    const int64_t height = std::min(tall, m - start);
    float* rows = scratch(LEFT).take(height * k);
    // Lines as they are in memory: torch's product takes either order.
    const Operand lines{a.data, a.stride, false, a.type, a.low};
    const int64_t number = a.turned ? k : height, length = a.turned ? height : k;
    at::parallel_for(0, number, std::max<int64_t>(GRAIN / length, 1), [&](int64_t i, int64_t j) {
      a.turned ? pack(lines, i, start, j - i, length, rows + i * length, length)
               : pack(lines, start + i, 0, j - i, length, rows + i * length, length);
    });
    at::parallel_for(0, blocks(n, columns), 1, [&](int64_t i, int64_t j) {
      const Tensor left = a.turned ? at::from_blob(rows, {height, k}, {1, height}, at::kFloat)
                                   : at::from_blob(rows, {height, k}, at::kFloat);
      for (int64_t first = i * columns; first < std::min(j * columns, n); first += columns) {
        multiply_panel(left, b, to.from(start), first, std::min(columns, n - first));
      }
      tidy();
    });
  }
}

// Packed blocks: see above.
inline void multiply_blocks(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t k) {
  const int64_t n = to.n, group = std::max<int64_t>(PACKED / k / COLUMNS, 1) * COLUMNS;
  const int64_t share = blocks(blocks(m, at::get_num_threads()), 16) * 16;  // rows of a thread
  for (int64_t start = 0; start < n; start += group) {
    const int64_t end = std::min(start + group, n);
    float* packed = scratch(RIGHT).take(blocks(end - start, COLUMNS) * COLUMNS * k);
    at::parallel_for(0, blocks(end - start, COLUMNS), std::max<int64_t>(GRAIN / k / COLUMNS, 1), [&](int64_t i, int64_t j) {
      const int64_t first = start + i * COLUMNS, last = std::min(start + j * COLUMNS, end);
      pack_columns(b, packed + (first - start) * k, k, first, last);
    });
    at::parallel_for(0, blocks(m, share), 1, [&](int64_t i, int64_t j) {
      multiply_rows(a, packed, to, i * share, std::min(j * share, m), k, start, end);
      tidy();
    });
  }
}

inline void multiply(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t k) {
  if (m <= (b.turned ? A_FEW : A_FEW_SUMS)) return multiply_few(a, b, to, m, k);
  m < FEWEST || k > LONGEST || !blocks_work() ? multiply_panels(a, b, to, m, k) : multiply_blocks(a, b, to, m, k);
}

}  // namespace amp
