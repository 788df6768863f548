// run_normalize of a channels_last tensor, with the outermost positions of the result repeated around it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/padded_shape.h"
#include "common/status.h"
#include "groupnorm/params.h"

namespace kgopt {

// Why it cannot run; null where it can, if x and y are aligned to 16 bytes. p.dims are x's.
inline const char* normalize_padded_refusal(const NormalizeParams& p, const PaddedShape& pad) {
  if (!p.dims.channels_last || p.dims.dtype == Dtype::kFloat64) return "not channels_last, or float64";
  if (p.dims.c * static_cast<int64_t>(dtype_size(p.dims.dtype)) % 16 != 0) return "channels fill no vectors";
  if (int64_t(pad.out[0]) * pad.out[1] * pad.out[2] > 0x7fffffff) return "too many positions";
  return nullptr;
}
Status run_normalize_padded(const NormalizeParams& p, const PaddedShape& pad, cudaStream_t stream);

}  // namespace kgopt
