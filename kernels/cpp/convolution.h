// Convolutions as products: of the filters with what they are moved over. Some rows of an image's pixels at a time are widened into
// memory that stays in the cache, with the zeros of the padding around them. There, what one weight is multiplied with for one pixel
// after the other is one stretch of memory, so nothing is gathered. Sums are fp32's, and each result is rounded once.
#pragma once

#include "pixels.h"

namespace amp {

// The fewest rows of results that are worth a frame: for fewer, those that windows share are widened too often.
inline int64_t fewest_rows(const Convolution& c) { return std::min<int64_t>(c.down.reach() == 0 ? 1 : 4, c.down.count); }

// Whether products are faster than torch's own kernel (oneDNN's, on widened images), as measured: they are if few places are of no
// use, and where channels do not fill oneDNN's blocks of 16, or are so few that making these blocks takes its time.
inline bool pays(const Convolution& c, bool backward) {
  const Frame frame(c, c.down.count);
  if (joins_images(c, backward)) return true;
  if (c.x.channels * Frame(c, fewest_rows(c)).channel > 4 * cache_values()) return false;  // long rows do not stay in the cache
  const double useful = static_cast<double>(c.pixels()) / (blocks(frame.places(c.down.count), LANES) * LANES);
  if (c.x.channels % 16 != 0) return useful > 0.7;
  if (c.each() == 1) return useful > 0.95;
  return c.down.stride == 1 && c.right.stride == 1 && useful > 0.935 && c.x.channels <= 32;
}

// Whether torch's own kernel is faster if it gets images with their channels last, as measured, for results and for the images'
// gradient: it is unless it makes blocks of many weights for few pixels. Not where results read nothing but padding: oneDNN (of torch
// 2.13) then reads memory that is not its own, for some strides and dilations.
inline bool last_pays(const Convolution& c) {
  if (!c.planar || c.x.channels < 16 || c.filters < 16) return false;
  if (c.down.padding > c.down.reach() || c.right.padding > c.right.reach()) return false;
  return c.each() == 1 || c.x.number * c.x.height * c.x.width >= 2 * c.filters * c.each();
}

// The same for the filters' gradient: only with many pixels.
inline bool filters_last_pays(const Convolution& c) {
  const bool every = c.down.stride == 1 && c.right.stride == 1;
  return LANES == 16 && every && last_pays(c) && c.x.number * c.x.height * c.x.width >= 6 * c.filters * c.each();
}

// Runs f with the next number until there are none, in all threads. Of the scratch memory, RIGHT is each thread's own.
template <class F>
void take_turns(int64_t number, bool alone, const F& f) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < number;) f(i);
    scratch(RIGHT).tidy();
  };
  alone ? work(0, 1) : at::parallel_for(0, at::get_num_threads(), 1, work);
}

constexpr int64_t FILTERS = 64;  // whose sums are held at a time

// The results of some filters for the rows of a frame.
struct Stripe {
  const Frame& frame;
  const Depths& depths;
  const float* filters;
  const std::vector<int32_t>& taps;
  const float* plus;
  void* to;

  void run(const float* pixels, int64_t image, int64_t row, int64_t rows, int64_t first, int64_t last) const {
    const Convolution& c = frame.c;
    constexpr int64_t TOGETHER = 4, SOME = TOGETHER * PANEL_VECTORS * LANES;
    const int64_t step = depths.each + GAP, all = frame.places(rows);
    const Panels panels(all);
    float* sums = scratch(SUMS).take(FILTERS * SOME);
    for (int64_t filter = first; filter < last; filter += FILTERS) {
      const int64_t number = std::min(FILTERS, last - filter);
      for (int64_t panel = 0; panel < panels.number; panel += TOGETHER) {
        const int64_t next = std::min(panel + TOGETHER, panels.number), place = panels.start(panel);
        const int64_t count = std::min(panels.start(next), all) - place;
        for (int64_t part = 0; part < depths.number; ++part) {
          for (int64_t p = panel; p < next; ++p) {
            multiply_right_at({filters + (part * c.filters + filter) * step, step, 1}, pixels + panels.start(p),
                              taps.data() + depths.start(part), panels.width(p) / LANES, sums + panels.start(p) - place, SOME, number,
                              depths.size(part), part > 0);
          }
        }
        if (plus) add_to_rows(sums, SOME, plus + filter, number, count);
        write(sums, SOME, image, row, filter, number, place, count);
      }
    }
  }

