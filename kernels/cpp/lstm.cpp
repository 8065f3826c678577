// The steps of an LSTM as ops. A file of its own, so that it is compiled beside the others.
#include "lstm.h"
#include "ops.h"

namespace amp {

void register_lstm(Library& library) {
  library.def(
      "lstm_forward(Tensor(a!) gates, Tensor state, Tensor cell, Tensor right, Tensor(b!) out, Tensor(c!) cells, bool reverse)"
      " -> ()",
      &boxed<&lstm_forward_cpu>);
  library.def(
      "lstm_backward(Tensor? given, Tensor(a!) state, Tensor(b!) cell, Tensor gates, Tensor cells, Tensor first_cell,"
      " Tensor right, Tensor(c!) sums, bool reverse) -> ()",
      &boxed<&lstm_backward_cpu>);
}

}  // namespace amp
