// Element types as the kernels see them; torch's ScalarType stops at the api layer.
#pragma once

namespace kgopt {

enum class Dtype { kFloat32, kBFloat16, kFloat16, kFloat64 };

inline int dtype_size(Dtype t) { return t == Dtype::kFloat64 ? 8 : t == Dtype::kFloat32 ? 4 : 2; }

inline const char* dtype_name(Dtype t) {
  switch (t) {
    case Dtype::kFloat32: return "float32";
    case Dtype::kBFloat16: return "bfloat16";
    case Dtype::kFloat16: return "float16";
    default: return "float64";
  }
}

}  // namespace kgopt
