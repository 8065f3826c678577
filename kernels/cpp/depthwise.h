// Convolutions in which every filter reads one channel. Each of its results is a sum of few products, so that moving values takes the
// time: a plane of pixels is widened into the first cache and read there once for each weight, and no tensor is widened.
#pragma once

#include <algorithm>

#include "convolution.h"

namespace amp {

// A plane of pixels, in stripes: some rows of results at a time.
struct Stripes {
  int64_t number, rows;
  explicit Stripes(const Convolution& c) {
    constexpr int64_t HELD = int64_t(1) << 13;  // pixels that are widened at a time
    const Frame row(c, 1);
    const int64_t most = std::max(HELD / (row.channel / row.height) - row.height + 1, fewest_rows(c));
    number = blocks(c.down.count, most);
    rows = blocks(c.down.count, number);
  }
  int64_t size(const Convolution& c, int64_t stripe) const { return std::max<int64_t>(std::min(rows, c.down.count - stripe * rows), 0); }
};

// Runs f(first, last) for units of so much work each, in all threads.
template <class F>
void in_units(int64_t units, int64_t work, const F& f) {
  const auto run = [&](int64_t first, int64_t last) {
    f(first, last);
    for (Use use : {LEFT, RIGHT, SUMS, DENSE}) scratch(use).tidy();
  };
  units * work <= GRAIN ? run(0, units) : at::parallel_for(0, units, std::max<int64_t>(GRAIN / work, 1), run);
}

// to[image, filter, pixel] = the sums of weights[filter, tap] * x[tap, pixel] + plus[filter]. Filters of one channel follow each other.
inline void convolve_planes(const Convolution& c, const float* weights, const float* plus, void* to) {
  const Stripes stripes(c);
  const Frame frame(c, stripes.rows);
  const std::vector<int32_t> taps = frame.taps(1);
  const int64_t each = c.each(), count = c.right.count, share = c.filters / c.x.channels;
  const int64_t vectors = blocks(frame.places(stripes.rows), LANES);
  in_units(c.x.number * c.filters * stripes.number, stripes.rows * count * (each + 4), [&](int64_t unit, int64_t last) {
    float* pixels = scratch(RIGHT).take(frame.values(1));
    float* sums = scratch(SUMS).take((vectors + 1) * LANES);
    for (; unit < last; ++unit) {
      const int64_t plane = unit / stripes.number, filter = plane % c.filters, stripe = unit % stripes.number;
      const int64_t first = stripe * stripes.rows, some = stripes.size(c, stripe);
      if (some == 0) continue;
      frame.fill(plane / c.filters, first, filter / share, 1, pixels);
      for (int64_t v = 0; v < vectors; v += PANEL_VECTORS) {
        multiply_right_at({weights + filter * each, each, 1}, pixels + v * LANES, taps.data(), std::min(PANEL_VECTORS, vectors - v),
                          sums + v * LANES, 0, 1, each, false);
      }
      if (plus) add_to_rows(sums, 0, plus + filter, 1, vectors * LANES);
      float* joined = sums;  // without the places of no use
      if (count < frame.pitch) {
        joined = scratch(DENSE).take(some * count + LANES);
        place_rows(sums, frame.pitch, joined, count, 0, count, some);
      }
      finish(c.x.type, joined, advanced(to, c.x.type, plane * c.pixels() + first * count), some * count);
    }
  });
}

inline Tensor depthwise_convolution(const Convolution& c, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor result = x.dim() == 3 ? at::empty({c.x.number, c.filters, c.columns}, c.x.type)
                                     : at::empty({c.x.number, c.filters, c.rows, c.columns}, c.x.type);
  const std::vector<float> weights = in_fp32(weight), plus = bias ? in_fp32(*bias) : std::vector<float>();
  convolve_planes(c, weights.data(), bias ? plus.data() : nullptr, result.mutable_data_ptr<void>());
  return result;
}

// Whether that is faster than torch's own kernel, as measured: not with a stride, nor with many weights; the gradient of the filters is
// faster with many, too.
inline bool planes_pay(const Convolution& c) { return !strided(c) && c.each() <= 32; }

// The gradient of the images is such a convolution too, of the results' gradient with the filters turned around.
inline bool turned_planes_pay(const Convolution& c) { return planes_pay(c) && c.filters == c.x.channels; }

inline Tensor depthwise_gradient_of_images(const Convolution& c, const Tensor& gradient, const Tensor& x, const Tensor& weight) {
  std::vector<float> weights = in_fp32(weight);
  for (int64_t i = 0; i < c.filters; ++i) std::reverse(weights.begin() + i * c.each(), weights.begin() + (i + 1) * c.each());
  const auto around = [](const Along& a, int64_t pixels) { return Along{a.size, 1, a.reach() - a.padding, a.dilation, pixels}; };
  const Convolution turned{{gradient.const_data_ptr(), c.x.type, c.x.number, c.filters, c.down.count, c.right.count},
                           around(c.down, c.x.height), around(c.right, c.x.width), c.x.channels, c.x.height, c.x.width};
  const Tensor result = at::empty(x.sizes(), c.x.type);
  convolve_planes(turned, weights.data(), nullptr, result.mutable_data_ptr<void>());
  return result;
}

inline Tensor depthwise_gradient_of_filters(const Convolution& c, const Tensor& gradient, const Tensor& weight) {
  const Stripes stripes(c);
  const Frame frame(c, stripes.rows);
  const std::vector<int32_t> taps = frame.taps(1);
  const int64_t each = c.each(), count = c.right.count, share = c.filters / c.x.channels;
  std::vector<float> sums(c.filters * each);
  in_units(c.filters, c.x.number * c.pixels() * (each + 4), [&](int64_t filter, int64_t last) {
    float* pixels = scratch(RIGHT).take(frame.values(1));
    float* slopes = scratch(LEFT).take(stripes.rows * count + LANES);
    for (; filter < last; ++filter) {
      for (int64_t unit = 0; unit < c.x.number * stripes.number; ++unit) {
        const int64_t image = unit / stripes.number, stripe = unit % stripes.number, some = stripes.size(c, stripe);
        const int64_t at = (image * c.filters + filter) * c.pixels() + stripe * stripes.rows * count;
        frame.fill(image, stripe * stripes.rows, filter / share, 1, pixels);
        widen(c.x.type, advanced(gradient.const_data_ptr(), c.x.type, at), slopes, some * count);
        add_tap_sums(slopes, pixels, frame.pitch, taps.data(), each, some, count, sums.data() + filter * each);
      }
    }
  });
  const Tensor result = at::empty(weight.sizes(), c.x.type);
  finish(c.x.type, sums.data(), result.mutable_data_ptr<void>(), c.filters * each);
  return result;
}

}  // namespace amp
