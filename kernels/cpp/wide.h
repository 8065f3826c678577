// Runs an ATen op on low-precision tensors in fp32: low arguments are widened, and each result is rounded once.
#pragma once

#include "depthwise.h"

namespace amp {

// Images of two dimensions, or filters: pixel (y, x) of channel c of image n is number ((n * height + y) * width + x) * channels + c.
inline std::vector<int64_t> channels_last(at::IntArrayRef sizes) {
  const int64_t channels = sizes[1], height = sizes[2], width = sizes[3];
  return {channels * height * width, 1, width * channels, channels};
}

// fp32 tensors for the arguments of one op, of which low ones are widened, each into memory of its own.
class Widened {
 public:
  explicit Widened(Type low) : low_(low) {}

  AtenTensorHandle operator()(const Tensor& x) {
    if (x.scalar_type() != low_) return hold(x);
    const Tensor dense = x.is_non_overlapping_and_dense() ? x : x.contiguous();
    const Tensor wide = room(dense.sizes(), dense.strides());
    float* to = wide.mutable_data_ptr<float>();
    const void* from = dense.const_data_ptr();
    parallel(wide.numel(), [&](int64_t start, int64_t end) { widen(low_, advanced(from, low_, start), to + start, end - start); });
    conversions().add(wide.numel() * static_cast<int64_t>(sizeof(float)));
    return hold(wide);
  }

  // Images in torch's usual order, with their channels last.
  AtenTensorHandle channels_to_the_end(const Tensor& x) {
    const Tensor wide = room(x.sizes(), channels_last(x.sizes()));
    const int64_t channels = x.size(1), pixels = x.size(2) * x.size(3);
    float* to = wide.mutable_data_ptr<float>();
    parallel(wide.numel(), [&](int64_t start, int64_t end) {  // by pixels: those that begin in the part
      for (int64_t i = blocks(start, channels), last = blocks(end, channels); i < last;) {
        const int64_t image = i / pixels, pixel = i % pixels, number = std::min(pixels - pixel, last - i);
        const Operand turned{advanced(x.const_data_ptr(), low_, image * channels * pixels), pixels, true, low_, low_};
        pack(turned, pixel, 0, number, channels, to + i * channels, channels);
        i += number;
      }
    });
    conversions().add(wide.numel() * static_cast<int64_t>(sizeof(float)));
    return hold(wide);
  }

  // What is read for its sizes and strides only.
  AtenTensorHandle shape(const Tensor& x, bool last) {
    if (last) return hold(room(x.sizes(), channels_last(x.sizes())));
    return hold(x.is_non_overlapping_and_dense() ? room(x.sizes(), x.strides()) : room(x.sizes(), at::contiguous_strides(x.sizes())));
  }

 private:
  AtenTensorHandle hold(const Tensor& x) {
    held_.push_back(x);
    return held_.back().get();
  }
  Tensor room(at::IntArrayRef sizes, at::IntArrayRef strides) {
    thread_local std::vector<Scratch> pieces;
    if (pieces.size() <= held_.size()) pieces.resize(held_.size() + 1);
    int64_t n = 1;
    for (int64_t size : sizes) n *= size;
    if (n * static_cast<int64_t>(sizeof(float)) > KEPT) return at::empty_strided(sizes, strides, at::kFloat);
    return at::from_blob(pieces[held_.size()].take(n), sizes, strides, at::kFloat);
  }

