// The loops of loops.h, for every dtype, and the kernels for lists of gradients, which are loops too. ops.cpp, which is compiled
// beside this file, has the rest.
#include "loops.h"

#include "dots.h"
#include "multi_tensor.h"
#include "ops.h"
#include "steps.h"
#include "taps.h"
#include "tiles.h"

namespace amp {

namespace {

// Calls `run` with a pointer to the values, in their own dtype, and with what they are rounded to. EXACT: values of fp32 may be
// taken as they are.
template <bool EXACT, class F>
inline __attribute__((always_inline)) void in_dtype(const Operand& x, const void* from, const F& run) {
  if (x.type == at::kHalf) return run(static_cast<const c10::Half*>(from), c10::Half());
  if (x.type == at::kBFloat16) return run(static_cast<const c10::BFloat16*>(from), c10::BFloat16());
  const float* values = static_cast<const float*>(from);
  if (x.low == at::kHalf) return run(values, c10::Half());
  if (!EXACT || x.low == at::kBFloat16) return run(values, c10::BFloat16());
  if constexpr (EXACT) run(values, Exact());
}

}  // namespace

void pack(const Operand& x, int64_t row, int64_t column, int64_t rows, int64_t columns, float* to, int64_t step) {
  if (x.turned) {
    return in_dtype<true>(x, x.at(row, column), [&](const auto* from, auto low) {
      pack_turned<decltype(low)>(from, x.stride, rows, columns, to, step);
    });
  }
  in_dtype<true>(x, x.at(row, column), [&](const auto* from, auto low) {
    pack_lines<decltype(low)>(from, x.stride, rows, columns, to, step);
  });
}

void widen_every(Type type, const void* from, int64_t stride, float* to, int64_t n) {
  if (stride == 1) return widen(type, from, to, n);
  in_dtype<true>(Operand{from, 0, false, type, type}, from, [&](const auto* values, auto) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(values[i * stride]);
  });
}

float total_of(Type type, const void* from, int64_t n) {
  float values[1024], all = 0.0f;
  for (int64_t i = 0; i < n; i += 1024) {
    const int64_t some = n - i < 1024 ? n - i : 1024;
    widen(type, advanced(from, type, i), values, some);
    Sum sum;
    in_vectors(some, [&](int64_t j, auto zero) { sum.add(get<decltype(zero)>(values + j)); });
    all += sum.total();
  }
  return all;
}

void add_values(float* values, const float* more, int64_t n) {
  in_vectors(n, [&](int64_t j, auto zero) {
    using T = decltype(zero);
    put(values + j, get<T>(values + j) + get<T>(more + j));
  });
}

void add_values(float* values, int64_t step, const float* more, int64_t count, int64_t rows) {
  VectorBits lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  for (int64_t r = 0; r < rows; ++r, values += step, more += count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) put(values + i, get<Vector>(values + i) + get<Vector>(more + i));
    if (i == count) continue;
    const VectorBits there = lanes < static_cast<int32_t>(count - i);
    put(values + i, get<Vector>(values + i) + (there ? get<Vector>(more + i) : Vector{}));
  }
}

void place_rows(const float* from, int64_t stride, float* to, int64_t step, int64_t begin, int64_t end, int64_t rows) {
  const auto vectors = [](int64_t first, int64_t last, const auto& value) {
    for (; first < last; first += LANES) value(first);
  };
  for (int64_t r = 0; r < rows; ++r, from += stride, to += step) {
    vectors(0, begin, [&](int64_t i) { put(to + i, Vector{}); });
    vectors(begin, end, [&](int64_t i) { put(to + i, get<Vector>(from + i - begin)); });
    vectors(end, step, [&](int64_t i) { put(to + i, Vector{}); });
  }
}

void add_to_rows(float* values, int64_t step, const float* plus, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r) {
    in_vectors(n, [&](int64_t j, auto zero) { put(values + r * step + j, get<decltype(zero)>(values + r * step + j) + plus[r]); });
  }
}

void finish(Type type, const float* from, int64_t stride, const float* plus, void* to, int64_t step, int64_t rows, int64_t n) {
  const auto run = [&](auto* out) {
    for (int64_t r = 0; r < rows; ++r) finish(from + r * stride, plus, out + r * step, n);
  };
  if (type == at::kHalf) return run(static_cast<c10::Half*>(to));
  type == at::kBFloat16 ? run(static_cast<c10::BFloat16*>(to)) : run(static_cast<float*>(to));
}