 private:
  void write(const float* sums, int64_t step, int64_t image, int64_t row, int64_t filter, int64_t number, int64_t place,
             int64_t count) const {
    const Convolution& c = frame.c;
    for (int64_t done = 0; done < count;) {
      const int64_t r = (place + done) / frame.pitch, column = (place + done) % frame.pitch;
      const int64_t use = std::min(c.right.count - column, count - done);
      if (use > 0) {
        const int64_t at = ((image * c.filters + filter) * c.down.count + row + r) * c.right.count + column;
        finish(c.x.type, sums + done, step, nullptr, advanced(to, c.x.type, at), c.pixels(), number, use);
      }
      done += std::min(frame.pitch - column, count - done);
    }
  }
};

// to[image, filter, pixel] = the sums of filters[filter, tap] * x[tap, pixel] + plus[filter].
inline void convolve(const Convolution& c, const Operand& filters, const float* plus, void* to) {
  const Depths depths(c.taps());
  const int64_t m = c.filters, step = depths.each + GAP;
  const bool alone = c.x.number * c.pixels() * m * c.taps() <= ALONE;
  const int64_t threads = alone ? 1 : at::get_num_threads();
  float* packed = scratch(LEFT).take(depths.number * m * step);
  take_turns(blocks(m, FILTERS) * depths.number, alone, [&](int64_t i) {
    const int64_t part = i % depths.number, first = i / depths.number * FILTERS, rows = std::min(FILTERS, m - first);
    pack(filters, first, depths.start(part), rows, depths.size(part), packed + (part * m + first) * step, step);
  });
  const Frame one(c, 1);
  const int64_t per_row = c.x.channels * one.channel / one.height, halo = one.height - 1;
  const int64_t most = std::max(cache_values() * 5 / 8 / per_row - halo, fewest_rows(c));
  const int64_t stripes = blocks(c.down.count, most), rows = blocks(c.down.count, stripes);
  const Frame frame(c, rows);
  const std::vector<int32_t> taps = frame.taps(c.x.channels);
  const Stripe stripe{frame, depths, packed, taps, plus, to};
  // With few images, the filters are divided too.
  const int64_t units = c.x.number * stripes, divided = std::min(units < 2 * threads ? blocks(2 * threads, units) : 1, blocks(m, 16));
  const int64_t share = blocks(blocks(m, divided), 8) * 8;
  take_turns(units * divided, alone, [&](int64_t i) {
    const int64_t first = i % divided * share, last = std::min(first + share, m);
    if (first >= last) return;
    const int64_t image = i / divided / stripes, row = i / divided % stripes * rows, some = std::min(rows, c.down.count - row);
    if (some <= 0) return;
    float* pixels = scratch(RIGHT).take(frame.values(c.x.channels));
    frame.fill(image, row, 0, c.x.channels, pixels);
    stripe.run(pixels, image, row, some, first, last);
  });
}

