// Memory that the kernels keep from call to call, and the counters and threads that they share.
#pragma once

#include "tensor.h"

namespace amp {

using at::Tensor;

constexpr int64_t GRAIN = 1 << 14;  // the fewest elements that are worth a thread

inline int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Memory for operands while they are fp32, one buffer per use and thread, kept from call to call: new memory costs more
// than the conversion into it. A buffer larger than KEPT bytes is freed after the call.
constexpr int64_t KEPT = int64_t(1) << 26;

// Bytes of all buffers of all threads.
inline std::atomic<int64_t>& scratch_bytes() {
  static std::atomic<int64_t> bytes{0};
  return bytes;
}

class Scratch {
 public:
  Scratch() = default;
  Scratch(Scratch&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  ~Scratch() { release(); }

  float* take(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(float)) + 64;
    if (bytes > size_) {
      release();  // free the old buffer before allocating the new one
      memory_ = new char[bytes];
      size_ = bytes;
      scratch_bytes() += size_;
    }
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_) + 63) & ~uintptr_t(63));
  }
  void tidy() {
    if (size_ > KEPT) release();
  }

 private:
  void release() {
    delete[] std::exchange(memory_, nullptr);
    scratch_bytes() -= std::exchange(size_, 0);
  }

  char* memory_ = nullptr;
  int64_t size_ = 0;
};

enum Use { LEFT, RIGHT, SUMS, BIAS, TURNED, PIXELS, DENSE, USES };

inline Scratch& scratch(Use use) {
  thread_local Scratch pieces[USES];
  return pieces[use];
}

inline void tidy() {
  for (int use = 0; use < USES; ++use) scratch(static_cast<Use>(use)).tidy();
}

// Conversions of whole tensors to memory of their own since the library was loaded, for `count_casts`.
struct Conversions {
  std::atomic<int64_t> number{0}, bytes{0};
  void add(int64_t written) {
    number.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(written, std::memory_order_relaxed);
  }
};
inline Conversions& conversions() {
  static Conversions made;
  return made;
}

template <class F>
void parallel(int64_t n, const F& f) {
  if (n <= GRAIN || at::get_num_threads() == 1) {
    f(0, n);
  } else {
    at::parallel_for(0, n, GRAIN, f);
  }
}

}  // namespace amp
