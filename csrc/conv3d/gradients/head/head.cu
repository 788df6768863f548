// Gradients of a 1 x 1 convolution to a few channels, each in one pass over x or dx. cuDNN pads the channels of dy to a
// tile's; here a thread keeps one 16-byte column of x or dx, and the few values of dy of a row come from the cache.
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "common/host/launch.h"
#include "conv3d/gradients/head/head.h"
#include "conv3d/gradients/head/plan.h"

namespace kgopt {
namespace {

// A thread's column, and its rows: first, first + step, ...
template <typename T>
struct HeadThread {
  static constexpr int kVec = kVecSize<T>;
  int vectors, walkers, walker, column;
  int64_t first, step;
  __device__ __forceinline__ explicit HeadThread(const HeadGradientPlan& plan) {
    vectors = plan.c_in / kVec;
    walkers = kHeadThreads / vectors;
    walker = threadIdx.x / vectors;
    column = threadIdx.x - walker * vectors;
    step = int64_t(gridDim.x) * walkers;
    first = walker < walkers ? int64_t(blockIdx.x) * walkers + walker : plan.rows;
  }
};

// dy of a row; zeros beyond c_out.
template <typename T, int kOut>
__device__ __forceinline__ void load_outputs(const HeadParams& p, int64_t row, float (&dy)[kOut]) {
  const T* const from = static_cast<const T*>(p.dy) + row * p.plan.c_out;
#pragma unroll
  for (int k = 0; k < kOut; ++k) dy[k] = k < p.plan.c_out ? to_acc(from[k]) : 0.f;
}

template <typename T, int kOut>
__global__ void __launch_bounds__(kHeadThreads) conv_head_dgrad_kernel(const __grid_constant__ HeadParams p) {
  constexpr int kVec = kVecSize<T>;
  const HeadThread<T> t(p.plan);
  float w[kOut][kVec];
#pragma unroll
  for (int k = 0; k < kOut; ++k) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const int64_t at = k * p.w_stride_out + (t.column * kVec + j) * p.w_stride_in;
      w[k][j] = k < p.plan.c_out ? to_acc(static_cast<const T*>(p.weight)[at]) : 0.f;
    }
  }
  for (int64_t row = t.first; row < p.plan.rows; row += kHeadBatch * t.step) {
    float dy[kHeadBatch][kOut];
#pragma unroll
    for (int b = 0; b < kHeadBatch; ++b) {
      if (row + b * t.step < p.plan.rows) load_outputs<T, kOut>(p, row + b * t.step, dy[b]);
    }
#pragma unroll
    for (int b = 0; b < kHeadBatch; ++b) {
      if (row + b * t.step >= p.plan.rows) break;
      float dx[kVec] = {};
#pragma unroll
      for (int k = 0; k < kOut; ++k) {
        if (k >= p.plan.c_out) break;  // not 0 times NaN
#pragma unroll
        for (int j = 0; j < kVec; ++j) dx[j] += dy[b][k] * w[k][j];
      }
      store_result(static_cast<T*>(p.dx) + (row + b * t.step) * p.plan.c_in + t.column * kVec, pack<T, kVec>(dx));
    }
  }
}

