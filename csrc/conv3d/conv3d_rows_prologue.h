// The convolution by rows of act(x * scale + shift), whose scale and shift are a group norm's.
#pragma once

#include <cuda_runtime.h>

#include "conv3d_rows_prologue_plan.h"

namespace kgopt {

struct RowsPrologue {
  const float4* table = nullptr;  // [n, c_in] of mean, rstd, weight, bias
  int c_in = 0;
  int piece_rows = 1;
  Chain act = Chain::kNone;  // not kAny
};

// p's plan is that of a RowsProloguePlan.
Status run_conv_rows_prologue(const RowsParams& p, const RowsPrologue& prologue, cudaStream_t stream);

}  // namespace kgopt