// to[tap, filter] = the sums over all pixels of x[tap, pixel] * gradient[filter, pixel], in fp32, in rows of `Panels(filters)`. The
// gradient is packed for some stripes at a time; then each thread takes some weights through all of them, so the order of a sum does
// not depend on the number of threads. Rows of pixels are taken one by one if there are places of no use between them: these may hold
// an infinity, which even a gradient of zero would spread.
inline void convolve_weights(const Convolution& c, const void* gradient, float* to) {
  constexpr int64_t DEPTH = 512, ROWS = 64;
  const int64_t n = c.filters, each = c.each(), count = c.right.count;
  const bool alone = c.x.number * c.pixels() * n * c.taps() <= ALONE;
  const Panels panels(n);
  const int64_t width = panels.vectors * LANES;
  const int64_t most = std::max<int64_t>(DEPTH / count, 1), stripes = blocks(c.down.count, most);
  const int64_t rows = blocks(c.down.count, stripes), all = c.x.number * stripes, depth = rows * count;
  const Frame frame(c, rows);
  const int64_t group = std::max<int64_t>(PACKED / (depth * width), 1);
  const int64_t channels = std::min(std::max<int64_t>(ROWS / each, 1), c.x.channels);
  const std::vector<int32_t> taps = frame.taps(channels);
  // With few channels, as those of a picture, their weights are divided too.
  const int64_t groups = blocks(c.x.channels, channels), threads = alone ? 1 : at::get_num_threads();
  const int64_t divided = groups < 2 * threads ? blocks(2 * threads, groups) : 1;
  const int64_t share = blocks(blocks(channels * each, divided), 8) * 8, shares = blocks(channels * each, share);
  for (int64_t start = 0; start < all; start += group) {
    const int64_t number = std::min(group, all - start);
    float* packed = scratch(LEFT).take(number * depth * width);
    const auto row_of = [&](int64_t i) { return (start + i) % stripes * rows; };
    const auto rows_of = [&](int64_t i) { return std::max<int64_t>(std::min(rows, c.down.count - row_of(i)), 0); };
    take_turns(number * panels.number, alone, [&](int64_t turn) {
      const int64_t i = turn / panels.number, panel = turn % panels.number;
      const int64_t first = panels.start(panel), wide = panels.width(panel), there = std::min(wide, n - first);
      float* place = packed + i * depth * width + first * depth;
      const void* from = advanced(gradient, c.x.type, (start + i) / stripes * n * c.pixels());
      if (there < wide) std::fill(place, place + depth * wide, 0.0f);
      pack(Operand{from, c.pixels(), true, c.x.type, c.x.type}, row_of(i) * count, first, rows_of(i) * count, there, place, wide);
    });
    take_turns(groups * shares, alone, [&](int64_t turn) {
      const int64_t channel = turn / shares * channels, some = std::min(channels, c.x.channels - channel);
      const int64_t tap = turn % shares * share, mine = std::min(share, some * each - tap);
      if (mine <= 0) return;
      float* pixels = scratch(RIGHT).take(frame.values(channels));
      for (int64_t i = 0; i < number; ++i) {
        const int64_t left = rows_of(i), together = frame.pitch == count ? left : 1;  // rows of pixels that are one
        if (left > 0) frame.fill((start + i) / stripes, row_of(i), channel, some, pixels);
        for (int64_t panel = 0; left > 0 && panel < panels.number; ++panel) {
          const float* rest = packed + i * depth * width + panels.start(panel) * depth;
          for (int64_t r = 0; r < left; r += together) {
            multiply_left_at(pixels + r * frame.pitch, taps.data() + tap, rest + r * count * panels.width(panel),
                             panels.width(panel) / LANES, to + (channel * each + tap) * width + panels.start(panel), width, mine,
                             together * count, start + i + r > 0);
          }
        }
      }
    });
  }
}

// ------------------------------------------------------------------------------------------------ tensors to products

inline bool usual_order(const Tensor& x) {
  const std::vector<int64_t> strides = at::contiguous_strides(x.sizes());
  bool same = true;
  for (size_t i = 0; i < strides.size(); ++i) same &= x.strides()[i] == strides[i];
  return same;
}

