// Convolutions of small images: what the weights are multiplied with for the pixels of several images, side by side, is one matrix. Alone,
// an image would leave a part of the last vector empty, and the filters would be packed for each image.
#pragma once

#include "frame.h"

namespace amp {

// Images in memory, one channel after the other, as a matrix with a row for each channel; or, with a window that is moved over them, with
// a row for each of its weights: what they are multiplied with.
struct Pixels {
  const void* data;
  Type type;
  int64_t number, channels, pixels;  // the last: columns for each image
  const Convolution* window = nullptr;

  static Pixels read_by(const Convolution& c) {
    const bool plain = c.down.plain() && c.right.plain();
    return {c.x.data, c.x.type, c.x.number, c.x.channels, c.pixels(), plain ? nullptr : &c};
  }
  int64_t rows() const { return window ? window->taps() : channels; }

  // How many images are multiplied at a time.
  int64_t together() const { return std::max<int64_t>(std::min(PACKED / (rows() * pixels), number), 1); }

  // From one row of some images, side by side, to the next, and all values of these.
  int64_t step(int64_t some) const { return some * pixels + GAP; }
  int64_t values(int64_t some) const { return rows() * step(some); }

  // Those of some images in fp32.
  Operand side_by_side(int64_t first, int64_t some, float* to) const {
    const auto run = [&](int64_t begin, int64_t end) { (window ? gather : widen_all)(*this, first, some, begin, end, to); };
    const int64_t each = values(some) / channels;
    values(some) <= GRAIN || at::get_num_threads() == 1 ? run(0, channels) : at::parallel_for(0, channels, blocks(GRAIN, each), run);
    return {to, step(some), false, at::kFloat, at::kFloat};
  }

 private:
  static void widen_all(const Pixels& x, int64_t first, int64_t some, int64_t channel, int64_t last, float* to) {
    for (; channel < last; ++channel) {
      for (int64_t i = 0; i < some; ++i) {
        const void* from = advanced(x.data, x.type, ((first + i) * x.channels + channel) * x.pixels);
        widen(x.type, from, to + channel * x.step(some) + i * x.pixels, x.pixels);
      }
    }
  }

