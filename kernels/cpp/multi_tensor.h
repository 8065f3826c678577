// Lists of gradients: multiplied in place and checked for non-finite numbers, in one pass.
#pragma once

#include <atomic>
#include <cmath>
#include <tuple>
#include <vector>

#include "boxed.h"
#include "rounding.h"

namespace amp {

using at::Tensor;

// True if all n values are finite; they are also multiplied by `factor`, if asked for. Infinity and NaN are the numbers
// whose exponent has all its bits set, so the largest exponent decides.
template <class T, bool MULTIPLY>
bool stretch(T* x, int64_t n, float factor) {
  int64_t i = 0;
  bool finite = true;
#if AMP_LANES == 16
  __m512i seen = _mm512_setzero_si512();
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  const Floats times = _mm512_set1_ps(factor);
  for (; i + 16 <= n; i += 16) {
    const Floats value = load(x + i);
    seen = _mm512_max_epu32(seen, _mm512_and_si512(_mm512_castps_si512(value), exponent));
    if (MULTIPLY) store(x + i, _mm512_mul_ps(value, times));
  }
  finite = _mm512_cmpeq_epi32_mask(seen, exponent) == 0;
#elif AMP_LANES == 8
  __m256i seen = _mm256_setzero_si256();
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  const Floats times = _mm256_set1_ps(factor);
  for (; i + 8 <= n; i += 8) {
    const Floats value = load(x + i);
    seen = _mm256_max_epu32(seen, _mm256_and_si256(_mm256_castps_si256(value), exponent));
    if (MULTIPLY) store(x + i, _mm256_mul_ps(value, times));
  }
  finite = _mm256_movemask_epi8(_mm256_cmpeq_epi32(seen, exponent)) == 0;
#endif
  for (; i < n; ++i) {
    const float value = static_cast<float>(x[i]);
    finite &= std::isfinite(value);
    if (MULTIPLY) x[i] = static_cast<T>(value * factor);
  }
  return finite;
}

struct Piece {
  void* start;
  int64_t count;
};

// The tensors of a list that these kernels support, as memory by dtype; the rest (other dtypes, devices and layouts) is left
// to torch. fp16 and bf16 are supported if LOW says so. A lazily negated tensor is like any other: nothing here depends on
// the sign. A list may have hundreds of small tensors, so torch is asked for as little as possible.
template <bool LOW>
class Sorted {
 public:
  std::vector<Piece> floats, halves, bfloats;
  std::vector<Tensor> rest;

  Sorted() = default;
  Sorted(Sorted&&) = default;
  ~Sorted() {
    for (AtenTensorHandle tensor : held_) aoti_torch_delete_tensor_object(tensor);
  }

  void reserve(size_t count) {
    floats.reserve(count);
    held_.reserve(count);
  }

  void add(AtenTensorHandle taken) {
    static const int32_t cpu = aoti_torch_device_type_cpu(), strided = aoti_torch_layout_strided();
    int32_t device = 0, layout = 0, dtype = 0;
    succeeds(aoti_torch_get_device_type(taken, &device));
    succeeds(aoti_torch_get_layout(taken, &layout));
    succeeds(aoti_torch_get_dtype(taken, &dtype));
    const at::ScalarType type = device == cpu && layout == strided ? at::scalar_type(dtype) : at::ScalarType::Other;
    bool supported = type == at::kFloat || (LOW && type != at::ScalarType::Other), contiguous = false;
    if (supported) succeeds(aoti_torch_is_contiguous(taken, &contiguous));
    if (contiguous) {
      held_.push_back(taken);
    } else {
      Tensor tensor(taken);
      supported = supported && tensor.is_non_overlapping_and_dense();
      (supported ? dense_ : rest).push_back(std::move(tensor));
    }
    if (!supported) return;
    if (type == at::kFloat) return cut<float>(taken, floats);
    type == at::kHalf ? cut<c10::Half>(taken, halves) : cut<c10::BFloat16>(taken, bfloats);
  }

