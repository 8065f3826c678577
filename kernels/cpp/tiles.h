// The product of fp32 tiles: a few rows times a panel of columns, with all sums in registers: see loops.h.
#pragma once

#include "loops.h"
#include "rounding.h"

namespace amp {

// A panel is larger than the first cache: this many rows before it is read, the start of a row is fetched, and the processor goes on.
constexpr int64_t AHEAD = 4;

// c = a @ panel, or c += a @ panel, for R rows and a panel of C vectors. A sum is added up in the order of k, whatever R and C are
// and however wide a vector is, so a result does not depend on the size of the product that it is a part of.
//
// Where the operands of a tile are. Packed: the next row of the panel follows in memory, rows of a are a step apart.
struct Straight {
  int64_t row, step, width;
  const float* left(const float* a, int64_t r, int64_t i) const { return a + r * row + i * step; }
  const float* right(const float* b, int64_t i) const { return b + i * width; }
  void ahead(const float* from) const { __builtin_prefetch(from + AHEAD * width, 0, 3); }
};
// The right operand's rows are anywhere, as those of a convolution.
struct RightPlaced {
  int64_t row;
  const int32_t* places;
  const float* left(const float* a, int64_t r, int64_t i) const { return a + r * row + i; }
  const float* right(const float* b, int64_t i) const { return b + places[i]; }
  void ahead(const float*) const {}
};
// The left operand's rows are anywhere.
struct LeftPlaced {
  const int32_t* places;
  int64_t width;
  const float* left(const float* a, int64_t r, int64_t i) const { return a + places[r] + i; }
  const float* right(const float* b, int64_t i) const { return b + i * width; }
  void ahead(const float*) const {}
};

#if AMP_LANES
template <int R, int C, class At>
void multiply_tile(const At at, const float* a, const float* b, float* c, int64_t step, int64_t k, bool adds) {
  Floats sums[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) sums[r][j] = zeros();
  }
  for (int64_t i = 0; i < k; ++i) {
    const float* from = at.right(b, i);
    Floats x[C];
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) x[j] = load(from + j * LANES);
    at.ahead(from);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Floats y = fill(*at.left(a, r, i));
#pragma GCC unroll 16
      for (int j = 0; j < C; ++j) sums[r][j] = multiply_add(y, x[j], sums[r][j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) {
      float* to = c + r * step + j * LANES;
      store(to, adds ? add(load(to), sums[r][j]) : sums[r][j]);
    }
  }
}
#else
template <int R, int C, class At>
void multiply_tile(const At at, const float* a, const float* b, float* c, int64_t step, int64_t k, bool adds) {
  float sums[R][C * LANES] = {};
  for (int64_t i = 0; i < k; ++i) {
    const float* from = at.right(b, i);
    for (int r = 0; r < R; ++r) {
      const float y = *at.left(a, r, i);
      for (int j = 0; j < C * LANES; ++j) sums[r][j] += y * from[j];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C * LANES; ++j) c[r * step + j] = adds ? c[r * step + j] + sums[r][j] : sums[r][j];
  }
}
#endif

// With C vectors: as many sums as there are registers, less a few.
template <int C>
constexpr int TILE_ROWS = AMP_LANES != 16 ? 4 : C == 4 ? 6 : 8;

// All rows: R at a time as long as there are enough, and then the rest in smaller tiles. `at(r)`: where the operands of the rows
// from r on are; `a(r)`: the left one.
template <int R, int C, class At, class Left>
void multiply_rows(const At& at, const Left& left, const float* b, float* c, int64_t step, int64_t from, int64_t rows, int64_t k,
                   bool adds) {
  for (; from + R <= rows; from += R) multiply_tile<R, C>(at(from), left(from), b, c + from * step, step, k, adds);
  if constexpr (R > 1) multiply_rows<(R > 4 ? 4 : R / 2), C>(at, left, b, c, step, from, rows, k, adds);
}

template <int C>
void multiply_packed(const Rows& a, const float* panel, float* c, int64_t step, int64_t rows, int64_t k, bool adds) {
  const Straight at{a.row, a.step, C * LANES};
  multiply_rows<TILE_ROWS<C>, C>([&](int64_t) { return at; }, [&](int64_t r) { return a.data + r * a.row; }, panel, c, step, 0, rows, k,
                                 adds);
}

template <int C>
void multiply_placed_right(const Rows& a, const float* b, const int32_t* places, float* c, int64_t step, int64_t rows, int64_t k,
                           bool adds) {
  const RightPlaced at{a.row, places};
  multiply_rows<TILE_ROWS<C>, C>([&](int64_t) { return at; }, [&](int64_t r) { return a.data + r * a.row; }, b, c, step, 0, rows, k,
                                 adds);
}

template <int C>
void multiply_placed_left(const float* a, const int32_t* places, const float* panel, float* c, int64_t step, int64_t rows, int64_t k,
                          bool adds) {
  multiply_rows<TILE_ROWS<C>, C>([&](int64_t r) { return LeftPlaced{places + r, C * LANES}; }, [&](int64_t) { return a; }, panel, c,
                                 step, 0, rows, k, adds);
}

}  // namespace amp
