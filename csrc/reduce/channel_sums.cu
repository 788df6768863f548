// Sums over all positions of each channel of a tensor with channels innermost: the gradient of a convolution's bias.
// Every thread keeps one 16-byte column of a row, so that neighbours read whole lines whatever the number of channels
// is. Blocks leave partial sums, which a second kernel adds in a fixed order. Sums are short chains of short chains:
// where all rows are equal (the gradient of a mean), each step of a chain rounds the same way.
#include <algorithm>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "common/host/launch.h"
#include "reduce/reduce.h"

namespace kgopt {
namespace {

constexpr int kThreads = 256, kBatch = 4;  // rows that a thread loads before it adds the first
constexpr int kChain = 16;                 // batches that a thread adds up before it adds them to its total

template <typename T>
__global__ void __launch_bounds__(kThreads) channel_sums_kernel(const __grid_constant__ ChannelSumsParams p) {
  constexpr int kVec = kVecSize<T>;
  __shared__ float shared[kVec][kThreads];
  const int vectors = p.c / kVec, walkers = kThreads / vectors;
  const int walker = threadIdx.x / vectors, column = threadIdx.x - walker * vectors;
  float totals[kVec] = {}, sums[kVec] = {};
  const auto close_chain = [&] {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      totals[j] += sums[j];
      sums[j] = 0.f;
    }
  };
  if (walker < walkers) {
    const T* const x = static_cast<const T*>(p.x) + column * kVec;
    const int64_t step = int64_t(gridDim.x) * walkers;
    int64_t row = int64_t(blockIdx.x) * walkers + walker;
    for (int batches = 1; row + (kBatch - 1) * step < p.rows; row += kBatch * step, ++batches) {
      Vec<T, kVec> batch[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) batch[b] = load_vec<T, kVec>(x + (row + b * step) * p.c);
      float rows[kBatch][kVec];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) unpack(batch[b], rows[b]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += (rows[0][j] + rows[1][j]) + (rows[2][j] + rows[3][j]);
      if (batches % kChain == 0) close_chain();
    }
    for (; row < p.rows; row += step) {
      float last[kVec];
      unpack(load_vec<T, kVec>(x + row * p.c), last);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += last[j];
    }
    close_chain();
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) shared[j][threadIdx.x] = totals[j];
  __syncthreads();
  for (int left = walkers; left > 1;) {  // the upper half of the walkers' sums onto the lower one
    const int half = (left + 1) / 2;
    if (walker < left - half) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared[j][threadIdx.x] += shared[j][threadIdx.x + half * vectors];
    }
    left = half;
    __syncthreads();
  }
  for (int c = threadIdx.x; c < p.c; c += kThreads) {
    p.partials[int64_t(blockIdx.x) * p.c + c] = shared[c % kVec][c / kVec];
  }
}

// A warp a channel.
template <typename T>
__global__ void __launch_bounds__(kThreads) channel_sums_merge_kernel(const __grid_constant__ ChannelSumsParams p) {
  const int lane = threadIdx.x % 32, c = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  wait_for_prerequisites();
  let_dependents_start();
  if (c >= p.c) return;
  float sum = 0.f;
  for (int block = lane; block < p.blocks; block += 32) sum += p.partials[int64_t(block) * p.c + c];
  sum = warp_sum(sum);
  if (lane == 0) static_cast<T*>(p.sums)[c] = from_acc<T>(sum);
}

template <typename T>
Status launch(const ChannelSumsParams& p, cudaStream_t stream) {
  const Status status = launch_kernel<channel_sums_kernel<T>>("channel_sums_kernel", p, static_cast<unsigned>(p.blocks),
                                                              kThreads, 0, stream);
  if (!status.ok()) return status;
  constexpr int kWarps = kThreads / 32;
  return launch_after<channel_sums_merge_kernel<T>>(
      true, "channel_sums_merge_kernel", static_cast<unsigned>((p.c + kWarps - 1) / kWarps), kThreads, stream, p);
}

}  // namespace

bool plan_channel_sums(ChannelSumsParams* p, int sm_count) {
  if (p->dtype == Dtype::kFloat64 || p->rows == 0) return false;
  const int vec = 16 / dtype_size(p->dtype);
  if (p->c % vec != 0 || p->c / vec > kThreads) return false;
  const int64_t rows = int64_t(kThreads / (p->c / vec)) * kBatch;  // of a block at a time
  p->blocks = static_cast<int>(std::min<int64_t>(sm_count * 4, (p->rows + rows - 1) / rows));
  return true;
}

Status run_channel_sums(const ChannelSumsParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case Dtype::kFloat32: return launch<float>(p, stream);
    case Dtype::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    case Dtype::kFloat16: return launch<__half>(p, stream);
    default: return Status::Unsupported("channel_sums_kernel", "float64");
  }
}

}  // namespace kgopt
