// Products of any size, in tiles of fp32 sums that stay in registers (tiles.h). The right operand is rounded and packed into panels
// of columns, the left one into blocks of rows that stay in the cache, so that rounding costs no more than the packing that a product
// in fp32 does too.
#pragma once

#include <sched.h>
#include <unistd.h>

#include "scratch.h"

namespace amp {

// Where a product goes: rows of n values. `plus`: what is added to each of them, or null. `then`: what is done with rounded results.
struct Result {
  void* data;
  Type type;
  int64_t n;
  const float* plus;
  // Where columns are the pixels of several images, this many each: an image's rows follow each other in memory, and `each` is what
  // is added to each row, or null.
  int64_t pixels = 0, rows = 0;
  const float* each = nullptr;
  Afterwards then = {};
  bool direct() const { return type == at::kFloat && !plus && pixels == 0; }  // as it is added up: no step in between
  void* at(int64_t row, int64_t column) const { return advanced(data, type, row * n + column); }
  Result from(int64_t row) const { return {at(row, 0), type, n, plus, 0, 0, nullptr, then.from(type, row * n)}; }
  void write(float* sums, int64_t stride, int64_t row, int64_t column, int64_t some, int64_t columns) const {
    if (pixels == 0) {
      finish(type, sums, stride, plus ? plus + column : nullptr, at(row, column), n, some, columns);
      if (then.any()) afterwards(type, then.from(type, row * n + column), at(row, column), n, some, columns);
      return;
    }
    if (each) add_to_rows(sums, stride, each + row, some, columns);
    for (int64_t done = 0; done < columns;) {
      const int64_t image = (column + done) / pixels, pixel = (column + done) % pixels, use = std::min(pixels - pixel, columns - done);
      finish(type, sums + done, stride, nullptr, advanced(data, type, (image * rows + row) * pixels + pixel), pixels, some, use);
      done += use;
    }
  }
};

inline Operand operand(const Tensor& x, Type low) {
  const bool turned = x.stride(-1) != 1;
  return {x.const_data_ptr(), turned ? x.stride(-1) : x.stride(-2), turned, x.scalar_type(), low};
}

// Values in fp32, one after the other.
inline std::vector<float> in_fp32(const Tensor& x) {
  const Tensor dense = x.contiguous();
  std::vector<float> values(dense.numel());
  widen(dense.scalar_type(), dense.const_data_ptr(), values.data(), dense.numel());
  return values;
}

// A long sum is added up in parts, in the same ones on every CPU: a part of a panel and of a block of rows fit the cache.
struct Depths {
  int64_t k, each, number;
  explicit Depths(int64_t k) : k(k), each(k), number(1) {
    if (k <= 768) return;
    each = blocks(blocks(k, blocks(k, 512)), 16) * 16;
    number = blocks(k, each);
  }
  int64_t start(int64_t part) const { return part * each; }
  int64_t size(int64_t part) const { return std::min(each, k - part * each); }
};

// How columns are divided into panels, which differ by one vector at most.
struct Panels {
  int64_t columns, vectors, number;
  explicit Panels(int64_t columns, int64_t most = PANEL_VECTORS)
      : columns(columns), vectors(blocks(columns, LANES)), number(blocks(vectors, most)) {}
  int64_t start(int64_t panel) const { return vectors * panel / number * LANES; }
  int64_t width(int64_t panel) const { return start(panel + 1) - start(panel); }
  int64_t values(const Depths& depths) const { return vectors * LANES * depths.k; }
  // Where the part of a panel is in memory: parts follow each other, and in each of them the panels.
  int64_t place(const Depths& depths, int64_t part, int64_t panel) const {
    return depths.start(part) * vectors * LANES + start(panel) * depths.size(part);
  }
};

// Packs a part of a panel; columns that fill its last vector are zeros.
inline void pack_panel(const Operand& b, const Panels& panels, const Depths& depths, int64_t part, int64_t panel, int64_t column,
                       float* packed) {
  const int64_t first = panels.start(panel), width = panels.width(panel), depth = depths.size(part);
  const int64_t there = std::min(width, panels.columns - first);
  float* to = packed + panels.place(depths, part, panel);
  pack(b, depths.start(part), column + first, depth, there, to, width);
  for (int64_t i = 0; there < width && i < depth; ++i) std::fill(to + i * width + there, to + (i + 1) * width, 0.0f);
}

// A right operand, packed as a whole. `most`: vectors of a panel.
class Right {
 public:
  Right(int64_t k, int64_t n, int64_t most = PANEL_VECTORS) : depths_(k), panels_(n, most) {}
  int64_t values() const { return panels_.values(depths_); }
  int64_t width() const { return panels_.vectors * LANES; }  // of a row of results: with the columns that fill the last vector
  void pack(const Operand& b, float* memory) {
    packed_ = memory;
    for (int64_t part = 0; part < depths_.number; ++part) {
      for (int64_t panel = 0; panel < panels_.number; ++panel) pack_panel(b, panels_, depths_, part, panel, 0, memory);
    }
  }
  // c = a @ b, or c += a @ b, with the first k values of each sum, for the panels that hold some of the first `columns`.
  void multiply(const Rows& a, float* c, int64_t step, int64_t rows, int64_t k, int64_t columns, bool adds) const {
    for (int64_t panel = 0; panel < panels_.number && panels_.start(panel) < columns; ++panel) {
      for (int64_t part = 0; part < depths_.number && depths_.start(part) < k; ++part) {
        const int64_t start = depths_.start(part);
        multiply_panel({a.data + start * a.step, a.row, a.step}, packed_ + panels_.place(depths_, part, panel),
                       panels_.width(panel) / LANES, c + panels_.start(panel), step, rows, std::min(depths_.size(part), k - start),
                       part > 0 || adds);
      }
    }
  }

