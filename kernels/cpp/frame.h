// The images of a convolution, the window that is moved over them, and a frame: some rows of an image's pixels in fp32, with the zeros of
// the padding around them. There, what one weight is multiplied with for one pixel after the other is one stretch of memory.
#pragma once

#include "cast_matmul.h"

namespace amp {

using Numbers = const std::vector<int64_t>&;

// Images in memory, each channel's rows of pixels one after the other, and the window that is moved over them. A convolution of one
// dimension is one of two, with images of one row.
struct Images {
  const void* data;
  Type type;
  int64_t number, channels, height, width;
};
struct Along {  // one dimension of a window
  int64_t size, stride, padding, dilation;
  int64_t count;  // of results
  int64_t reach() const { return dilation * (size - 1); }
  bool plain() const { return size == 1 && stride == 1 && padding == 0; }
  int64_t phases() const { return std::min(stride, reach() + 1); }
};
struct Convolution {
  Images x;
  Along down, right;
  int64_t filters, rows, columns;  // the last two: of the result, as torch sees it
  bool planar = false;  // images of two dimensions for torch
  int64_t each() const { return down.size * right.size; }
  int64_t taps() const { return x.channels * each(); }
  int64_t pixels() const { return down.count * right.count; }
};

// Rows of pixels in fp32: those that `rows` rows of results need. With a stride, pixels that follow each other for one weight are
// that far apart in the image: each phase of rows and columns has a plane of its own, where they are neighbours. A row of results has
// `pitch` places, of which the last ones are of no use.
struct Frame {
  const Convolution& c;
  int64_t rows, height, pitch, plane, channel;
  Frame(const Convolution& c, int64_t rows)
      : c(c), rows(rows), height(rows + c.down.reach() / c.down.stride), pitch(c.right.count + c.right.reach() / c.right.stride),
        plane(height * pitch), channel(c.down.phases() * c.right.phases() * plane) {}

  // The number of places from the first to the last result of some rows.
  int64_t places(int64_t some) const { return (some - 1) * pitch + c.right.count; }
  int64_t values(int64_t channels) const { return channels * channel + 4 * PANEL_VECTORS * LANES; }

  // Where the pixels for the weights of some channels begin.
  std::vector<int32_t> taps(int64_t channels) const {
    std::vector<int32_t> found;
    for (int64_t i = 0; i < channels; ++i) {
      for (int64_t y = 0; y <= c.down.reach(); y += c.down.dilation) {
        for (int64_t x = 0; x <= c.right.reach(); x += c.right.dilation) {
          const int64_t phase = y % c.down.stride * c.right.phases() + x % c.right.stride;
          found.push_back(static_cast<int32_t>(i * channel + phase * plane + y / c.down.stride * pitch + x / c.right.stride));
        }
      }
    }
    return found;
  }

  // Fills it for the rows of results from `row` on.
  void fill(int64_t image, int64_t row, int64_t first_channel, int64_t channels, float* to) const {
    if (c.down.stride == 1 && c.right.stride == 1 && c.x.width < SHORT) {
      for (int64_t i = 0; i < channels; ++i, to += plane) {
        fill_short(image * c.x.channels + first_channel + i, row - c.down.padding, to);
      }
      return;
    }
    for (int64_t i = 0; i < channels; ++i) {
      for (int64_t a = 0; a < c.down.phases(); ++a, to += c.right.phases() * plane) {
        fill_planes(image * c.x.channels + first_channel + i, row * c.down.stride + a - c.down.padding, to);
      }
    }
  }

 private:
  static constexpr int64_t SHORT = 4 * LANES;  // rows of pixels that are widened together: one by one, they would not fill vectors

  // The rows of an image's plane from `top` on, without a stride.
  void fill_short(int64_t number, int64_t top, float* to) const {
    const int64_t width = c.x.width, from = std::min(std::max<int64_t>(top, 0), c.x.height);
    const int64_t until = std::max(std::min(top + height, c.x.height), from);
    const int64_t begin = std::min(std::max<int64_t>(c.right.padding, 0), pitch);
    const int64_t end = std::max(std::min(width + c.right.padding, pitch), begin);
    float* dense = scratch(DENSE).take((until - from) * width + LANES);
    widen(c.x.type, advanced(c.x.data, c.x.type, (number * c.x.height + from) * width), dense, (until - from) * width);
    place_rows(dense, 0, to, pitch, 0, 0, from - top);
    to += (from - top) * pitch;
    place_rows(dense + begin - c.right.padding, width, to, pitch, begin, end, until - from);
    to += (until - from) * pitch;
    place_rows(dense, 0, to, pitch, 0, 0, top + height - until);
  }

  // The rows of an image's plane from `top` on, by the stride: a plane for each phase of the columns.
  void fill_planes(int64_t number, int64_t top, float* to) const {
    const int64_t step = c.right.stride, phases = c.right.phases();
    // The columns of phase b that are inside of the image: first(b) to last(b). All phases have those from first(0) to last(phases - 1).
    const auto first = [&](int64_t b) { return std::min(b < c.right.padding ? blocks(c.right.padding - b, step) : 0, pitch); };
    const auto last = [&](int64_t b) {
      const int64_t width = c.x.width + c.right.padding - b;
      return std::max(std::min(width > 0 ? blocks(width, step) : 0, pitch), first(b));
    };
    const int64_t begin = first(0), end = std::max(last(phases - 1), begin);
    for (int64_t r = 0; r < height; ++r, to += pitch) {
      const int64_t y = top + r * c.down.stride;
      const bool inside = y >= 0 && y < c.x.height;
      const auto pixel = [&](int64_t b, int64_t q) {  // of column q of phase b
        return advanced(c.x.data, c.x.type, (number * c.x.height + y) * c.x.width + q * step + b - c.right.padding);
      };
      for (int64_t b = 0; b < phases; ++b) {
        float* row = to + b * plane;
        const int64_t from = inside ? first(b) : pitch, until = inside ? last(b) : pitch;
        std::fill(row, row + from, 0.0f);
        if (from < begin) widen_every(c.x.type, pixel(b, from), step, row + from, std::min(begin, until) - from);
        if (const int64_t rest = std::max(from, end); rest < until) widen_every(c.x.type, pixel(b, rest), step, row + rest, until - rest);
        std::fill(row + until, row + pitch, 0.0f);
      }
      if (!inside || begin == end) continue;
      if (phases == 1) widen_every(c.x.type, pixel(0, begin), step, to + begin, end - begin);
      else pack({pixel(0, begin), step, true, c.x.type, c.x.type}, 0, 0, phases, end - begin, to + begin, plane);
    }
  }
};

}  // namespace amp
