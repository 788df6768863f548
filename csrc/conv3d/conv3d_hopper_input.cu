// A contiguous input copied with its channels innermost, for the Hopper convolution. One read and one write; fp32 is
// rounded to TF32 on the way, which the tensor cores would else do by cutting.
#include "../common/dtype.cuh"
#include "../common/launch.h"
#include "../common/mma.cuh"
#include "conv3d_hopper.h"

namespace kgopt {
namespace {

constexpr int kThreads = 128;
constexpr int kPositions = 64;  // of a tile, by 128 bytes of channels

// The tile lies in shared memory as [channel][position]. Vectors of positions are swapped within a channel's row so
// that neither the vectors along positions nor those along channels meet in a bank.
template <typename T>
__global__ void __launch_bounds__(kThreads) channels_innermost_kernel(const __grid_constant__ HopperInputParams p) {
  constexpr int kVec = kVecSize<T>;
  constexpr int kChannels = 8 * kVec;
  constexpr int kPerThread = kChannels * kPositions / kVec / kThreads;
  __shared__ alignas(16) T tile[kChannels * kPositions];
  const int64_t s0 = int64_t(blockIdx.x) * kPositions;
  const int c0 = blockIdx.y * kChannels;
  const T* const x = static_cast<const T*>(p.x) + (int64_t(blockIdx.z) * p.c + c0) * p.s + s0;
  T* const y = static_cast<T*>(p.y) + (int64_t(blockIdx.z) * p.s + s0) * p.c + c0;
  const int channels = min(kChannels, p.c - c0);
  const int positions = static_cast<int>(min(int64_t(kPositions), p.s - s0));

  Vec<T, kVec> v[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int index = i * kThreads + threadIdx.x;
    const int c = index / (kPositions / kVec), s = index % (kPositions / kVec) * kVec;
    const T* const from = x + c * p.s + s;
    if (c < channels && p.vectors && s < positions) {
      v[i] = load_vec<T, kVec>(from);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[i].v[j] = c < channels && s + j < positions ? from[j] : T(0.f);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int index = i * kThreads + threadIdx.x;
    const int c = index / (kPositions / kVec), s = index % (kPositions / kVec) * kVec;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[i].v[j] = __uint_as_float(to_tf32(v[i].v[j]));
    }
    store_vec(tile + c * kPositions + (s ^ c / kVec % 8 * kVec), v[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int index = i * kThreads + threadIdx.x;
    const int c = index % 8 * kVec, s = index / 8;
    Vec<T, kVec> out;
#pragma unroll
    for (int j = 0; j < kVec; ++j) out.v[j] = tile[(c + j) * kPositions + (s ^ c)];
    if (c < channels && s < positions) store_vec(y + int64_t(s) * p.c + c, out);
  }
}

}  // namespace

Status run_channels_innermost(const HopperInputParams& p, cudaStream_t stream) {
  const int channels = 8 * 16 / dtype_size(p.dtype);
  const int64_t tiles = (p.s + kPositions - 1) / kPositions;
  if (tiles * p.n == 0) return Status::Ok();
  if (tiles >= int64_t(1) << 31 || p.n >= 65536) {
    return Status::Unsupported("channels_innermost_kernel", "x is too large for the grid");
  }
  const dim3 grid(static_cast<unsigned>(tiles), (p.c + channels - 1) / channels, static_cast<unsigned>(p.n));
  switch (p.dtype) {
    case Dtype::kFloat32:
      return launch_kernel<channels_innermost_kernel<float>>("channels_innermost_kernel", p, grid, kThreads, 0, stream);
    case Dtype::kBFloat16:
      return launch_kernel<channels_innermost_kernel<__nv_bfloat16>>("channels_innermost_kernel", p, grid, kThreads, 0,
                                                                     stream);
    case Dtype::kFloat16:
      return launch_kernel<channels_innermost_kernel<__half>>("channels_innermost_kernel", p, grid, kThreads, 0,
                                                              stream);
    default: return Status::Unsupported("channels_innermost_kernel", "float64");
  }
}

}  // namespace kgopt
