// Runs an ATen op on low-precision tensors in fp32: low arguments are widened, and each result is rounded once.
#pragma once

#include "boxed.h"
#include "cast_matmul.h"

namespace amp {

template <class Low>
Tensor widened(size_t slot, const Tensor& x) {
  thread_local std::vector<Scratch> pieces;
  if (pieces.size() <= slot) pieces.resize(slot + 1);
  const Tensor dense = x.is_non_overlapping_and_dense() ? x : x.contiguous();
  const int64_t n = dense.numel();
  if (n * static_cast<int64_t>(sizeof(float)) > KEPT) return dense.to(at::kFloat);
  float* to = pieces[slot].take(n);
  const Low* from = dense.const_data_ptr<Low>();
  conversions().add(n * static_cast<int64_t>(sizeof(float)));
  parallel(n, [&](int64_t start, int64_t end) { widen(from + start, to + start, end - start); });
  return at::from_blob(to, dense.sizes(), dense.strides(), dense.options().dtype(at::kFloat));
}

template <class Low>
Tensor narrowed(const Tensor& x) {
  const Tensor dense = x.is_non_overlapping_and_dense() ? x : x.contiguous();
  Tensor result = at::empty_strided(dense.sizes(), dense.strides(), dense.options().dtype(c10::CppTypeToScalarType<Low>::value));
  const float* from = dense.const_data_ptr<float>();
  conversions().add(dense.numel() * static_cast<int64_t>(sizeof(Low)));
  Low* to = result.template mutable_data_ptr<Low>();
  parallel(dense.numel(), [&](int64_t start, int64_t end) { finish<Low>(from + start, nullptr, to + start, end - start); });
  return result;
}

// The arguments of an op in fp32: low ones are widened, each into memory of its own.
template <class Low>
class Widened {
 public:
  AtenTensorHandle operator()(const Tensor& x) {
    const bool low = x.scalar_type() == c10::CppTypeToScalarType<Low>::value;
    held_.push_back(low ? widened<Low>(held_.size(), x) : x);
    return held_.back().get();
  }

 private:
  std::vector<Tensor> held_;
};

// A result, which may be undefined.
template <class Low>
AtenTensorHandle rounded_result(AtenTensorHandle result) {
  bool defined = false;
  succeeds(aoti_torch_is_defined(result, &defined));
  return defined ? narrowed<Low>(Tensor(result)).handed_over() : result;
}

// Calls run with a zero of the first low dtype among the tensors.
template <class F>
auto for_low(std::initializer_list<const Tensor*> tensors, const F& run) {
  for (const Tensor* tensor : tensors) {
    if (tensor->scalar_type() == at::kHalf) return run(c10::Half());
    if (tensor->scalar_type() == at::kBFloat16) return run(c10::BFloat16());
  }
  fail("ops computed in fp32 between two roundings are for float16 and bfloat16 tensors");
}

using Numbers = const std::vector<int64_t>&;

inline AtenTensorHandle wide_convolution_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                             Numbers stride, Numbers padding, Numbers dilation, bool transposed,
                                             Numbers output_padding, int64_t groups) {
  return for_low({&input, &weight}, [&](auto zero) {
    Widened<decltype(zero)> wide;
    AtenTensorHandle result = nullptr, plus = bias ? wide(*bias) : nullptr;
    succeeds(aoti_torch_cpu_convolution(wide(input), wide(weight), plus ? &plus : nullptr, stride.data(), stride.size(),
                                        padding.data(), padding.size(), dilation.data(), dilation.size(), transposed,
                                        output_padding.data(), output_padding.size(), groups, &result));
    return rounded_result<decltype(zero)>(result);
  });
}

inline std::tuple<AtenTensorHandle, AtenTensorHandle, AtenTensorHandle> wide_convolution_backward_cpu(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, const std::optional<std::vector<int64_t>>& bias_sizes,
    Numbers stride, Numbers padding, Numbers dilation, bool transposed, Numbers output_padding, int64_t groups,
    const std::vector<bool>& output_mask) {
  return for_low({&gradient, &input, &weight}, [&](auto zero) {
    using Low = decltype(zero);
    Widened<Low> wide;
    const std::vector<int32_t> mask(output_mask.begin(), output_mask.end());
    const int64_t* sizes = bias_sizes ? bias_sizes->data() : nullptr;
    AtenTensorHandle made[3] = {};
    succeeds(aoti_torch_cpu_convolution_backward(
        wide(gradient), wide(input), wide(weight), bias_sizes ? &sizes : nullptr, bias_sizes ? bias_sizes->size() : 0,
        stride.data(), stride.size(), padding.data(), padding.size(), dilation.data(), dilation.size(), transposed,
        output_padding.data(), output_padding.size(), groups, mask.data(), mask.size(), &made[0], &made[1], &made[2]));
    return std::tuple(rounded_result<Low>(made[0]), rounded_result<Low>(made[1]), rounded_result<Low>(made[2]));
  });
}

inline AtenTensorHandle wide_baddbmm_cpu(const Tensor& plus, const Tensor& a, const Tensor& b, double beta, double alpha) {
  return for_low({&plus, &a, &b}, [&](auto zero) {
    Widened<decltype(zero)> wide;
    const Tensor sums = at::empty({a.size(0), a.size(1), b.size(2)}, at::kFloat);
    succeeds(aoti_torch_cpu_baddbmm_out(sums.get(), wide(plus), wide(a), wide(b), beta, alpha));
    return narrowed<decltype(zero)>(sums).handed_over();
  });
}

}  // namespace amp