  // In whole vectors: what is written behind an image's last value is the next image's, which comes after it, or a row's gap.
  static void gather(const Pixels& x, int64_t first, int64_t some, int64_t channel, int64_t last, float* to) {
    const Convolution& c = *x.window;
    const Frame frame(c, c.down.count);
    const std::vector<int32_t> taps = frame.taps(1);
    float* pixels = scratch(RIGHT).take(frame.values(1));
    for (; channel < last; ++channel) {
      for (int64_t i = 0; i < some; ++i) {
        frame.fill(first + i, 0, channel, 1, pixels);
        float* row = to + channel * c.each() * x.step(some) + i * x.pixels;
        for (const int32_t tap : taps) {
          place_rows(pixels + tap, frame.pitch, row, c.right.count, 0, c.right.count, c.down.count);
          row += x.step(some);
        }
      }
    }
    for (Use use : {RIGHT, DENSE}) scratch(use).tidy();
  }
};

// Whether that is faster, as measured: images are small and weights many, and the places that fill the last vector are few.
inline bool side_by_side_pays(int64_t number, int64_t channels, int64_t filters, int64_t pixels) {
  const int64_t all = number * pixels, places = blocks(all, LANES) * LANES;
  return pixels < 256 && channels * filters >= 1 << 17 && all >= 48 && all * 4 >= places * 3;
}

// The same for windows of several pixels: the matrix, which has each pixel several times, is small beside the weights, and these would be
// widened for oneDNN. With AVX-512 oneDNN's products are as fast as ours, and fewer pixels pay.
inline bool windows_pay(const Convolution& c, bool backward) {
  const int64_t weights = c.filters * c.taps(), all = c.x.number * c.pixels();
  if (c.down.stride > 1 || c.right.stride > 1 || weights < 1 << 19 || c.filters < 2 * all) return false;
  return all <= (LANES == 8 || (backward && weights >= 1 << 21) ? 200 : 64);
}

// Whether it is done for the pixels of several images at a time; `backward`: for gradients.
inline bool joins_images(const Convolution& c, bool backward) {
  if (c.down.plain() && c.right.plain()) return side_by_side_pays(c.x.number, c.x.channels, c.filters, c.pixels());
  return windows_pay(c, backward);
}

// to[image, filter, pixel] = the sums of filters[filter, weight] * x[image, weight, pixel] + plus[filter].
inline void multiply_pixels(const Pixels& x, const Operand& filters, int64_t m, const float* plus, void* to) {
  const int64_t group = x.together();
  for (int64_t first = 0; first < x.number; first += group) {
    const int64_t some = std::min(group, x.number - first), columns = some * x.pixels;
    const Operand side = x.side_by_side(first, some, scratch(PIXELS).take(x.values(some)));
    const Result result{advanced(to, x.type, first * m * x.pixels), x.type, columns, nullptr, x.pixels, m, plus};
    multiply_tiled(filters, side, result, m, columns, x.rows(), false);
  }
}

// to[filter, weight] = the sums over all pixels of gradient[image, filter, pixel] * x[image, weight, pixel].
inline void multiply_by_pixels(const Pixels& gradient, const Pixels& x, void* to) {
  const int64_t group = std::min(gradient.together(), x.together()), weights = x.rows(), values = gradient.channels * weights;
  std::vector<float> sums(x.number > group ? values : 0), more(sums.size());
  for (int64_t first = 0; first < x.number; first += group) {
    const int64_t some = std::min(group, x.number - first), columns = some * x.pixels;
    float* place = scratch(PIXELS).take(gradient.values(some) + x.values(some));
    const Operand left = gradient.side_by_side(first, some, place);
    const Operand right = transposed(x.side_by_side(first, some, place + gradient.values(some)));
    const Result all{to, x.type, weights, nullptr}, part{(first == 0 ? sums : more).data(), at::kFloat, weights, nullptr};
    multiply_tiled(left, right, sums.empty() ? all : part, gradient.channels, weights, columns, false);
    if (first > 0) add_values(sums.data(), more.data(), values);
  }
  if (!sums.empty()) finish(x.type, sums.data(), to, values);
}

// The gradient of images of which each pixel is read by several weights: to[image, channel, pixel] = the sums over these of what
// filters[filter, weight] * gradient[image, filter, pixel] add up to. `c` has no stride.
inline void add_up_pixels(const Convolution& c, const Pixels& gradient, const Operand& weights, void* to) {
  const Frame frame(c, c.down.count);
  const std::vector<int32_t> taps = frame.taps(1);
  const int64_t group = std::min(gradient.together(), Pixels::read_by(c).together()), count = c.right.count, all = c.x.height * c.x.width;
  for (int64_t first = 0; first < c.x.number; first += group) {
    const int64_t some = std::min(group, c.x.number - first), columns = some * c.pixels();
    float* place = scratch(PIXELS).take(gradient.values(some) + c.taps() * columns + LANES);
    float* sums = place + gradient.values(some);
    const Operand side = gradient.side_by_side(first, some, place);
    multiply_tiled(weights, side, {sums, at::kFloat, columns, nullptr}, c.taps(), columns, c.filters, false);
    at::parallel_for(0, some * c.x.channels, blocks(GRAIN, c.each() * c.pixels()), [&](int64_t unit, int64_t last) {
      float* pixels = scratch(RIGHT).take(frame.values(1));
      for (; unit < last; ++unit) {
        const int64_t channel = unit / some, image = unit % some;
        std::fill_n(pixels, frame.channel, 0.0f);
        for (int64_t t = 0; t < c.each(); ++t) {
          add_values(pixels + taps[t], frame.pitch, sums + (channel * c.each() + t) * columns + image * c.pixels(), count, c.down.count);
        }
        finish(c.x.type, pixels + c.down.padding * frame.pitch + c.right.padding, frame.pitch, nullptr,
               advanced(to, c.x.type, ((first + image) * c.x.channels + channel) * all), c.x.width, c.x.height, c.x.width);
      }
      scratch(RIGHT).tidy();
    });
  }
}

}  // namespace amp
