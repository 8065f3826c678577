// The products that round to fp16. A file of its own, so that it is compiled beside the others.
#include "batched.h"

namespace amp {

template Tensor cast_matmul<c10::Half, float>(const Tensor&, const Tensor&, const std::optional<Tensor>&);
template Tensor cast_matmul<c10::Half, c10::Half>(const Tensor&, const Tensor&, const std::optional<Tensor>&);

}  // namespace amp
