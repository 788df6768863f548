// Memory formats of tensors on CUDA, changed by kernels that keep pace with the memory.
#pragma once

#include "common/host/torch_utils.h"
#include "layout/layout.h"
#include "layout/layout_checks.h"

namespace kgopt {

// The positions of a sample.
inline int64_t positions_of(const Tensor& t) {
  int64_t count = 1;
  for (int64_t i = 2; i < t.dim(); ++i) count *= t.size(i);
  return count;
}

// From one dense format to the other, whichever `from` is not in, and from dtype to dtype.
inline void transpose_into(const char* op, const Tensor& from, const Tensor& to) {
  const bool to_innermost = is_dense(from, MemoryFormat::Contiguous);
  TransposeParams p;
  p.x = from.const_data_ptr();
  p.y = to.mutable_data_ptr();
  p.n = from.size(0);
  p.rows = to_innermost ? from.size(1) : positions_of(from);
  p.columns = to_innermost ? positions_of(from) : from.size(1);
  p.from = check_dtype(op, "x", from);
  p.to = check_dtype(op, "the result", to);
  raise_on_error(op, run_transpose(p, stream_of(from)));
}

}  // namespace kgopt
