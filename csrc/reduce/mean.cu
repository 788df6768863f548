// Mean over any dims.
#include "reduce/reduce_kernel.cuh"

namespace kgopt {
namespace {

template <typename Acc>
struct MeanState {
  Acc a = 0;  // sum
  Acc b = 0;  // unused: states have two numbers

  __device__ void add(const Acc (&x)[kReduceBatch], int count) {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      if (i < count) sum += x[i];
    }
    a += sum;
  }
  __device__ void merge(const MeanState& other) { a += other.a; }
  __device__ Acc result(Acc count) const { return a / count; }
};

template <typename T>
__global__ void __launch_bounds__(256) mean_backward_kernel(const __grid_constant__ MeanBackwardParams p) {
  using Acc = acc_t<T>;
  const int64_t total = p.outer * p.reduced * p.inner;
  const Acc count = Acc(p.reduced);
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < total; at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t i = at % p.inner;
    const int64_t o = at / p.inner / p.reduced;
    static_cast<T*>(p.dx)[at] = from_acc<T>(to_acc(static_cast<const T*>(p.dy)[o * p.inner + i]) / count);
  }
}

}  // namespace

Status run_mean(const ReduceParams& p, cudaStream_t stream) {
  return launch_reduction<MeanState>("mean_kernel", p, stream);
}

Status run_mean_backward(const MeanBackwardParams& p, cudaStream_t stream) {
  const int64_t total = p.outer * p.reduced * p.inner;
  if (total == 0) return Status::Ok();
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>((total + 255) / 256, 1 << 20));
  KGOPT_DISPATCH_DTYPE(p.dtype, T, { mean_backward_kernel<T><<<blocks, 256, 0, stream>>>(p); });
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, "mean_backward_kernel", cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
