// Runs an ATen op on low-precision tensors in fp32: low arguments are widened, and each result is rounded once.
#pragma once

#include "pointwise.h"

namespace amp {

inline Tensor widened(size_t slot, const Tensor& x) {
  thread_local std::vector<Scratch> pieces;
  if (pieces.size() <= slot) pieces.resize(slot + 1);
  const Tensor dense = x.is_non_overlapping_and_dense() ? x : x.contiguous();
  const int64_t n = dense.numel();
  if (n * static_cast<int64_t>(sizeof(float)) > KEPT) return dense.to(at::kFloat);
  float* to = pieces[slot].take(n);
  const Type type = dense.scalar_type();
  const void* from = dense.const_data_ptr();
  conversions().add(n * static_cast<int64_t>(sizeof(float)));
  parallel(n, [&](int64_t start, int64_t end) { widen(type, advanced(from, type, start), to + start, end - start); });
  return at::from_blob(to, dense.sizes(), dense.strides(), at::kFloat);
}

inline Tensor narrowed(const Tensor& x, Type low) {
  const Tensor dense = x.is_non_overlapping_and_dense() ? x : x.contiguous();
  Tensor result = at::empty_strided(dense.sizes(), dense.strides(), low);
  const float* from = dense.const_data_ptr<float>();
  conversions().add(dense.numel() * bytes_of(low));
  void* to = result.mutable_data_ptr<void>();
  parallel(dense.numel(), [&](int64_t start, int64_t end) { finish(low, from + start, advanced(to, low, start), end - start); });
  return result;
}

// The arguments of an op in fp32: low ones are widened, each into memory of its own.
class Widened {
 public:
  explicit Widened(Type low) : low_(low) {}
  AtenTensorHandle operator()(const Tensor& x) {
    held_.push_back(x.scalar_type() == low_ ? widened(held_.size(), x) : x);
    return held_.back().get();
  }

 private:
  Type low_;
  std::vector<Tensor> held_;
};

// A result, which may be undefined.
inline AtenTensorHandle rounded_result(AtenTensorHandle result, Type low) {
  bool defined = false;
  succeeds(aoti_torch_is_defined(result, &defined));
  return defined ? narrowed(Tensor(result), low).handed_over() : result;
}

// The first low dtype among the tensors.
inline Type low_of(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* tensor : tensors) {
    if (tensor->scalar_type() == at::kHalf || tensor->scalar_type() == at::kBFloat16) return tensor->scalar_type();
  }
  fail("ops computed in fp32 between two roundings are for float16 and bfloat16 tensors");
}

using Numbers = const std::vector<int64_t>&;

inline AtenTensorHandle wide_convolution_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                             Numbers stride, Numbers padding, Numbers dilation, bool transposed,
                                             Numbers output_padding, int64_t groups) {
  const Type low = low_of({&input, &weight});
  const bool plain = !transposed && groups == 1 && input.dim() > 2 && all_are(stride, 1) && all_are(padding, 0);
  const std::optional<Images> x = plain && !bias ? images(input) : std::nullopt;
  if (x && fits(weight, *x)) return pointwise(input, *x, weight).handed_over();
  Widened wide(low);
  AtenTensorHandle result = nullptr, plus = bias ? wide(*bias) : nullptr;
  succeeds(aoti_torch_cpu_convolution(wide(input), wide(weight), plus ? &plus : nullptr, stride.data(), stride.size(),
                                      padding.data(), padding.size(), dilation.data(), dilation.size(), transposed,
                                      output_padding.data(), output_padding.size(), groups, &result));
  return rounded_result(result, low);
}

inline std::tuple<AtenTensorHandle, AtenTensorHandle, AtenTensorHandle> wide_convolution_backward_cpu(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, const std::optional<std::vector<int64_t>>& bias_sizes,
    Numbers stride, Numbers padding, Numbers dilation, bool transposed, Numbers output_padding, int64_t groups,
    const std::vector<bool>& output_mask) {
  const Type low = low_of({&gradient, &input, &weight});
  const bool plain = !transposed && groups == 1 && input.dim() > 2 && all_are(stride, 1) && all_are(padding, 0);
  const std::optional<Images> x = plain && !output_mask[2] ? images(input) : std::nullopt;
  const std::optional<Images> g = x ? images(gradient) : std::nullopt;
  if (g && g->last == x->last && g->type == x->type && fits(weight, *x)) {
    const auto given = [](std::optional<Tensor>& made) {
      AtenTensorHandle none = nullptr;
      if (!made) succeeds(aoti_torch_new_uninitialized_tensor(&none));
      return made ? std::move(*made).handed_over() : none;
    };
    auto [of_input, of_weight] = pointwise_backward(*g, input, *x, weight, output_mask[0], output_mask[1]);
    std::optional<Tensor> none;
    return {given(of_input), given(of_weight), given(none)};
  }
  Widened wide(low);
  const std::vector<int32_t> mask(output_mask.begin(), output_mask.end());
  const int64_t* sizes = bias_sizes ? bias_sizes->data() : nullptr;
  AtenTensorHandle made[3] = {};
  succeeds(aoti_torch_cpu_convolution_backward(
      wide(gradient), wide(input), wide(weight), bias_sizes ? &sizes : nullptr, bias_sizes ? bias_sizes->size() : 0,
      stride.data(), stride.size(), padding.data(), padding.size(), dilation.data(), dilation.size(), transposed,
      output_padding.data(), output_padding.size(), groups, mask.data(), mask.size(), &made[0], &made[1], &made[2]));
  return {rounded_result(made[0], low), rounded_result(made[1], low), rounded_result(made[2], low)};
}

inline AtenTensorHandle wide_baddbmm_cpu(const Tensor& plus, const Tensor& a, const Tensor& b, double beta, double alpha) {
  const Type low = low_of({&plus, &a, &b});
  Widened wide(low);
  const Tensor sums = at::empty({a.size(0), a.size(1), b.size(2)}, at::kFloat);
  succeeds(aoti_torch_cpu_baddbmm_out(sums.get(), wide(plus), wide(a), wide(b), beta, alpha));
  return narrowed(sums, low).handed_over();
}

}  // namespace amp
