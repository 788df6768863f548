// Softmax of scores of attention, rounded for the product behind it.
#include <algorithm>

#include "common/device/dtype.cuh"
#include "common/host/launch.h"
#include "reduce/reduce.h"

namespace kgopt {
namespace {

constexpr int kSoftmaxThreads = 512, kSoftmaxBatch = 4;
constexpr unsigned kAllLanes = 0xffffffffu;

// The hardware's exponential is that of two. x is a difference of scores: of the scores themselves, which may be
// large, the factor would cost digits.
template <typename Acc>
__device__ __forceinline__ Acc exp_of(Acc x) {
  return exp2(x * Acc(1.4426950408889634));
}

// Scores' largest value, and the sum of the exponentials of what the others are below it.
template <typename Acc>
struct SoftmaxState {
  Acc top = -INFINITY, sum = 0;

  __device__ __forceinline__ Acc shift() const { return top == Acc(-INFINITY) ? Acc(0) : top; }
  __device__ __forceinline__ void raise(Acc to) {
    if (!(to > top)) return;
    if (sum != Acc(0)) sum *= exp_of(top - to);
    top = to;
  }
  __device__ __forceinline__ void merge(SoftmaxState other) {
    raise(other.top);
    other.raise(top);
    sum += other.sum;
  }
};

// A thread's vectors of a row, a batch at a time: all of its loads are under way before the first value is used.
template <int kVec, typename F>
__device__ __forceinline__ void for_batches(int64_t columns, const F& f) {
  constexpr int64_t kStep = int64_t(kSoftmaxThreads) * kVec;
  for (int64_t first = int64_t(threadIdx.x) * kVec; first < columns; first += kSoftmaxBatch * kStep) {
    f([&](auto&& use) {
#pragma unroll
      for (int b = 0; b < kSoftmaxBatch; ++b) {
        if (first + b * kStep < columns) use(b, first + b * kStep);
      }
    });
  }
}

// A block a row, which it reads twice, the second time from the caches.
template <typename In, typename Out, int kVec>
__global__ void __launch_bounds__(kSoftmaxThreads) scaled_softmax_kernel(const __grid_constant__ SoftmaxParams p) {
  using Acc = acc_t<In>;
  __shared__ SoftmaxState<Acc> shared[kSoftmaxThreads / 32];
  const Acc scale = static_cast<Acc>(p.scale);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const In* const x = static_cast<const In*>(p.x) + row * p.columns;
    Out* const y = static_cast<Out*>(p.y) + row * p.columns;
    SoftmaxState<Acc> s;
    for_batches<kVec>(p.columns, [&](auto&& each) {
      Vec<In, kVec> loaded[kSoftmaxBatch];
      each([&](int b, int64_t i) { loaded[b] = load_vec<In, kVec>(x + i); });
      Acc largest = -INFINITY;
      each([&](int b, int64_t i) {
        Acc v[kVec];
        unpack(loaded[b], v);
#pragma unroll
        for (int j = 0; j < kVec; ++j) largest = v[j] * scale > largest ? v[j] * scale : largest;
      });
      s.raise(largest);
      const Acc shift = s.shift();
      Acc sum = 0;
      each([&](int b, int64_t) {
        Acc v[kVec];
        unpack(loaded[b], v);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum += exp_of(fma(v[j], scale, -shift));
      });
      s.sum += sum;
    });
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      s.merge({__shfl_xor_sync(kAllLanes, s.top, mask), __shfl_xor_sync(kAllLanes, s.sum, mask)});
    }
    __syncthreads();  // the row before has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = s;
    __syncthreads();
    s = shared[0];
#pragma unroll
    for (int w = 1; w < kSoftmaxThreads / 32; ++w) s.merge(shared[w]);
    const Acc shift = s.shift(), factor = Acc(1) / s.sum;
    for_batches<kVec>(p.columns, [&](auto&& each) {
      Vec<In, kVec> loaded[kSoftmaxBatch];
      each([&](int b, int64_t i) { loaded[b] = load_vec<In, kVec>(x + i); });
      each([&](int b, int64_t i) {
        Acc v[kVec];
        unpack(loaded[b], v);
#pragma unroll
        for (int j = 0; j < kVec; ++j) v[j] = exp_of(fma(v[j], scale, -shift)) * factor;
        store_result(y + i, pack<Out, kVec>(v));
      });
    });
  }
}

template <typename In, typename Out, int kVec>
Status launch_softmax(const SoftmaxParams& p, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(std::min<int64_t>(p.rows, 1 << 30));
  return launch_kernel<scaled_softmax_kernel<In, Out, kVec>>("scaled_softmax_kernel", p, grid, kSoftmaxThreads, 0,
                                                             stream);
}

template <typename In, typename Out>
Status softmax_to(const SoftmaxParams& p, cudaStream_t stream) {
  constexpr int kVec = sizeof(In) == 8 ? 1 : kVecSize<In>;  // float64 is for reference: no vectors of it
  return p.columns % kVec == 0 ? launch_softmax<In, Out, kVec>(p, stream) : launch_softmax<In, Out, 1>(p, stream);
}

}  // namespace

Status run_scaled_softmax(const SoftmaxParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return Status::Ok();
  if (p.dtype == Dtype::kFloat64) return softmax_to<double, double>(p, stream);
  if (p.dtype == Dtype::kBFloat16) return softmax_to<__nv_bfloat16, __nv_bfloat16>(p, stream);
  if (p.dtype == Dtype::kFloat16) return softmax_to<__half, __half>(p, stream);
  if (p.to == Dtype::kBFloat16) return softmax_to<float, __nv_bfloat16>(p, stream);
  if (p.to == Dtype::kFloat16) return softmax_to<float, __half>(p, stream);
  return softmax_to<float, float>(p, stream);
}

}  // namespace kgopt