  Type low_;
  std::vector<Tensor> held_;
};

inline Tensor narrowed(const Tensor& x, Type low) {
  const Tensor dense = x.is_non_overlapping_and_dense() ? x : x.contiguous();
  Tensor result = at::empty_strided(dense.sizes(), dense.strides(), low);
  const float* from = dense.const_data_ptr<float>();
  conversions().add(dense.numel() * bytes_of(low));
  void* to = result.mutable_data_ptr<void>();
  parallel(dense.numel(), [&](int64_t start, int64_t end) { finish(low, from + start, advanced(to, low, start), end - start); });
  return result;
}

// The same of images or filters whose channels are last: the result has torch's usual order.
inline Tensor narrowed_from_last(const Tensor& x, Type low) {
  const std::vector<int64_t> last = channels_last(x.sizes());
  if (!std::equal(last.begin(), last.end(), x.strides().begin())) return narrowed(x.contiguous(), low);
  constexpr int64_t LINES = 16, PIXELS = 256;
  const Tensor result = at::empty(x.sizes(), low);
  const int64_t channels = x.size(1), pixels = x.size(2) * x.size(3), groups = blocks(channels, LINES);
  const float* from = x.const_data_ptr<float>();
  void* to = result.mutable_data_ptr<void>();
  const auto run = [&](int64_t start, int64_t end) {
    float lines[LINES * PIXELS];
    for (int64_t i = start; i < end; ++i) {
      const int64_t image = i / groups, first = i % groups * LINES, number = std::min(LINES, channels - first);
      const Operand turned{from + image * channels * pixels, channels, true, at::kFloat, at::kFloat};
      for (int64_t pixel = 0; pixel < pixels; pixel += PIXELS) {
        const int64_t some = std::min(PIXELS, pixels - pixel);
        pack(turned, first, pixel, number, some, lines, PIXELS);
        finish(low, lines, PIXELS, nullptr, advanced(to, low, (image * channels + first) * pixels + pixel), pixels, number, some);
      }
    }
  };
  const int64_t parts = x.size(0) * groups;
  x.numel() <= GRAIN || at::get_num_threads() == 1 ? run(0, parts) : at::parallel_for(0, parts, 1, run);
  conversions().add(x.numel() * bytes_of(low));
  return result;
}

// A result, which may be undefined.
inline AtenTensorHandle rounded_result(AtenTensorHandle result, Type low, bool last = false) {
  bool defined = false;
  succeeds(aoti_torch_is_defined(result, &defined));
  if (!defined) return result;
  const Tensor wide(result);
  return (last && wide.dim() == 4 ? narrowed_from_last(wide, low) : narrowed(wide, low)).handed_over();
}

// The first low dtype among the tensors.
inline Type low_of(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* tensor : tensors) {
    if (tensor->scalar_type() == at::kHalf || tensor->scalar_type() == at::kBFloat16) return tensor->scalar_type();
  }
  fail("ops computed in fp32 between two roundings are for float16 and bfloat16 tensors");
}

inline AtenTensorHandle wide_convolution_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                             Numbers stride, Numbers padding, Numbers dilation, bool transposed,
                                             Numbers output_padding, int64_t groups) {
  const Type low = low_of({&input, &weight});
  const std::optional<Convolution> known = described(input, weight, stride, padding, dilation, transposed, groups);
  const bool own = known && (!bias || bias->scalar_type() != Type::Other);
  if (own && groups > 1 && planes_pay(*known)) return depthwise_convolution(*known, input, weight, bias).handed_over();
  const std::optional<Convolution> c = groups == 1 ? known : std::nullopt;
  if (own && c && pays(*c, false)) return convolution_by_products(*c, input, weight, bias).handed_over();
  Widened wide(low);
  const bool last = c && last_pays(*c);
  AtenTensorHandle result = nullptr, plus = bias ? wide(*bias) : nullptr;
  const AtenTensorHandle images = last ? wide.channels_to_the_end(input) : wide(input);
  succeeds(aoti_torch_cpu_convolution(images, wide(weight), plus ? &plus : nullptr, stride.data(), stride.size(),
                                      padding.data(), padding.size(), dilation.data(), dilation.size(), transposed,
                                      output_padding.data(), output_padding.size(), groups, &result));
  return rounded_result(result, low, last);
}

