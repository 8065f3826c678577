// Convolutions with kernels of one pixel, as products: the pixels of a chunk are widened into memory that stays in the cache and
// multiplied by torch's own fp32 product; nothing is widened as a whole. Sums are fp32's, and each result is rounded once.
#pragma once

#include "scratch.h"

namespace amp {

constexpr int64_t CHUNK_VALUES = int64_t(1) << 17;  // fp32 values of a chunk, inputs and outputs: half an L2
constexpr int64_t SHORTEST = 512;                   // pixels of a chunk

// Images in memory: each channel's pixels side by side, or, if `last`, each pixel's channels.
struct Images {
  const void* data;
  Type type;
  int64_t number, channels, pixels;
  bool last;
};

inline bool same(at::IntArrayRef a, at::IntArrayRef b) {
  bool equal = a.size() == b.size();
  for (size_t i = 0; equal && i < a.size(); ++i) equal = a[i] == b[i];
  return equal;
}

inline std::vector<int64_t> channels_last_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t step = sizes[1];
  for (size_t i = sizes.size(); i-- > 2; step *= sizes[i]) strides[i] = step;
  strides[0] = step;
  return strides;
}

// x as images, if it is dense and either order is the only one that its strides allow.
inline std::optional<Images> images(const Tensor& x) {
  const at::IntArrayRef sizes = x.sizes();
  const bool first = same(x.strides(), at::contiguous_strides(sizes)), last = same(x.strides(), channels_last_strides(sizes));
  if (first == last || x.numel() == 0) return std::nullopt;
  return Images{x.const_data_ptr(), x.scalar_type(), sizes[0], sizes[1], x.numel() / (sizes[0] * sizes[1]), last};
}

inline bool all_are(const std::vector<int64_t>& numbers, int64_t value) {
  for (int64_t number : numbers) {
    if (number != value) return false;
  }
  return true;
}

// Whether a weight is one of single pixels, and dense in the order of the images, so that torch's convolution would return them
// in that order too.
inline bool fits(const Tensor& weight, const Images& x) {
  const at::IntArrayRef sizes = weight.sizes();
  for (size_t i = 2; i < sizes.size(); ++i) {
    if (sizes[i] != 1) return false;
  }
  return weight.numel() > 0 && sizes[1] == x.channels && weight.scalar_type() == x.type &&
         (same(weight.strides(), at::contiguous_strides(sizes)) ||
          (x.last && same(weight.strides(), channels_last_strides(sizes))));
}

// Calls f(image, pixel, count, width, turn) for every piece of every chunk: `count` images from `image` on, `width` pixels of
// each from `pixel` on.
template <class F>
void in_chunks(const Images& x, int64_t channels, const F& f) {
  const int64_t size = std::max(CHUNK_VALUES / channels, SHORTEST), count = std::max<int64_t>(size / x.pixels, 1);
  for (int64_t image = 0; image < x.number; image += count) {
    const int64_t some = std::min(count, x.number - image), width = some > 1 ? x.pixels : std::min(size, x.pixels);
    for (int64_t pixel = 0; pixel < x.pixels; pixel += width) f(image, pixel, some, std::min(width, x.pixels - pixel));
  }
}

// A chunk in fp32, as a matrix of channels and pixels.
inline Tensor widened_chunk(Use use, const Images& x, int64_t image, int64_t pixel, int64_t count, int64_t width) {
  const int64_t all = count * width;
  float* to = scratch(use).take(x.channels * all);
  if (x.last) {
    const void* from = advanced(x.data, x.type, (image * x.pixels + pixel) * x.channels);
    parallel(all * x.channels, [&](int64_t start, int64_t end) {
      widen(x.type, advanced(from, x.type, start), to + start, end - start);
    });
    return at::from_blob(to, {x.channels, all}, {1, x.channels}, at::kFloat);
  }
  at::parallel_for(0, x.channels, std::max<int64_t>(GRAIN / all, 1), [&](int64_t first, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
      const void* from = advanced(x.data, x.type, ((image + i) * x.channels + first) * x.pixels + pixel);
      widen(x.type, from, x.pixels, to + first * all + i * width, all, end - first, width);
    }
  });
  return at::from_blob(to, {x.channels, all}, at::kFloat);
}

