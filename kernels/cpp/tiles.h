// The product of fp32 tiles: a few rows times a panel of columns, with all sums in registers: see loops.h.
#pragma once

#include "loops.h"
#include "rounding.h"

namespace amp {

// c = a @ panel, or c += a @ panel, for R rows and a panel of C vectors. A sum is added up in the order of k, whatever R and C are
// and however wide a vector is, so a result does not depend on the size of the product that it is a part of.
//
// Where the operands of a tile are. Packed: the next row of the panel follows in memory, rows of a are a step apart.
struct Straight {
  int64_t row, step, width;
  const float* left(const float* a, int64_t r, int64_t i) const { return a + r * row + i * step; }
  const float* right(const float* b, int64_t i) const { return b + i * width; }
};
// The right operand's rows are anywhere, as those of a convolution.
struct RightPlaced {
  int64_t row;
  const int32_t* places;
  const float* left(const float* a, int64_t r, int64_t i) const { return a + r * row + i; }
  const float* right(const float* b, int64_t i) const { return b + places[i]; }
};
// The left operand's rows are anywhere.
struct LeftPlaced {
  const int32_t* places;
  int64_t width;
  const float* left(const float* a, int64_t r, int64_t i) const { return a + places[r] + i; }
  const float* right(const float* b, int64_t i) const { return b + i * width; }
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

constexpr int TILE_ROWS = AMP_LANES == 16 ? 8 : 4;  // with PANEL_VECTORS vectors: as many sums as there are registers, less a few

// The rows from `from` on, R at a time as long as there are enough; returns the first that is left.
template <int R, int C>
int64_t multiply_tiles(const Rows& a, const float* panel, float* c, int64_t step, int64_t from, int64_t rows, int64_t k, bool adds) {
  for (; from + R <= rows; from += R) {
    multiply_tile<R, C>(Straight{a.row, a.step, C * LANES}, a.data + from * a.row, panel, c + from * step, step, k, adds);
  }
  return from;
}

template <int C>
void multiply_rows(const Rows& a, const float* panel, float* c, int64_t step, int64_t rows, int64_t k, bool adds) {
  int64_t done = multiply_tiles<TILE_ROWS, C>(a, panel, c, step, 0, rows, k, adds);
  if constexpr (TILE_ROWS > 4) done = multiply_tiles<4, C>(a, panel, c, step, done, rows, k, adds);
  done = multiply_tiles<2, C>(a, panel, c, step, done, rows, k, adds);
  multiply_tiles<1, C>(a, panel, c, step, done, rows, k, adds);
}

template <int C>
void multiply_placed_right(const Rows& a, const float* b, const int32_t* places, float* c, int64_t step, int64_t rows, int64_t k,
                           bool adds) {
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) {
    multiply_tile<TILE_ROWS, C>(RightPlaced{a.row, places}, a.data + r * a.row, b, c + r * step, step, k, adds);
  }
  for (; r < rows; ++r) multiply_tile<1, C>(RightPlaced{a.row, places}, a.data + r * a.row, b, c + r * step, step, k, adds);
}

template <int C>
void multiply_placed_left(const float* a, const int32_t* places, const float* panel, float* c, int64_t step, int64_t rows, int64_t k,
                          bool adds) {
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) {
    multiply_tile<TILE_ROWS, C>(LeftPlaced{places + r, C * LANES}, a, panel, c + r * step, step, k, adds);
  }
  for (; r < rows; ++r) multiply_tile<1, C>(LeftPlaced{places + r, C * LANES}, a, panel, c + r * step, step, k, adds);
}

}  // namespace amp
