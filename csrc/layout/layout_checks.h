// What in_format takes, and its copies by torch.
#pragma once

#include "common/host/torch_utils.h"

namespace kgopt {

inline bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
         type == ScalarType::BFloat16;
}

inline MemoryFormat check_in_format(const char* op, const Tensor& x, bool channels_last) {
  check_dtype(op, "x", x);
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  return channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
}

// The dtype of the result.
inline ScalarType check_result_dtype(const char* op, const Tensor& x, std::optional<ScalarType> dtype) {
  if (!dtype) return x.scalar_type();
  KGOPT_CHECK(is_floating(*dtype), op, ": dtype is ", scalar_type_name(*dtype),
              ", expected float32, bfloat16, float16 or float64");
  return *dtype;
}

// With the strides that a fresh tensor of this format has, also where sizes of 1 leave a choice.
inline Tensor copied_in(const Tensor& x, MemoryFormat format, std::optional<ScalarType> dtype = std::nullopt) {
  Tensor y = empty_like_shape(x, sizes_of(x), dtype, format);
  call_aten("aten::copy_", "", y, x, false);
  return y;
}

}  // namespace kgopt
