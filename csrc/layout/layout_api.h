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

// From one dense format to the other, whichever `to` is not in.
inline void transpose_into(const char* op, const Tensor& from, const Tensor& to) {
  const bool to_innermost = is_dense(from, MemoryFormat::Contiguous);
  TransposeParams p;
  p.x = from.const_data_ptr();
  p.y = to.mutable_data_ptr();
  p.n = from.size(0);
  p.rows = to_innermost ? from.size(1) : positions_of(from);
  p.columns = to_innermost ? positions_of(from) : from.size(1);
  p.element_bytes = static_cast<int>(dtype_size(check_dtype(op, "x", from)));
  raise_on_error(op, run_transpose(p, stream_of(from)));
}

// Whether transpose_into is faster than torch's copy: with fewer channels most of a tile is empty.
inline bool fills_tiles(const Tensor& t, MemoryFormat format) {
  return t.size(1) >= (format == MemoryFormat::Contiguous ? 16 : 24);
}

// dense_in of a CUDA tensor of rank 4 or 5: torch's copy takes several times as long where every element moves.
inline Tensor relaid(const char* op, const Tensor& t, MemoryFormat format) {
  if (is_dense(t, format)) return t;
  const MemoryFormat other =
      format == MemoryFormat::Contiguous ? channels_last_format(t.dim()) : MemoryFormat::Contiguous;
  if (!is_dense(t, other) || !fills_tiles(t, format)) return dense_in(t, format);
  Tensor y = empty_like_shape(t, sizes_of(t), std::nullopt, format);
  transpose_into(op, t, y);
  return y;
}

}  // namespace kgopt
