// Reductions over a tensor seen as [outer][reduced][inner], dense. Sizes are in elements.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

struct ReduceParams {
  const void* x = nullptr;
  void* y = nullptr;  // [outer][inner], of x's type
  int64_t outer = 1, reduced = 1, inner = 1;
  Dtype dtype = Dtype::kFloat32;
  int vector = 1;            // elements of an access: along inner, or along reduced where inner is 1
  int64_t slices = 1;        // thread blocks that share a result
  int64_t slice_length = 1;  // reduced elements of a slice
  void* partials = nullptr;  // [slices][outer][inner][2] of the accumulation type, with more than one slice
};

struct ReduceBackwardParams {
  const void* dy = nullptr;  // [outer][inner]
  const void* x = nullptr;   // of logsumexp
  const void* y = nullptr;   // the same forward's result, [outer][inner]
  void* dx = nullptr;
  int64_t outer = 1, reduced = 1, inner = 1;
  Dtype dtype = Dtype::kFloat32;
};

// Of a tensor [rows][c], dense, aligned to 16 bytes: sums [c] over the rows, of x's type.
struct ChannelSumsParams {
  const void* x = nullptr;
  void* sums = nullptr;
  float* partials = nullptr;  // [blocks][c]
  int64_t rows = 0;
  int c = 0, blocks = 0;
  Dtype dtype = Dtype::kFloat32;
};

// Of scores [rows][columns], dense and aligned to 16 bytes.
struct SoftmaxParams {
  const void* x = nullptr;
  void* y = nullptr;
  int64_t rows = 0, columns = 0;
  double scale = 1;
  Dtype dtype = Dtype::kFloat32, to = Dtype::kFloat32;  // of x and of y
};

}  // namespace kgopt