// What a convolution's arguments say, if it is one of ours: of one or two dimensions, with images in torch's usual order, and in one
// group or in one for each channel.
inline std::optional<Convolution> described(const Tensor& x, const Tensor& weight, Numbers stride, Numbers padding, Numbers dilation,
                                            bool transposed, int64_t groups) {
  const int64_t dim = x.dim() - 2;
  const bool known = !transposed && (dim == 1 || dim == 2) && weight.dim() == x.dim() && usual_order(x) && usual_order(weight) &&
                     x.scalar_type() == weight.scalar_type() && x.numel() > 0 && weight.numel() > 0 &&
                     (groups == 1 || groups == x.size(1)) && weight.size(1) * groups == x.size(1) && weight.size(0) % groups == 0 &&
                     static_cast<int64_t>(stride.size()) == dim &&
                     static_cast<int64_t>(padding.size()) == dim && static_cast<int64_t>(dilation.size()) == dim;
  if (!known) return std::nullopt;
  const auto along = [&](int64_t i) {  // dimension i of two
    const int64_t d = dim == 1 ? 0 : i;
    if (dim == 1 && i == 0) return Along{1, 1, 0, 1, 1};
    const int64_t size = weight.size(2 + d), reach = dilation[d] * (size - 1);
    return Along{size, stride[d], padding[d], dilation[d], (x.size(2 + d) + 2 * padding[d] - reach - 1) / stride[d] + 1};
  };
  Along down = along(0), right = along(1);
  const int64_t rows = down.count, columns = right.count;
  if (rows <= 0 || columns <= 0 || down.padding < 0 || right.padding < 0) return std::nullopt;
  int64_t height = dim == 1 ? 1 : x.size(2), width = x.size(-1);
  if (down.plain() && right.plain()) {  // the rows of an image are one, or as many as are worth a stripe each
    const int64_t all = height * width;
    int64_t parts = 1;
    while (all / parts > 256 && all % (2 * parts) == 0) parts *= 2;
    height = down.count = parts;
    width = right.count = all / parts;
  }
  return Convolution{{x.const_data_ptr(), x.scalar_type(), x.size(0), x.size(1), height, width}, down, right, weight.size(0), rows,
                     columns, dim == 2};
}

inline Tensor convolution_by_products(const Convolution& c, const Tensor& x, const Tensor& weight,
                                      const std::optional<Tensor>& bias) {
  const Tensor result = x.dim() == 3 ? at::empty({c.x.number, c.filters, c.columns}, c.x.type)
                                     : at::empty({c.x.number, c.filters, c.rows, c.columns}, c.x.type);
  std::vector<float> plus(bias ? c.filters : 0);
  if (bias) {
    const Tensor dense = bias->contiguous();
    widen(dense.scalar_type(), dense.const_data_ptr(), plus.data(), c.filters);
  }
  const Operand filters{weight.const_data_ptr(), c.taps(), false, c.x.type, c.x.type};
  if (joins_images(c, false)) {
    multiply_pixels(Pixels::read_by(c), filters, c.filters, bias ? plus.data() : nullptr, result.mutable_data_ptr<void>());
  } else {
    convolve(c, filters, bias ? plus.data() : nullptr, result.mutable_data_ptr<void>());
  }
  tidy();
  return result;
}

// The gradient of the images is a convolution of the results' gradient with the filters turned around. With a stride, each phase of
// rows and of columns is one: pixels that are a stride apart are read by the same weights.
struct Phase {
  int64_t start, step, count;  // of the weights along one dimension
  Along along;                 // of the convolution that computes this phase; count 0: no weight reads these pixels
};

inline Phase phase_of(const Along& a, int64_t number, int64_t pixels) {
  int64_t start = 0, step = 1;
  const auto reads = [&](int64_t tap) { return (tap * a.dilation - number - a.padding) % a.stride == 0; };
  while (start < a.size && !reads(start)) ++start;
  while (step * a.dilation % a.stride != 0) ++step;
  const int64_t count = start < a.size ? (a.size - 1 - start) / step + 1 : 0, last = start + (count - 1) * step;
  const int64_t padding = (last * a.dilation - number - a.padding) / a.stride;
  return {start, step, count, {count, 1, padding, step * a.dilation / a.stride, pixels > number ? (pixels - number - 1) / a.stride + 1 : 0}};
}

