// The products that round to bf16. A file of its own, so that it is compiled beside the others.
#include "batched.h"

namespace amp {

template Tensor cast_matmul<c10::BFloat16, float>(const Tensor&, const Tensor&, const std::optional<Tensor>&);
template Tensor cast_matmul<c10::BFloat16, c10::BFloat16>(const Tensor&, const Tensor&, const std::optional<Tensor>&);

}  // namespace amp