namespace {

template <class Low>
void afterwards(const Low* plus, const Low* times, bool relu, Low* to, int64_t n) {
  int64_t i = 0;
#if AMP_LANES
  for (; i + AMP_LANES <= n; i += AMP_LANES) {
    Floats x = load(to + i);
    if (plus) x = rounded(add(x, load(plus + i)), Low());
    if (times) x = rounded(multiply(x, load(times + i)), Low());
    if (relu) x = positive(x);
    store(to + i, x);
  }
#endif
  for (; i < n; ++i) {
    float x = to[i];
    if (plus) x = static_cast<Low>(x + static_cast<float>(plus[i]));
    if (times) x = static_cast<Low>(x * static_cast<float>(times[i]));
    if (relu) x = x < 0.0f ? 0.0f : x;
    to[i] = static_cast<Low>(x);
  }
}

}  // namespace

void afterwards(Type type, const Afterwards& then, void* to, int64_t step, int64_t rows, int64_t n) {
  const auto run = [&](auto* out) {
    using Low = std::remove_pointer_t<decltype(out)>;
    for (int64_t r = 0; r < rows; ++r) {
      const Afterwards row = then.from(type, r * step);
      afterwards(static_cast<const Low*>(row.plus), static_cast<const Low*>(row.times), row.relu, out + r * step, n);
    }
  };
  type == at::kHalf ? run(static_cast<c10::Half*>(to)) : run(static_cast<c10::BFloat16*>(to));
}

void dot_columns(const float* rows, const Operand& b, int64_t column, float* to, int64_t step, int64_t width, int64_t m,
                 int64_t k) {
  in_dtype<true>(b, b.at(0, column), [&](const auto* from, auto low) {
    dot_columns<decltype(low)>(rows, from, b.stride, to, step, width, m, k);
  });
}

void add_rows(const float* a, const Operand& b, int64_t column, float* sums, int64_t width, int64_t m, int64_t k) {
  in_dtype<false>(b, b.at(0, column), [&](const auto* from, auto low) {
    add_rows<decltype(low)>(a, from, b.stride, sums, width, m, k);
  });
}

namespace {

// Calls `run` with the number of vectors as a constant.
template <class F>
inline __attribute__((always_inline)) void in_vectors_of(int64_t vectors, const F& run) {
  if (vectors == 1) return run(std::integral_constant<int, 1>());
  if (vectors == 2) return run(std::integral_constant<int, 2>());
  if constexpr (PANEL_VECTORS > 3) {
    if (vectors == 4) return run(std::integral_constant<int, 4>());
  }
  run(std::integral_constant<int, 3>());
}

}  // namespace

void multiply_panel(const Rows& a, const float* panel, int64_t vectors, float* c, int64_t step, int64_t rows, int64_t k, bool adds) {
  in_vectors_of(vectors, [&](auto count) { multiply_packed<decltype(count)::value>(a, panel, c, step, rows, k, adds); });
}

void multiply_right_at(const Rows& a, const float* b, const int32_t* places, int64_t vectors, float* c, int64_t step, int64_t rows,
                       int64_t k, bool adds) {
  in_vectors_of(vectors, [&](auto count) { multiply_placed_right<decltype(count)::value>(a, b, places, c, step, rows, k, adds); });
}

void multiply_left_at(const float* a, const int32_t* places, const float* panel, int64_t vectors, float* c, int64_t step, int64_t rows,
                      int64_t k, bool adds) {
  in_vectors_of(vectors, [&](auto count) { multiply_placed_left<decltype(count)::value>(a, places, panel, c, step, rows, k, adds); });
}

void add_tap_sums(const float* gradient, const float* pixels, int64_t pitch, const int32_t* places, int64_t taps, int64_t rows,
                  int64_t count, float* to) {
  const auto some = [&](auto number, int64_t t) {
    add_tap_sums<decltype(number)::value>(gradient, pixels, pitch, places + t, rows, count, to + t);
    return t + decltype(number)::value;
  };
  for (int64_t t = 0; t < taps;) {  // as many at a time as windows often have
    if (taps - t >= 9) t = some(std::integral_constant<int, 9>(), t);
    else if (taps - t >= 4) t = some(std::integral_constant<int, 4>(), t);
    else t = some(std::integral_constant<int, 1>(), t);
  }
}

void register_lists(Library& library) {
  library.def("unscale_(Tensor[] tensors, Tensor found, Tensor factor) -> Tensor[]", &boxed<&unscale_cpu>);
  library.def("all_finite(Tensor[] tensors) -> (bool, Tensor[])", &boxed<&all_finite_cpu>);
  library.def("norm(Tensor[] tensors) -> (float, Tensor[])", &boxed<&norm_cpu>);
}

}  // namespace amp
