// What in_format takes, and its copies by torch.
#pragma once

#include "common/host/torch_utils.h"

namespace kgopt {

inline MemoryFormat check_in_format(const char* op, const Tensor& x, bool channels_last) {
  check_dtype(op, "x", x);
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  return channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
}

// With the strides that a fresh tensor of this format has, also where sizes of 1 leave a choice.
inline Tensor copied_in(const Tensor& x, MemoryFormat format) {
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  call_aten("aten::copy_", "", y, x, false);
  return y;
}

}  // namespace kgopt
