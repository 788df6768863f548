// float32 results of a pipeline in the half type that it was given.
#include <algorithm>

#include "common/device/dtype.cuh"
#include "common/host/launch.h"
#include "reduce/reduce.h"

namespace kgopt {
namespace {

constexpr int kRoundThreads = 256, kRoundVec = 4;

// Both begin an allocation or a piece of a workspace, so that vectors of four lie in both.
template <typename T>
struct RoundParams {
  const float* x;
  T* y;
  int64_t count;
};

template <typename T>
__global__ void __launch_bounds__(kRoundThreads) round_kernel(RoundParams<T> p) {
  const int64_t step = int64_t(gridDim.x) * kRoundThreads, first = int64_t(blockIdx.x) * kRoundThreads + threadIdx.x;
  const int64_t vectors = p.count / kRoundVec;
  for (int64_t i = first; i < vectors; i += step) {
    const auto v = load_vec<float, kRoundVec>(p.x + i * kRoundVec);
    store_result(p.y + i * kRoundVec, pack<T, kRoundVec>(v.v));
  }
  for (int64_t i = vectors * kRoundVec + first; i < p.count; i += step) p.y[i] = from_acc<T>(p.x[i]);
}

template <typename T>
Status round_to(const float* x, void* y, int64_t count, cudaStream_t stream) {
  const int64_t blocks = (count / kRoundVec + kRoundThreads) / kRoundThreads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 16));
  return launch_kernel<round_kernel<T>>("round_kernel", RoundParams<T>{x, static_cast<T*>(y), count}, grid,
                                        kRoundThreads, 0, stream);
}

}  // namespace

Status run_round(const float* x, void* y, int64_t count, Dtype dtype, cudaStream_t stream) {
  if (count == 0) return Status::Ok();
  if (dtype == Dtype::kBFloat16) return round_to<__nv_bfloat16>(x, y, count, stream);
  if (dtype == Dtype::kFloat16) return round_to<__half>(x, y, count, stream);
  return Status::Invalid("round_kernel", "expected bfloat16 or float16");
}

}  // namespace kgopt