// Memory for the sums of a chunk, as a matrix of channels and pixels, and the way from there to the images.
inline Tensor chunk_sums(const Images& x, int64_t count, int64_t width) {
  const int64_t all = count * width;
  float* sums = scratch(SUMS).take(x.channels * all);
  return x.last ? at::from_blob(sums, {x.channels, all}, {1, x.channels}, at::kFloat)
                : at::from_blob(sums, {x.channels, all}, at::kFloat);
}
inline void write_chunk(const Tensor& sums, const Images& x, int64_t image, int64_t pixel, int64_t count, int64_t width) {
  const int64_t all = count * width;
  const float* from = sums.const_data_ptr<float>();
  void* to = const_cast<void*>(x.data);
  if (x.last) {
    void* start = advanced(to, x.type, (image * x.pixels + pixel) * x.channels);
    return parallel(all * x.channels, [&](int64_t i, int64_t end) {
      finish(x.type, from + i, advanced(start, x.type, i), end - i);
    });
  }
  at::parallel_for(0, x.channels, std::max<int64_t>(GRAIN / all, 1), [&](int64_t first, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
      void* start = advanced(to, x.type, ((image + i) * x.channels + first) * x.pixels + pixel);
      finish(x.type, from + first * all + i * width, all, nullptr, start, x.pixels, end - first, width);
    }
  });
}

// New images with other channels.
inline Tensor empty_images(const Tensor& like, int64_t channels, bool last) {
  std::vector<int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes[1] = channels;
  return at::empty_strided(sizes, last ? channels_last_strides(sizes) : at::contiguous_strides(sizes), like.options());
}

// A weight in fp32, as a matrix of output and input channels.
inline Tensor widened_weight(const Tensor& weight) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  float* to = scratch(BIAS).take(outputs * inputs);
  widen(weight.scalar_type(), weight.const_data_ptr(), to, outputs * inputs);
  return at::from_blob(to, {outputs, inputs}, at::kFloat);
}

inline Tensor pointwise(const Tensor& input, const Images& x, const Tensor& weight) {
  const int64_t outputs = weight.size(0);
  const Tensor result = empty_images(input, outputs, x.last), wide = widened_weight(weight);
  const Images to{result.mutable_data_ptr<void>(), x.type, x.number, outputs, x.pixels, x.last};
  in_chunks(x, x.channels + outputs, [&](int64_t image, int64_t pixel, int64_t count, int64_t width) {
    Tensor sums = chunk_sums(to, count, width);
    at::mm_out(sums, wide, widened_chunk(RIGHT, x, image, pixel, count, width));
    write_chunk(sums, to, image, pixel, count, width);
  });
  tidy();
  return result;
}

// The gradients of input and weight, each if it is wanted.
inline std::pair<std::optional<Tensor>, std::optional<Tensor>> pointwise_backward(
    const Images& g, const Tensor& input, const Images& x, const Tensor& weight, bool of_input, bool of_weight) {
  std::optional<Tensor> given, sums;
  if (of_input) given = empty_images(input, x.channels, x.last);
  if (of_weight) sums = at::empty({g.channels, x.channels}, at::kFloat);
  const Images to{of_input ? given->mutable_data_ptr<void>() : nullptr, x.type, x.number, x.channels, x.pixels, x.last};
  const Tensor turned = widened_weight(weight).transpose(0, 1);
  bool begun = false;
  in_chunks(x, x.channels + g.channels, [&](int64_t image, int64_t pixel, int64_t count, int64_t width) {
    const Tensor gradient = widened_chunk(LEFT, g, image, pixel, count, width);
    if (of_input) {
      Tensor chunk = chunk_sums(to, count, width);
      at::mm_out(chunk, turned, gradient);
      write_chunk(chunk, to, image, pixel, count, width);
    }
    if (of_weight) {
      const Tensor values = widened_chunk(RIGHT, x, image, pixel, count, width).transpose(0, 1);
      begun ? at::addmm_out(*sums, *sums, gradient, values) : at::mm_out(*sums, gradient, values);
      begun = true;
    }
  });
  tidy();
  if (of_weight) {
    const Tensor rounded = at::empty_strided(weight.sizes(), weight.strides(), weight.options());
    finish(x.type, sums->const_data_ptr<float>(), rounded.mutable_data_ptr<void>(), rounded.numel());
    sums = rounded;
  }
  return {given, sums};
}

}  // namespace amp