template <typename T, int kOut>
__global__ void __launch_bounds__(kHeadThreads) conv_head_wgrad_kernel(const __grid_constant__ HeadParams p) {
  constexpr int kVec = kVecSize<T>, kBatch = kOut > 4 ? 2 : kHeadBatch;
  __shared__ float shared[kVec][kHeadThreads];
  const HeadThread<T> t(p.plan);
  float sums[kOut][kVec] = {};
  for (int64_t row = t.first; row < p.plan.rows; row += kBatch * t.step) {
    Vec<T, kVec> from[kBatch];
    float dy[kBatch][kOut];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t at = row + b * t.step;
      if (at >= p.plan.rows) break;
      from[b] = load_vec<T, kVec>(static_cast<const T*>(p.x) + at * p.plan.c_in + t.column * kVec);
      load_outputs<T, kOut>(p, at, dy[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (row + b * t.step >= p.plan.rows) break;
      float x[kVec];
      unpack(from[b], x);
#pragma unroll
      for (int k = 0; k < kOut; ++k) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[k][j] += dy[b][k] * x[j];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kOut; ++k) {
    if (k >= p.plan.c_out) break;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVec; ++j) shared[j][threadIdx.x] = sums[k][j];
    __syncthreads();
    for (int c = threadIdx.x; c < p.plan.c_in; c += kHeadThreads) {
      float sum = 0.f;
      for (int w = 0; w < t.walkers; ++w) sum += shared[c % kVec][w * t.vectors + c / kVec];
      p.partials[(int64_t(blockIdx.x) * p.plan.c_out + k) * p.plan.c_in + c] = sum;
    }
  }
}

// A warp a weight, in a fixed order.
__global__ void __launch_bounds__(kHeadThreads) conv_head_sum_kernel(const __grid_constant__ HeadParams p) {
  const int count = p.plan.c_out * p.plan.c_in;
  const int lane = threadIdx.x % 32, i = blockIdx.x * (kHeadThreads / 32) + threadIdx.x / 32;
  wait_for_prerequisites();
  let_dependents_start();
  if (i >= count) return;
  float sum = 0.f;
  for (int block = lane; block < p.plan.blocks; block += 32) sum += p.partials[int64_t(block) * count + i];
  sum = warp_sum(sum);
  const int k = i / p.plan.c_in, c = i - k * p.plan.c_in;
  if (lane == 0) store_as(p.dw, k * p.dw_stride_out + c * p.dw_stride_in, p.dw_dtype, sum);
}

// launch(T(), integral_constant of the outputs).
template <typename Launch>
Status dispatch(const char* name, const HeadParams& p, Launch launch) {
  const auto with_type = [&](auto zero) {
    switch (p.plan.outputs) {
      case 2: return Status(launch(zero, std::integral_constant<int, 2>()));
      case 4: return Status(launch(zero, std::integral_constant<int, 4>()));
      default: return Status(launch(zero, std::integral_constant<int, 8>()));
    }
  };
  switch (p.dtype) {
    case Dtype::kFloat32: return with_type(float());
    case Dtype::kBFloat16: return with_type(__nv_bfloat16());
    case Dtype::kFloat16: return with_type(__half());
    default: return Status::Unsupported(name, "float64");
  }
}

}  // namespace

Status run_conv_head_dgrad(const HeadParams& p, cudaStream_t stream) {
  constexpr const char* kName = "conv_head_dgrad_kernel";
  return dispatch(kName, p, [&](auto zero, auto outputs) {
    constexpr auto kKernel = conv_head_dgrad_kernel<decltype(zero), decltype(outputs)::value>;
    return launch_kernel<kKernel>(kName, p, static_cast<unsigned>(p.plan.blocks), kHeadThreads, 0, stream);
  });
}

Status run_conv_head_wgrad(const HeadParams& p, cudaStream_t stream) {
  constexpr const char* kName = "conv_head_wgrad_kernel";
  const Status status = dispatch(kName, p, [&](auto zero, auto outputs) {
    constexpr auto kKernel = conv_head_wgrad_kernel<decltype(zero), decltype(outputs)::value>;
    return launch_kernel<kKernel>(kName, p, static_cast<unsigned>(p.plan.blocks), kHeadThreads, 0, stream);
  });
  if (!status.ok()) return status;
  constexpr int kWarps = kHeadThreads / 32;
  const unsigned blocks = static_cast<unsigned>((p.plan.c_out * p.plan.c_in + kWarps - 1) / kWarps);
  return launch_after<conv_head_sum_kernel>(true, "conv_head_sum_kernel", blocks, kHeadThreads, stream, p);
}

}  // namespace kgopt