inline std::tuple<AtenTensorHandle, AtenTensorHandle, AtenTensorHandle> wide_convolution_backward_cpu(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, const std::optional<std::vector<int64_t>>& bias_sizes,
    Numbers stride, Numbers padding, Numbers dilation, bool transposed, Numbers output_padding, int64_t groups,
    const std::vector<bool>& output_mask) {
  const Type low = low_of({&gradient, &input, &weight});
  const std::optional<Convolution> c = described(input, weight, stride, padding, dilation, transposed, groups);
  const bool usual = c && usual_order(gradient) && gradient.scalar_type() == low, known = usual && groups == 1;
  const bool own = known && pays(*c, true), planes = usual && groups > 1 && !strided(*c);
  const bool own_images = known && (strided(*c) ? phases_pay(*c) : own) && has_places(*c);
  AtenTensorHandle results[3] = {};
  Widened wide(low);
  struct {
    AtenTensorHandle gradient, images;
  } orders[2] = {};  // in torch's usual order, and with channels last
  AtenTensorHandle filters = nullptr;
  // torch's own kernel, for the results of a mask. Its copies of the images are the most memory that a step of a network holds.
  const auto by_torch = [&](const std::array<int32_t, 3>& mask, bool last) {
    auto& given = orders[last];
    const auto fill = [&](AtenTensorHandle& to, const Tensor& x) {
      if (!to) to = last ? wide.channels_to_the_end(x) : wide(x);
    };
    fill(given.gradient, gradient);
    if (mask[1]) fill(given.images, input);
    if (!given.images) given.images = wide.shape(input, last);
    if (!filters) filters = wide(weight);
    const int64_t* sizes = bias_sizes ? bias_sizes->data() : nullptr;
    std::array<AtenTensorHandle, 3> found = {};
    succeeds(aoti_torch_cpu_convolution_backward(
        given.gradient, given.images, filters, bias_sizes ? &sizes : nullptr, bias_sizes ? bias_sizes->size() : 0, stride.data(),
        stride.size(), padding.data(), padding.size(), dilation.data(), dilation.size(), transposed, output_padding.data(),
        output_padding.size(), groups, mask.data(), mask.size(), &found[0], &found[1], &found[2]));
    for (size_t i = 0; i < 3; ++i) {
      if (mask[i]) results[i] = rounded_result(found[i], low, last);
      else aoti_torch_delete_tensor_object(found[i]);
    }
  };
  // The images' gradient comes last: it is as large as all that the others need.
  if (planes) {
    if (output_mask[1]) results[1] = depthwise_gradient_of_filters(*c, gradient, weight).handed_over();
    if (output_mask[2]) results[2] = gradient_of_bias(*c, gradient).handed_over();
  } else if (own) {
    if (output_mask[1]) results[1] = gradient_of_filters(*c, gradient, weight).handed_over();
    if (output_mask[2]) results[2] = gradient_of_bias(*c, gradient).handed_over();
  } else if (output_mask[1] || output_mask[2]) {
    by_torch({0, output_mask[1], output_mask[2]}, known && filters_last_pays(*c));
  }
  if (output_mask[0]) {
    if (planes && turned_planes_pay(*c)) results[0] = depthwise_gradient_of_images(*c, gradient, input, weight).handed_over();
    else if (own_images) results[0] = gradient_of_images(*c, gradient, input, weight).handed_over();
    else by_torch({1, 0, 0}, known && last_pays(*c));
  }
  for (AtenTensorHandle& result : results) {
    if (!result) succeeds(aoti_torch_new_uninitialized_tensor(&result));
  }
  return {results[0], results[1], results[2]};
}

inline AtenTensorHandle wide_baddbmm_cpu(const Tensor& plus, const Tensor& a, const Tensor& b, double beta, double alpha) {
  const Type low = low_of({&plus, &a, &b});
  Widened wide(low);
  const Tensor sums = at::empty({a.size(0), a.size(1), b.size(2)}, at::kFloat);
  succeeds(aoti_torch_cpu_baddbmm_out(sums.get(), wide(plus), wide(a), wide(b), beta, alpha));
  return narrowed(sums, low).handed_over();
}

}  // namespace amp
