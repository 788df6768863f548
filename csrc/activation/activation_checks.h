// Argument checks of the activation ops, shared by the CUDA and the CPU files.
#pragma once

#include "common/host/torch_utils.h"

namespace kgopt {

// Elementwise ops keep channels_last, everything else comes out contiguous.
inline MemoryFormat activation_format(const Tensor& x) { return memory_format_of(x); }

inline void check_activation_backward(const char* op, const Tensor& dy, const Tensor& x) {
  check_dtype(op, "x", x);
  check_same_device(op, "dy", dy, x);
  check_same_dtype(op, "dy", dy, x);
  KGOPT_CHECK(sizes_of(dy) == sizes_of(x), op, ": dy has shape ", shape_string(dy), ", expected ", shape_string(x));
}

}  // namespace kgopt