 private:
  Depths depths_;
  Panels panels_;
  float* packed_ = nullptr;
};

inline int64_t cache_values() {
  static const int64_t values = [] {
    const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return (bytes > 0 ? bytes : int64_t(1) << 19) / static_cast<int64_t>(sizeof(float));
  }();
  return values;
}

constexpr int64_t GAP = 16;                         // rows a power of two apart would map to the same cache lines
constexpr int64_t PACKED = (int64_t(1) << 23) / 4;  // fp32 values of panels that are packed at a time
constexpr int64_t SUMMED = int64_t(1) << 15;        // sums of a block of rows that are added up part by part, at a time
constexpr int64_t ALONE = int64_t(1) << 17;         // multiplications that are not worth a second thread

// Some rows of the left operand, packed part by part.
class Block {
 public:
  Block(const Operand& a, const Depths& depths, int64_t first, int64_t rows, bool keeps, float* memory)
      : a_(a), depths_(depths), first_(first), rows_(rows), keeps_(keeps), memory_(memory) {}

  // The memory that a block of so many rows needs; `keeps`: for all parts, and not for one at a time.
  static int64_t values(const Depths& depths, int64_t rows, bool keeps) {
    return (keeps ? depths.number : 1) * rows * (depths.each + GAP);
  }
  void pack_part(int64_t part) const { pack(a_, first_, depths_.start(part), rows_, depths_.size(part), at(part), depths_.each + GAP); }
  // sums = the product with a panel, or += that.
  void multiply(int64_t part, const float* panel, int64_t width, float* sums, int64_t step) const {
    multiply_panel({at(part), depths_.each + GAP, 1}, panel, width / LANES, sums, step, rows_, depths_.size(part), part > 0);
  }

 private:
  float* at(int64_t part) const { return memory_ + (keeps_ ? part * rows_ * (depths_.each + GAP) : 0); }

  const Operand& a_;
  const Depths& depths_;
  int64_t first_, rows_;
  bool keeps_;
  float* memory_;
};

// A product of tiles. `flipped`: `to` is the transpose of the product.
struct Tiled {
  const Operand& a;
  const Panels& panels;
  const Depths& depths;
  const float* packed;
  const Result& to;
  int64_t column;  // of the first panel
  bool flipped;