// The filters, turned around, with the weights of two phases: [channel, filter, weight].
inline std::vector<float> turned_around(const Convolution& c, const float* weights, const Phase& down, const Phase& right) {
  const int64_t channels = c.x.channels, each = c.each();
  std::vector<float> turned(c.filters * channels * down.count * right.count);
  float* to = turned.data();
  for (int64_t i = 0; i < channels; ++i) {
    for (int64_t o = 0; o < c.filters; ++o) {
      const float* from = weights + (o * channels + i) * each;
      for (int64_t y = down.count - 1; y >= 0; --y) {
        for (int64_t x = right.count - 1; x >= 0; --x) {
          *to++ = from[(down.start + y * down.step) * c.right.size + right.start + x * right.step];
        }
      }
    }
  }
  return turned;
}

// One row of an image from a row of each phase.
inline void interleave(const uint16_t* const* phases, int64_t stride, uint16_t* to, int64_t n) {
  int64_t i = 0;
  if (stride == 2) {
    for (; 2 * i + 1 < n; ++i) {
      to[2 * i] = phases[0][i];
      to[2 * i + 1] = phases[1][i];
    }
    if (n % 2 == 1) to[n - 1] = phases[0][i];
    return;
  }
  for (; i < n; ++i) to[i] = phases[i % stride][i / stride];
}

inline bool strided(const Convolution& c) { return c.down.stride > 1 || c.right.stride > 1; }

// Whether phases are about as fast as torch's own kernel, as measured: in short rows many places are of no use. They need a quarter
// of its memory, which holds the gradient in fp32 twice.
inline bool phases_pay(const Convolution& c) { return c.right.count >= 16 && c.down.stride * c.right.stride <= 4; }

// Whether the places in a frame of the results' gradient are numbers of 32 bits; rows may have millions of them.
inline bool has_places(const Convolution& c) {
  const int64_t rows = std::min<int64_t>(4, c.down.count) + c.down.reach() / c.down.stride + 1;
  return c.filters * rows * (c.right.count + c.right.reach() / c.right.stride + 1) < INT32_MAX;
}

inline Tensor gradient_of_images(const Convolution& c, const Tensor& gradient, const Tensor& x, const Tensor& weight) {
  const int64_t channels = c.x.channels, number = c.x.number, height = c.x.height, width = c.x.width;
  if (joins_images(c, true)) {
    const Tensor result = at::empty(x.sizes(), c.x.type);
    const Operand weights{weight.const_data_ptr(), c.taps(), true, c.x.type, c.x.type};
    const Pixels slopes{gradient.const_data_ptr(), c.x.type, number, c.filters, c.pixels()};
    void* to = result.mutable_data_ptr<void>();
    const bool plain = c.down.plain() && c.right.plain();  // and not one pixel with padding around it
    plain ? multiply_pixels(slopes, weights, channels, nullptr, to) : add_up_pixels(c, slopes, weights, to);
    tidy();
    return result;
  }
  std::vector<float> wide(c.filters * channels * c.each());
  widen(c.x.type, weight.const_data_ptr(), wide.data(), static_cast<int64_t>(wide.size()));
  const Tensor result = at::empty(x.sizes(), c.x.type);
  const auto convolved = [&](const Phase& down, const Phase& right, void* to) {
    const std::vector<float> turned = turned_around(c, wide.data(), down, right);
    const Convolution around{{gradient.const_data_ptr(), c.x.type, number, c.filters, c.down.count, c.right.count},
                             down.along, right.along, channels, down.along.count, right.along.count};
    convolve(around, Operand{turned.data(), around.taps(), false, at::kFloat, at::kFloat}, nullptr, to);
  };
  if (!strided(c)) {
    convolved(phase_of(c.down, 0, height), phase_of(c.right, 0, width), result.mutable_data_ptr<void>());
    tidy();
    return result;
  }
  // The images of one phase after the other, and then their pixels side by side.
  struct Part {
    const uint16_t* pixels;
    int64_t rows, columns;
  };
  const int64_t across = c.right.stride;
  std::vector<Part> parts(c.down.stride * across);
  const Tensor memory = at::empty({result.numel()}, c.x.type);
  uint16_t* next = static_cast<uint16_t*>(memory.mutable_data_ptr<void>());
  for (int64_t i = 0; i < c.down.stride; ++i) {
    const Phase down = phase_of(c.down, i, height);
    for (int64_t j = 0; j < across; ++j) {
      const Phase right = phase_of(c.right, j, width);
      const int64_t values = number * channels * down.along.count * right.along.count;
      parts[i * across + j] = {next, down.along.count, right.along.count};
      if (values > 0 && down.count > 0 && right.count > 0) {
        convolved(down, right, next);
      } else {
        std::fill(next, next + values, 0);
      }
      next += values;
    }
  }
  uint16_t* to = static_cast<uint16_t*>(result.mutable_data_ptr<void>());
  at::parallel_for(0, number * channels, 16, [&](int64_t first, int64_t last) {
    std::vector<const uint16_t*> rows(across);
    for (int64_t plane = first; plane < last; ++plane) {
      for (int64_t y = 0; y < height; ++y) {
        for (int64_t j = 0; j < across; ++j) {
          const Part& part = parts[y % c.down.stride * across + j];
          rows[j] = part.pixels + (plane * part.rows + y / c.down.stride) * part.columns;
        }
        interleave(rows.data(), across, to + (plane * height + y) * width, width);
      }
    }
  });
  tidy();
  return result;
}

