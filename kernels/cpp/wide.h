// Runs an ATen op on low-precision tensors in fp32: low arguments are widened, and each result is rounded once. One
// function serves all such ops: it gets arguments and results as a stack, and finds the ATen op by its own name.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <mutex>
#include <string>
#include <unordered_map>

#include <ATen/ops/empty_strided.h>

#include "cast_matmul.h"

namespace amp {

// amp::wide_x replaces aten::x, or aten::_x.
inline const c10::OperatorHandle& narrow_form(const std::string& name) {
  static std::unordered_map<std::string, c10::OperatorHandle> known;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  const std::string base = name.substr(name.find("wide_") + 5);
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto plain = dispatcher.findSchema({"aten::" + base, ""});
  const auto op = plain.has_value() ? *plain : dispatcher.findSchemaOrThrow(("aten::_" + base).c_str(), "");
  return known.emplace(name, op).first->second;
}

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

template <class Low>
void run_wide(const c10::OperatorHandle& op, size_t arguments, torch::jit::Stack* stack) {
  constexpr auto low = c10::CppTypeToScalarType<Low>::value;
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = torch::jit::peek(*stack, i, arguments);
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == low) {
      value = widened<Low>(i, value.toTensor());
    }
  }
  op.callBoxed(stack);
  const size_t results = op.schema().returns().size();
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& value = torch::jit::peek(*stack, i, results);
    const bool rounds = value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kFloat;
    if (rounds) value = narrowed<Low>(value.toTensor());
  }
}

inline void wide_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const c10::OperatorHandle& form = narrow_form(op.schema().name());
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments);
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto dtype = value.toTensor().scalar_type();
    if (dtype == at::kHalf) return run_wide<c10::Half>(form, arguments, stack);
    if (dtype == at::kBFloat16) return run_wide<c10::BFloat16>(form, arguments, stack);
  }
  TORCH_CHECK(false, op.schema().name(), " is for float16 and bfloat16 tensors");
}

}  // namespace amp
