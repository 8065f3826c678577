// Attention as ops. A file of its own, so that it is compiled beside the others.
#include "attention.h"
#include "ops.h"

namespace amp {

void register_attention(Library& library) {
  library.impl("wide_scaled_dot_product_flash_attention_for_cpu", &boxed<&attention_cpu>);
  library.impl("wide_scaled_dot_product_flash_attention_for_cpu_backward", &boxed<&attention_backward_cpu>);
}

}  // namespace amp