// The gradient of the filters, for kernels of one pixel and large images: a product for each image, of which the smaller operand is
// transposed.
inline void gradient_of_pixels(const Convolution& c, const Tensor& gradient, void* to) {
  const int64_t pixels = c.pixels(), channels = c.x.channels, values = c.filters * channels;
  std::vector<float> sums(values), more(values);
  for (int64_t i = 0; i < c.x.number; ++i) {
    const Operand left{advanced(gradient.const_data_ptr(), c.x.type, i * c.filters * pixels), pixels, false, c.x.type, c.x.type};
    const Operand right{advanced(c.x.data, c.x.type, i * channels * pixels), pixels, true, c.x.type, c.x.type};
    multiply_many(left, right, {i == 0 ? sums.data() : more.data(), at::kFloat, channels, nullptr}, c.filters, pixels);
    if (i > 0) add_values(sums.data(), more.data(), values);
  }
  finish(c.x.type, sums.data(), to, values);
}

inline Tensor gradient_of_filters(const Convolution& c, const Tensor& gradient, const Tensor& weight) {
  const Tensor result = at::empty(weight.sizes(), c.x.type);
  void* to = result.mutable_data_ptr<void>();
  if (joins_images(c, true)) {
    multiply_by_pixels({gradient.const_data_ptr(), c.x.type, c.x.number, c.filters, c.pixels()}, Pixels::read_by(c), to);
  } else if (c.down.plain() && c.right.plain() && c.pixels() >= 512) {
    gradient_of_pixels(c, gradient, to);
  } else {
    const int64_t width = Panels(c.filters).vectors * LANES, taps = c.taps();
    float* sums = scratch(SUMS).take(taps * width);
    convolve_weights(c, gradient.const_data_ptr(), sums);
    float* turned = scratch(TURNED).take(c.filters * taps);
    pack(Operand{sums, width, true, at::kFloat, at::kFloat}, 0, 0, c.filters, taps, turned, taps);
    finish(c.x.type, turned, to, c.filters * taps);
  }
  tidy();
  return result;
}

inline Tensor gradient_of_bias(const Convolution& c, const Tensor& gradient) {
  const int64_t each = c.pixels();
  std::vector<float> sums(c.filters);
  for (int64_t i = 0; i < c.x.number * c.filters; ++i) {
    sums[i % c.filters] += total_of(c.x.type, advanced(gradient.const_data_ptr(), c.x.type, i * each), each);
  }
  const Tensor result = at::empty({c.filters}, c.x.type);
  finish(c.x.type, sums.data(), result.mutable_data_ptr<void>(), c.filters);
  return result;
}

}  // namespace amp
