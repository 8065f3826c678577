// How wide the CPU's vectors are, by the kind of CPU that the library is compiled for (../capability.py).
#pragma once

#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define AMP_LANES 16
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define AMP_LANES 8
#else
#define AMP_LANES 0
#endif

namespace amp {

constexpr int64_t LANES = AMP_LANES ? AMP_LANES : 8;  // fp32 values of a vector; without vectors, the compiler makes what there is

}  // namespace amp