  template <bool MULTIPLY>
  bool finite(float factor) const {
    const bool one = over<float, MULTIPLY>(floats, factor), two = over<c10::Half, MULTIPLY>(halves, factor);
    return over<c10::BFloat16, MULTIPLY>(bfloats, factor) && one && two;
  }

 private:
  // Pieces of equal work for the threads.
  template <class T>
  static void cut(AtenTensorHandle tensor, std::vector<Piece>& pieces) {
    constexpr int64_t LENGTH = int64_t(1) << 16;
    const void* data = nullptr;
    int64_t n = 0;
    succeeds(torch_get_const_data_ptr(tensor, &data));
    succeeds(aoti_torch_get_numel(tensor, &n));
    T* first = static_cast<T*>(const_cast<void*>(data));
    for (int64_t at = 0; at < n; at += LENGTH) pieces.push_back({first + at, std::min(LENGTH, n - at)});
  }

  template <class T, bool MULTIPLY>
  static bool over(const std::vector<Piece>& pieces, float factor) {
    std::atomic<bool> finite{true};
    at::parallel_for(0, static_cast<int64_t>(pieces.size()), 4, [&](int64_t first, int64_t last) {
      bool own = true;
      for (int64_t p = first; p < last; ++p) {
        own &= stretch<T, MULTIPLY>(static_cast<T*>(pieces[p].start), pieces[p].count, factor);
      }
      if (!own) finite.store(false, std::memory_order_relaxed);
    });
    return finite.load();
  }

  std::vector<AtenTensorHandle> held_;
  std::vector<Tensor> dense_;
};

template <bool LOW>
struct Boxed<Sorted<LOW>> {
  static Sorted<LOW> take(StableIValue from) {
    const StableListHandle list = Boxed<StableListHandle>::take(from);
    size_t size = 0;
    succeeds(torch_list_size(list, &size));
    Sorted<LOW> sorted;
    sorted.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue value = 0;
      succeeds(torch_list_get_item(list, i, &value));
      sorted.add(Boxed<AtenTensorHandle>::take(value));
    }
    succeeds(torch_delete_list(list));
    return sorted;
  }
};

// Multiplies each tensor in place and sets `found` to 1 if one was not finite; returns the unsupported tensors. The
// caller increments the versions that autograd compares.
inline std::vector<Tensor> unscale_cpu(Sorted<true>& sorted, const Tensor& found, const Tensor& factor) {
  // read directly: item() would dispatch an op
  const float by = factor.scalar_type() == at::kFloat ? *factor.const_data_ptr<float>() : factor.item();
  if (!sorted.finite<true>(by)) succeeds(aoti_torch_cpu_fill__Scalar(found.get(), 1.0));
  return std::move(sorted.rest);
}

// Whether all are finite, and the unsupported tensors.
inline std::tuple<bool, std::vector<Tensor>> all_finite_cpu(Sorted<true>& sorted) {
  const bool finite = sorted.finite<false>(1.0f);
  return {finite, std::move(sorted.rest)};
}

template <class T>
double squares(const T* x, int64_t n) {
  double total = 0;
  int64_t i = 0;
#if AMP_LANES == 16
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (; i + 16 <= n; i += 16) {
    const Floats value = load(x + i);
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
  }
  total = _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1]));
#endif
  for (; i < n; ++i) {
    const double value = static_cast<float>(x[i]);
    total += value * value;
  }
  return total;
}

// The 2-norm of all numbers of fp32 tensors, added up in fp64 in an order that does not depend on the threads; and the
// unsupported tensors.
inline std::tuple<double, std::vector<Tensor>> norm_cpu(Sorted<false>& sorted) {
  const std::vector<Piece>& pieces = sorted.floats;
  std::vector<double> sums(pieces.size());
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 4, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) sums[p] = squares(static_cast<float*>(pieces[p].start), pieces[p].count);
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return {std::sqrt(total), std::move(sorted.rest)};
}

}  // namespace amp
