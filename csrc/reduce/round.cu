// float32 results of a pipeline in the half type that it was given.
#include <algorithm>

#include "../common/dtype.cuh"
#include "reduce.h"

namespace kgopt {
namespace {

constexpr int kRoundThreads = 256, kRoundVec = 4;

// Both begin an allocation or a piece of a workspace, so that vectors of four lie in both.
template <typename T>
__global__ void __launch_bounds__(kRoundThreads) round_kernel(const float* x, T* y, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * kRoundThreads, first = int64_t(blockIdx.x) * kRoundThreads + threadIdx.x;
  const int64_t vectors = count / kRoundVec;
  for (int64_t i = first; i < vectors; i += step) {
    const auto v = load_vec<float, kRoundVec>(x + i * kRoundVec);
    store_vec(y + i * kRoundVec, pack<T, kRoundVec>(v.v));
  }
  for (int64_t i = vectors * kRoundVec + first; i < count; i += step) y[i] = from_acc<T>(x[i]);
}

}  // namespace

Status run_round(const float* x, void* y, int64_t count, Dtype dtype, cudaStream_t stream) {
  if (count == 0) return Status::Ok();
  const int64_t blocks = (count / kRoundVec + kRoundThreads) / kRoundThreads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 16));
  if (dtype == Dtype::kBFloat16) {
    round_kernel<<<grid, kRoundThreads, 0, stream>>>(x, static_cast<__nv_bfloat16*>(y), count);
  } else if (dtype == Dtype::kFloat16) {
    round_kernel<<<grid, kRoundThreads, 0, stream>>>(x, static_cast<__half*>(y), count);
  } else {
    return Status::Invalid("round_kernel", "expected bfloat16 or float16");
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, "round_kernel", cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
