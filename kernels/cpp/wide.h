// Runs an ATen op on low-precision tensors in fp32: low arguments are widened, and each result is rounded once.
#pragma once

#include "convolution.h"

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

inline AtenTensorHandle wide_convolution_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                             Numbers stride, Numbers padding, Numbers dilation, bool transposed,
                                             Numbers output_padding, int64_t groups) {
  const Type low = low_of({&input, &weight});
  const std::optional<Convolution> c = as_products(input, weight, stride, padding, dilation, transposed, groups);
  if (c && pays(*c) && (!bias || bias->scalar_type() != Type::Other)) return convolution_by_products(*c, input, weight, bias).handed_over();
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
  const std::optional<Convolution> c = as_products(input, weight, stride, padding, dilation, transposed, groups);
  const bool known = c && usual_order(gradient) && gradient.scalar_type() == low, own = known && pays(*c);
  std::array<std::optional<Tensor>, 3> made;
  const bool own_images = known && (strided(*c) ? phases_pay(*c) : own) && has_places(*c);
  if (own_images && output_mask[0]) made[0] = gradient_of_images(*c, gradient, input, weight);
  if (own && output_mask[1]) made[1] = gradient_of_filters(*c, gradient, weight);
  if (own && output_mask[2]) made[2] = gradient_of_bias(*c, gradient);
  std::vector<int32_t> left;  // what torch's own kernel has to do
  for (size_t i = 0; i < 3; ++i) left.push_back(output_mask[i] && !made[i]);
  AtenTensorHandle results[3] = {};
  if (left[0] || left[1] || left[2]) {
    Widened wide(low);
    const int64_t* sizes = bias_sizes ? bias_sizes->data() : nullptr;
    succeeds(aoti_torch_cpu_convolution_backward(
        wide(gradient), wide(input), wide(weight), bias_sizes ? &sizes : nullptr, bias_sizes ? bias_sizes->size() : 0,
        stride.data(), stride.size(), padding.data(), padding.size(), dilation.data(), dilation.size(), transposed,
        output_padding.data(), output_padding.size(), groups, left.data(), left.size(), &results[0], &results[1], &results[2]));
    for (AtenTensorHandle& result : results) result = rounded_result(result, low);
  } else {
    for (AtenTensorHandle& result : results) succeeds(aoti_torch_new_uninitialized_tensor(&result));
  }
  for (size_t i = 0; i < 3; ++i) {
    if (!made[i]) continue;
    aoti_torch_delete_tensor_object(results[i]);
    results[i] = std::move(*made[i]).handed_over();
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
