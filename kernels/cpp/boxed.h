// Functions as kernels of ops: arguments come from torch's stack, and results go there.
#pragma once

#include "tensor.h"

namespace amp {

using at::Tensor;

// A value that fits the stack as it is: in the lowest bytes, as on every machine that these kernels are for.
template <class T>
struct Boxed {
  static T take(StableIValue from) {
    T value;
    __builtin_memcpy(&value, &from, sizeof(T));
    return value;
  }
  static StableIValue give(T value) {
    StableIValue to = 0;
    __builtin_memcpy(&to, &value, sizeof(T));
    return to;
  }
};

template <>
struct Boxed<Tensor> {
  static Tensor take(StableIValue from) { return Tensor(Boxed<AtenTensorHandle>::take(from)); }
  static StableIValue give(Tensor value) { return Boxed<AtenTensorHandle>::give(std::move(value).handed_over()); }
};

template <>
struct Boxed<at::ScalarType> {
  static at::ScalarType take(StableIValue from) { return at::scalar_type(Boxed<int32_t>::take(from)); }
};

template <class T>
struct Boxed<std::optional<T>> {
  static std::optional<T> take(StableIValue from) {
    StableIValue* held = Boxed<StableIValue*>::take(from);
    if (!held) return std::nullopt;
    const StableIValue value = *held;
    succeeds(torch_delete_stable_ivalue(held));
    return Boxed<T>::take(value);
  }
};

template <class T>
struct Boxed<std::vector<T>> {
  static std::vector<T> take(StableIValue from) {
    const StableListHandle list = Boxed<StableListHandle>::take(from);
    size_t size = 0;
    succeeds(torch_list_size(list, &size));
    std::vector<T> values;
    values.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue value = 0;
      succeeds(torch_list_get_item(list, i, &value));
      values.push_back(Boxed<T>::take(value));
    }
    succeeds(torch_delete_list(list));
    return values;
  }
  static StableIValue give(std::vector<T> values) {
    StableListHandle list = nullptr;
    succeeds(torch_new_list_reserve_size(values.size(), &list));
    for (T& value : values) succeeds(torch_list_push_back(list, Boxed<T>::give(std::move(value))));
    return Boxed<StableListHandle>::give(list);
  }
};

template <class Result>
struct Results {
  static void give(StableIValue* stack, Result result) { stack[0] = Boxed<Result>::give(std::move(result)); }
};
template <class... Each>
struct Results<std::tuple<Each...>> {
  static void give(StableIValue* stack, std::tuple<Each...> results) {
    std::apply([&](Each&... each) { ((*stack++ = Boxed<Each>::give(std::move(each))), ...); }, results);
  }
};

template <class T>
using Value = std::remove_cv_t<std::remove_reference_t<T>>;

template <class Result, class... Arguments, size_t... I>
void run_boxed(Result (*kernel)(Arguments...), StableIValue* stack, std::index_sequence<I...>) {
  const at::NoGradGuard no_grad;
  // In braces: taken in this order
  std::tuple<Value<Arguments>...> arguments{Boxed<Value<Arguments>>::take(stack[I])...};
  if constexpr (std::is_void_v<Result>) {
    std::apply(kernel, arguments);
  } else {
    Results<Result>::give(stack, std::apply(kernel, arguments));
  }
}

template <class Result, class... Arguments>
void run_boxed(Result (*kernel)(Arguments...), StableIValue* stack) {
  run_boxed(kernel, stack, std::index_sequence_for<Arguments...>());
}

// The function as torch calls it.
template <auto KERNEL>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  run_boxed(KERNEL, stack);
}

}  // namespace amp
