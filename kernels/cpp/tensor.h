// The part of torch's C++ API that the kernels use, under the names that it has there, over torch's stable C functions
// (torch_c.h). `amp::at::Tensor` owns a handle of a tensor; an error in torch becomes an exception.
// Headers of the standard library are few: with <string>, <memory> and <algorithm>, compiling takes a third longer.
#pragma once

#include <array>
#include <atomic>
#include <exception>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "loops.h"
#include "torch_c.h"

namespace amp {

// An error, and its text, which is put together from parts.
class Error : public std::exception {
 public:
  const char* what() const noexcept override { return text_.data(); }
  void add(const char* part) {
    for (; *part; ++part) text_.insert(text_.end() - 1, *part);
  }
  void add(int64_t part) {
    if (part > 9) add(part / 10);
    const char digit[2] = {static_cast<char>('0' + part % 10), 0};
    add(digit);
  }
  void add(Type part) {
    add(part == at::kFloat ? "float32" : part == at::kHalf ? "float16" : part == at::kBFloat16 ? "bfloat16" : "another dtype");
  }
  template <class Numbers>
  void add(const Numbers& part) {
    for (const int64_t& number : part) {
      add(&number == part.begin() ? "[" : ", ");
      add(number);
    }
    add(part.size() == 0 ? "[]" : "]");
  }

 private:
  std::vector<char> text_{0};
};

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Parts&... parts) {
  Error error;
  (error.add(parts), ...);
  throw error;
}

inline void succeeds(AOTITorchError error) {
  if (__builtin_expect(error != 0, 0)) fail(torch_exception_get_what_without_backtrace());
}

namespace at {

// Between these names and torch's numbers.
inline int32_t torch_dtype(ScalarType dtype) {
  return dtype == kFloat ? aoti_torch_dtype_float32() : dtype == kHalf ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
}
inline ScalarType scalar_type(int32_t dtype) {
  return dtype == aoti_torch_dtype_float32()    ? kFloat
         : dtype == aoti_torch_dtype_float16()  ? kHalf
         : dtype == aoti_torch_dtype_bfloat16() ? kBFloat16
                                                : ScalarType::Other;
}

class IntArrayRef {
 public:
  IntArrayRef(const int64_t* data, size_t size) : data_(data), size_(size) {}
  IntArrayRef(std::initializer_list<int64_t> values) : IntArrayRef(values.begin(), values.size()) {}
  IntArrayRef(const std::vector<int64_t>& values) : IntArrayRef(values.data(), values.size()) {}
  const int64_t* data() const { return data_; }
  size_t size() const { return size_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }
  int64_t operator[](size_t i) const { return data_[i]; }

 private:
  const int64_t* data_;
  size_t size_;
};

inline std::vector<int64_t> contiguous_strides(IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  return strides;
}

struct TensorOptions {
  ScalarType type;
  TensorOptions(ScalarType type) : type(type) {}
  TensorOptions dtype(ScalarType other) const { return other; }
};

class Tensor;
Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, TensorOptions options);

