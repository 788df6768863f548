// Mean over any dims.
#include "reduce/reduce_kernel.cuh"

namespace kgopt {
namespace {

template <typename Acc>
struct MeanState {
  static constexpr bool kVectorsAcross = true;
  Acc a = 0;  // sum
  Acc b = 0;  // unused: states have two numbers

  template <int kCount>
  __device__ void add(const Acc (&x)[kCount], int count) {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) sum += x[i];
    }
    a += sum;
  }
  __device__ void merge(const MeanState& other) { a += other.a; }
  __device__ Acc result(Acc count) const { return a / count; }
};

struct MeanGradient {
  static constexpr bool kReads = false;
  template <typename Acc>
  __device__ Acc operator()(Acc dy, Acc count) const {
    return dy / count;
  }
};

}  // namespace

Status run_mean(const ReduceParams& p, cudaStream_t stream) {
  return launch_reduction<MeanState>("mean_kernel", p, stream);
}

Status run_mean_backward(const ReduceBackwardParams& p, cudaStream_t stream) {
  return launch_reduce_backward<MeanGradient>("mean_backward_kernel", p, stream);
}

}  // namespace kgopt
