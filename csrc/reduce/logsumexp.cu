// logsumexp with a running maximum, in one read.
#include "reduce_kernel.cuh"

namespace kgopt {
namespace {

// The value is log(b) + finite(a). As in torch.logsumexp an infinite maximum counts as 0 in the exponent, so that all
// -inf gives -inf, +inf gives +inf, and NaN stays.
template <typename Acc>
struct LogsumexpState {
  Acc a = -INFINITY;  // maximum
  Acc b = 0;          // sum of exp(x - finite(a))

  static __device__ Acc finite(Acc m) { return isinf(m) ? Acc(0) : m; }
  __device__ void rescale(Acc maximum) {
    if (b != Acc(0)) b *= exp(finite(a) - finite(maximum));
    a = maximum;
  }
  __device__ void add(const Acc (&x)[kReduceBatch], int count) {
    Acc maximum = a;
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      if (i < count && x[i] > maximum) maximum = x[i];
    }
    if (maximum > a) rescale(maximum);
    const Acc shift = finite(a);
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      if (i < count) b += exp(x[i] - shift);
    }
  }
  __device__ void merge(LogsumexpState other) {
    if (other.a > a) {
      rescale(other.a);
    } else {
      other.rescale(a);
    }
    b += other.b;
  }
  __device__ Acc result(Acc) const { return log(b) + finite(a); }
};

template <typename T>
__global__ void __launch_bounds__(256) logsumexp_backward_kernel(const __grid_constant__ LogsumexpBackwardParams p) {
  using Acc = acc_t<T>;
  const int64_t total = p.outer * p.reduced * p.inner;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < total; at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t i = at % p.inner;
    const int64_t o = at / p.inner / p.reduced;
    const Acc y = to_acc(static_cast<const T*>(p.y)[o * p.inner + i]);
    // All of a row at -inf: no gradient rather than NaN.
    const Acc shift = y == -INFINITY ? Acc(0) : y;
    const Acc dy = to_acc(static_cast<const T*>(p.dy)[o * p.inner + i]);
    static_cast<T*>(p.dx)[at] = from_acc<T>(dy * exp(to_acc(static_cast<const T*>(p.x)[at]) - shift));
  }
}

}  // namespace

Status run_logsumexp(const ReduceParams& p, cudaStream_t stream) {
  return launch_reduction<LogsumexpState>("logsumexp_kernel", p, stream);
}

Status run_logsumexp_backward(const LogsumexpBackwardParams& p, cudaStream_t stream) {
  const int64_t total = p.outer * p.reduced * p.inner;
  if (total == 0) return Status::Ok();
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>((total + 255) / 256, 1 << 20));
  KGOPT_DISPATCH_DTYPE(p.dtype, T, { logsumexp_backward_kernel<T><<<blocks, 256, 0, stream>>>(p); });
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, "logsumexp_backward_kernel", cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