// A tensor of torch. Copies share one handle, and what does not change is asked for once.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle taken) : shared_(new Shared{taken}) {
    succeeds(aoti_torch_get_dim(taken, &shared_->dim));
    succeeds(aoti_torch_get_sizes(taken, &shared_->sizes));
    int32_t dtype = 0;
    succeeds(aoti_torch_get_dtype(taken, &dtype));
    shared_->dtype = at::scalar_type(dtype);
  }
  Tensor(Tensor&& other) noexcept : shared_(std::exchange(other.shared_, nullptr)) {}
  Tensor(const Tensor& other) noexcept : shared_(other.shared_) { shared_->owners.fetch_add(1, std::memory_order_relaxed); }
  Tensor& operator=(Tensor other) noexcept {
    std::swap(shared_, other.shared_);
    return *this;
  }
  ~Tensor() {
    if (shared_ && shared_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      aoti_torch_delete_tensor_object(shared_->handle);
      delete shared_;
    }
  }

  AtenTensorHandle get() const { return shared_->handle; }
  // A handle that somebody else will delete.
  AtenTensorHandle handed_over() && {
    AtenTensorHandle result = nullptr;
    if (shared_->owners.load(std::memory_order_acquire) == 1) {
      result = shared_->handle;
      delete std::exchange(shared_, nullptr);
    } else {
      succeeds(aoti_torch_new_tensor_handle(get(), &result));
    }
    return result;
  }

  int64_t dim() const { return shared_->dim; }
  int64_t numel() const { return ask<int64_t>(aoti_torch_get_numel); }
  bool is_contiguous() const { return ask<bool>(aoti_torch_is_contiguous); }
  bool is_cpu() const { return ask<int32_t>(aoti_torch_get_device_type) == aoti_torch_device_type_cpu(); }
  bool is_strided() const { return ask<int32_t>(aoti_torch_get_layout) == aoti_torch_layout_strided(); }
  ScalarType scalar_type() const { return shared_->dtype; }
  TensorOptions options() const { return scalar_type(); }
  IntArrayRef sizes() const { return {shared_->sizes, static_cast<size_t>(dim())}; }
  IntArrayRef strides() const { return {ask<int64_t*>(aoti_torch_get_strides), static_cast<size_t>(dim())}; }
  int64_t size(int64_t d) const { return sizes()[d < 0 ? d + dim() : d]; }
  int64_t stride(int64_t d) const { return strides()[d < 0 ? d + dim() : d]; }

  const void* const_data_ptr() const { return ask<const void*>(torch_get_const_data_ptr); }
  template <class T>
  const T* const_data_ptr() const { return static_cast<const T*>(const_data_ptr()); }
  template <class T>
  T* mutable_data_ptr() const { return static_cast<T*>(ask<void*>(torch_get_mutable_data_ptr)); }
  float item() const { return ask<float>(aoti_torch_item_float32); }

  bool is_non_overlapping_and_dense() const {
    if (is_contiguous()) return true;
    const IntArrayRef lengths = sizes(), steps = strides();
    std::vector<bool> seen(lengths.size());
    int64_t expected = 1;
    for (size_t found = 0; found < lengths.size(); ++found) {  // dimensions from the innermost to the outermost
      size_t next = lengths.size();
      for (size_t i = 0; i < lengths.size(); ++i) {
        if (!seen[i] && (lengths[i] == 1 || steps[i] == expected)) next = i;
      }
      if (next == lengths.size()) return false;
      seen[next] = true;
      expected *= lengths[next];
    }
    return true;
  }

  // The same memory, seen in another way; `offset` counts from this tensor's first element.
  Tensor seen_as(IntArrayRef sizes, IntArrayRef strides, int64_t offset = 0) const {
    AtenTensorHandle result = nullptr;
    succeeds(aoti_torch__reinterpret_tensor(get(), sizes.size(), sizes.data(), strides.data(), offset, &result));
    return Tensor(result);
  }
  Tensor view(IntArrayRef sizes) const { return seen_as(sizes, contiguous_strides(sizes)); }
  // The first two of three dimensions as one: a view where the memory allows it.
  Tensor reshape(IntArrayRef to) const {
    const IntArrayRef from = sizes(), steps = strides();
    const bool merges = from.size() == 3 && to.size() == 2 && to[1] == from[2];
    if (merges && from[1] == 1) return seen_as(to, {steps[0], steps[2]});
    if (merges && (from[0] == 1 || steps[0] == from[1] * steps[1])) return seen_as(to, {steps[1], steps[2]});
    return contiguous().view(to);
  }
  Tensor narrow(int64_t d, int64_t start, int64_t length) const {
    std::vector<int64_t> lengths(sizes().begin(), sizes().end());
    lengths[d] = length;
    return seen_as(lengths, strides(), start * stride(d));
  }
  Tensor transpose(int64_t d, int64_t e) const {
    std::vector<int64_t> lengths(sizes().begin(), sizes().end()), steps(strides().begin(), strides().end());
    std::swap(lengths[d], lengths[e]);
    std::swap(steps[d], steps[e]);
    return seen_as(lengths, steps);
  }
  Tensor select(int64_t d, int64_t index) const {
    std::vector<int64_t> lengths(sizes().begin(), sizes().end()), steps(strides().begin(), strides().end());
    lengths.erase(lengths.begin() + d);
    steps.erase(steps.begin() + d);
    return seen_as(lengths, steps, index * stride(d));
  }

  Tensor contiguous() const { return is_contiguous() ? *this : copied(contiguous_strides(sizes()), torch_dtype_of()); }
  // In another dtype, with the layout in memory that this one has, if it is dense.
  Tensor to(ScalarType type) const {
    if (type == scalar_type()) return *this;
    const int32_t number = torch_dtype(type);
    return is_non_overlapping_and_dense() ? copied(strides(), number) : copied(contiguous_strides(sizes()), number);
  }

 private:
  template <class R, class F>
  R ask(F function) const {
    R result{};
    succeeds(function(get(), &result));
    return result;
  }
  int32_t torch_dtype_of() const { return ask<int32_t>(aoti_torch_get_dtype); }
  Tensor copied(IntArrayRef strides, int32_t dtype) const {
    AtenTensorHandle result = nullptr;
    const IntArrayRef lengths = sizes();
    succeeds(aoti_torch_empty_strided(lengths.size(), lengths.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0,
                                      &result));
    Tensor made(result);
    succeeds(aoti_torch_copy_(result, get(), 0));
    return made;
  }

  struct Shared {
    AtenTensorHandle handle;
    std::atomic<int> owners{1};
    ScalarType dtype = ScalarType::Other;
    int64_t dim = 0;
    int64_t* sizes = nullptr;
  };
  Shared* shared_;
};

