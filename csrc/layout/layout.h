// Launchers of copies that change a tensor's memory format. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

// x is dense [n][rows][columns], y becomes [n][columns][rows]: rows are channels and columns positions on the way to
// channels_last, and the reverse on the way back. Dtypes that differ are float32 and one of the half types.
struct TransposeParams {
  const void* x = nullptr;
  void* y = nullptr;
  int64_t n = 0, rows = 0, columns = 0;
  Dtype from = Dtype::kFloat32, to = Dtype::kFloat32;
};
Status run_transpose(const TransposeParams& p, cudaStream_t stream);

// fp32 as two fp16 terms: x * 2^k = high + low * 2^-kSplitBits, with the largest finite |x| * 2^k below 2^14.
inline constexpr int kSplitBits = 11;
struct SplitHalfParams {
  const float* x = nullptr;
  void *high = nullptr, *low = nullptr;  // [n][columns][rows]
  int64_t n = 0, rows = 0, columns = 0;  // of x as above; rows == 1: nothing is transposed
  uint32_t* largest = nullptr;           // bits of the largest finite |x|; run_largest_magnitude fills it
};
Status run_largest_magnitude(const float* x, int64_t count, uint32_t* largest, int sm_count, cudaStream_t stream);
Status run_split_half(const SplitHalfParams& p, cudaStream_t stream);

}  // namespace kgopt
