// Convolutions of one pixel at a time on small images: the pixels of several images, side by side, are one matrix. Alone, those of an
// image would leave a part of their last vector empty, and the filters would be packed for each image.
#pragma once

#include "cast_matmul.h"

namespace amp {

// Images in memory: `pixels` values of each channel, one channel after the other.
struct Pixels {
  const void* data;
  Type type;
  int64_t number, channels, pixels;

  // How many images are multiplied at a time.
  int64_t together() const { return std::max<int64_t>(std::min(PACKED / (channels * pixels), number), 1); }

  // From one channel of some images, side by side, to the next, and all values of these.
  int64_t step(int64_t some) const { return some * pixels + GAP; }
  int64_t values(int64_t some) const { return channels * step(some); }

  // Those of some images in fp32: a row for each channel.
  Operand side_by_side(int64_t first, int64_t some, float* to) const {
    const int64_t columns = some * pixels, apart = step(some);
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t channel = begin; channel < end; ++channel) {
        for (int64_t i = 0; i < some; ++i) {
          widen(type, advanced(data, type, ((first + i) * channels + channel) * pixels), to + channel * apart + i * pixels, pixels);
        }
      }
    };
    channels * columns <= GRAIN || at::get_num_threads() == 1 ? run(0, channels)
                                                              : at::parallel_for(0, channels, blocks(GRAIN, columns), run);
    return {to, apart, false, at::kFloat, at::kFloat};
  }
};

// Whether that is faster, as measured: images are small and weights many, and the places that fill the last vector are few.
inline bool side_by_side_pays(int64_t number, int64_t channels, int64_t filters, int64_t pixels) {
  const int64_t all = number * pixels, places = blocks(all, LANES) * LANES;
  return pixels < 256 && channels * filters >= 1 << 17 && all >= 48 && all * 4 >= places * 3;
}

// to[image, filter, pixel] = the sums of filters[filter, channel] * x[image, channel, pixel] + plus[filter].
inline void multiply_pixels(const Pixels& x, const Operand& filters, int64_t m, const float* plus, void* to) {
  const int64_t group = x.together();
  for (int64_t first = 0; first < x.number; first += group) {
    const int64_t some = std::min(group, x.number - first), columns = some * x.pixels;
    const Operand side = x.side_by_side(first, some, scratch(PIXELS).take(x.values(some)));
    const Result result{advanced(to, x.type, first * m * x.pixels), x.type, columns, nullptr, x.pixels, m, plus};
    multiply_tiled(filters, side, result, m, columns, x.channels, false);
  }
}

// to[filter, channel] = the sums over all pixels of gradient[image, filter, pixel] * x[image, channel, pixel].
inline void multiply_by_pixels(const Pixels& gradient, const Pixels& x, float* to) {
  const int64_t group = std::min(gradient.together(), x.together()), values = gradient.channels * x.channels;
  std::vector<float> more(x.number > group ? values : 0);
  for (int64_t first = 0; first < x.number; first += group) {
    const int64_t some = std::min(group, x.number - first), columns = some * x.pixels;
    float* place = scratch(PIXELS).take(gradient.values(some) + x.values(some));
    const Operand left = gradient.side_by_side(first, some, place);
    const Operand right = transposed(x.side_by_side(first, some, place + gradient.values(some)));
    const Result sums{first == 0 ? to : more.data(), at::kFloat, x.channels, nullptr};
    multiply_tiled(left, right, sums, gradient.channels, x.channels, columns, false);
    if (first > 0) add_values(to, more.data(), values);
  }
}

}  // namespace amp
