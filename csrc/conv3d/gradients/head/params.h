// A 1 x 1 convolution to a few channels, as networks end in: dx [rows][c_in] and dweight from x [rows][c_in] and
// dy [rows][c_out], channels innermost and dense. Sizes and strides are in elements.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

inline constexpr int kHeadThreads = 256;
inline constexpr int kHeadMaxOutputs = 8;  // more products for each 16 bytes take longer than the bytes

struct HeadGradientPlan {
  const char* refusal = nullptr;  // why not, or null
  int64_t rows = 0;
  int c_in = 0, c_out = 0;
  int outputs = 0;  // that the kernel has room for: c_out or a few more
  int blocks = 0;
  int64_t partial_floats = 0;  // of dweight: [blocks][c_out][c_in]
};

struct HeadParams {
  const void* x = nullptr;  // aligned to 16 bytes; of dweight
  const void* dy = nullptr;
  const void* weight = nullptr;  // of x's type; of dx
  int64_t w_stride_out = 0, w_stride_in = 0;
  void* dx = nullptr;
  void* dw = nullptr;
  int64_t dw_stride_out = 0, dw_stride_in = 0;
  float* partials = nullptr;
  HeadGradientPlan plan;
  Dtype dtype = Dtype::kFloat32, dw_dtype = Dtype::kFloat32;
};

}  // namespace kgopt