inline Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, TensorOptions options) {
  AtenTensorHandle result = nullptr;
  succeeds(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), torch_dtype(options.type),
                                    aoti_torch_device_type_cpu(), 0, &result));
  return Tensor(result);
}
inline Tensor empty(IntArrayRef sizes, TensorOptions options) {
  return empty_strided(sizes, contiguous_strides(sizes), options);
}
// Dense, with the dimensions in the order in memory that they have in the other one.
inline Tensor empty_like(const Tensor& x) {
  if (x.is_non_overlapping_and_dense()) return empty_strided(x.sizes(), x.strides(), x.options());
  const IntArrayRef sizes = x.sizes(), steps = x.strides();
  std::vector<int64_t> order, strides(sizes.size());  // from the innermost; a dimension that is expanded stays where it is
  for (int64_t d = x.dim() - 1; d >= 0; --d) {
    size_t at = order.size();
    for (size_t i = order.size(); i-- > 0;) {
      const int64_t step = steps[order[i]], size = sizes[order[i]];
      if (step == 0 || steps[d] == 0) continue;
      if (step < steps[d] || (step == steps[d] && size <= sizes[d])) break;
      at = i;
    }
    order.insert(order.begin() + at, d);
  }
  int64_t step = 1;
  for (int64_t d : order) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return empty_strided(sizes, strides, x.options());
}
inline Tensor from_blob(void* data, IntArrayRef sizes, IntArrayRef strides, TensorOptions options) {
  AtenTensorHandle result = nullptr;
  succeeds(aoti_torch_create_tensor_from_blob(data, sizes.size(), sizes.data(), strides.data(), 0, torch_dtype(options.type),
                                              aoti_torch_device_type_cpu(), 0, &result));
  return Tensor(result);
}
inline Tensor from_blob(void* data, IntArrayRef sizes, TensorOptions options) {
  return from_blob(data, sizes, contiguous_strides(sizes), options);
}

// torch's threads. An exception in one of them is thrown again here.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  const auto run = [](int64_t first, int64_t last, void* with) { (*static_cast<const F*>(with))(first, last); };
  succeeds(torch_parallel_for(begin, end, grain, run, const_cast<F*>(&f)));
}
inline int64_t get_num_threads() {
  uint32_t result = 1;
  succeeds(torch_get_num_threads(&result));
  return result;
}

// Ops that are called inside are not recorded for a backward.
class NoGradGuard {
 public:
  NoGradGuard() : before_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGradGuard() { aoti_torch_grad_mode_set_enabled(before_); }

 private:
  bool before_;
};

}  // namespace at

}  // namespace amp

#define TORCH_CHECK(condition, ...) \
  if (__builtin_expect(!(condition), 0)) ::amp::fail(__VA_ARGS__)