  void write(float* sums, int64_t step, int64_t row, int64_t first, int64_t rows, int64_t columns) const {
    if (!flipped) return to.write(sums, step, row, first, rows, columns);
    float* turned = scratch(TURNED).take(rows * columns);
    pack(Operand{sums, step, true, at::kFloat, at::kFloat}, 0, 0, columns, rows, turned, rows);
    to.write(turned, rows, first, row, columns, rows);
  }

  // The rows that are worth a block: its part fits the cache, and every thread gets two blocks or more. Rows that fill no
  // tile take almost as long as a tile.
  int64_t height(int64_t m, int64_t threads) const {
    const int64_t most = std::min<int64_t>(std::max(cache_values() / 3 / depths.each / 16, int64_t(2)) * 16, 256);
    const int64_t number = threads == 1 ? blocks(m, most) : blocks(blocks(m, most), 2 * threads) * 2 * threads;
    return blocks(blocks(m, number), TILE_HEIGHT) * TILE_HEIGHT;
  }

  // The product of a block of rows.
  void run(int64_t row, int64_t rows) const {
    // The panels that are added up at a time: all sums of a part follow those of the part before.
    const int64_t wide = PANEL_VECTORS * LANES;
    const int64_t together = depths.number == 1 ? 1 : std::max<int64_t>(SUMMED / rows / wide, 1);
    const bool keeps = together < panels.number;
    const Block block(a, depths, row, rows, keeps, scratch(LEFT).take(Block::values(depths, rows, keeps)));
    for (int64_t panel = 0; panel < panels.number; panel += together) {
      const int64_t last = std::min(panel + together, panels.number), first = panels.start(panel);
      const int64_t width = panels.start(last) - first, columns = std::min(width, panels.columns - first);
      const bool direct = !flipped && to.direct() && columns == width;
      float* sums = direct ? static_cast<float*>(to.at(row, column + first)) : scratch(SUMS).take(rows * width);
      const int64_t step = direct ? to.n : width;
      for (int64_t part = 0; part < depths.number; ++part) {
        if (panel == 0) block.pack_part(part);
        for (int64_t p = panel; p < last; ++p) {
          block.multiply(part, packed + panels.place(depths, part, p), panels.width(p), sums + panels.start(p) - first, step);
        }
      }
      if (!direct) write(sums, step, row, column + first, rows, columns);
    }
  }
};

// a @ b, or its transpose: m rows of a, n columns of b.
inline void multiply_tiled(const Operand& a, const Operand& b, const Result& to, int64_t m, int64_t n, int64_t k, bool flipped) {
  const Depths depths(k);
  const int64_t wide = PANEL_VECTORS * LANES, group = std::max<int64_t>(PACKED / k / wide, 1) * wide;
  const int64_t threads = m * n * k <= ALONE ? 1 : at::get_num_threads();
  for (int64_t start = 0; start < n; start += group) {
    const Panels panels(std::min(group, n - start));
    float* packed = scratch(RIGHT).take(panels.values(depths));
    const Tiled tiled{a, panels, depths, packed, to, start, flipped};
    const int64_t height = tiled.height(m, threads), number = depths.number * panels.number, rows = blocks(m, height);
    // Each thread takes the next panel to pack until there are none, waits for those that others pack, and takes blocks of rows.
    std::atomic<int64_t> next_panel{0}, ready{0}, next_rows{0};
    const auto work = [&](int64_t, int64_t) {
      for (int64_t i; (i = next_panel.fetch_add(1, std::memory_order_relaxed)) < number;) {
        pack_panel(b, panels, depths, i / panels.number, i % panels.number, start, packed);
        ready.fetch_add(1, std::memory_order_release);
      }
      while (ready.load(std::memory_order_acquire) < number) sched_yield();
      for (int64_t i; (i = next_rows.fetch_add(1, std::memory_order_relaxed)) < rows;) {
        tiled.run(i * height, std::min(height, m - i * height));
      }
      for (Use use : {LEFT, SUMS, TURNED}) scratch(use).tidy();  // others may still read the panels
    };
    threads == 1 ? work(0, 1) : at::parallel_for(0, threads, 1, work);
  }
}

}  // namespace amp
