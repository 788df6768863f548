// One kernel for every reduction [outer][reduced][inner] -> [outer][inner]: a block is a box of threads, along inner
// (coalesced where inner > 1), along reduced (coalesced where inner == 1) and along outer (where both are small).
// A reduction has: `add` of some values at once, `merge` and `result`, a state of two numbers, and whether there are
// kernels for vectors along inner.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/device/dtype.cuh"
#include "reduce/reduce.h"

namespace kgopt {

// kInner, kReduced: elements of an access along either; one of them is 1.
template <typename T, typename R, int kInner, int kReduced>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const __grid_constant__ ReduceParams p, ReduceGeometry g) {
  using Acc = acc_t<T>;
  __shared__ R shared[kInner][kReduceThreads];
  const int ti = threadIdx.x % g.along_inner;
  const int tr = threadIdx.x / g.along_inner % g.along_reduced;
  const int to = threadIdx.x / (g.along_inner * g.along_reduced);
  const int64_t block = blockIdx.x;
  const int64_t i = (block % g.inner_blocks * g.along_inner + ti) * kInner;
  const int64_t o = block / g.inner_blocks % g.outer_blocks * g.along_outer + to;
  const int64_t slice = block / (g.inner_blocks * g.outer_blocks);
  const bool mine = i < p.inner && o < p.outer;

  R state[kInner];
  if (mine) {
    const T* const x = static_cast<const T*>(p.x) + o * p.reduced * p.inner + i;
    const int64_t end = min((slice + 1) * p.slice_length, p.reduced);
    const int64_t step = int64_t(kReduced) * g.along_reduced;
    for (int64_t r = slice * p.slice_length + tr * kReduced; r < end; r += kReduceBatch * step) {
      Vec<T, kInner * kReduced> batch[kReduceBatch];
      int count = 0;
#pragma unroll
      for (int b = 0; b < kReduceBatch; ++b) {
        const int64_t at = r + b * step;
        if (at < end) {
          batch[b] = load_vec<T, kInner * kReduced>(x + at * p.inner);
          count = b + 1;
        }
      }
      if constexpr (kReduced > 1) {
#pragma unroll
        for (int b = 0; b < kReduceBatch; ++b) {
          Acc values[kReduced];
          unpack(batch[b], values);
          if (b < count) state[0].add(values, kReduced);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kInner; ++j) {
          Acc values[kReduceBatch];
#pragma unroll
          for (int b = 0; b < kReduceBatch; ++b) values[b] = to_acc(batch[b].v[j]);
          state[j].add(values, count);
        }
      }
    }
  }
  if (g.along_reduced > 1) {
#pragma unroll
    for (int j = 0; j < kInner; ++j) shared[j][threadIdx.x] = state[j];
    for (int half = g.along_reduced / 2; half > 0; half /= 2) {
      __syncthreads();
      if (tr < half) {
#pragma unroll
        for (int j = 0; j < kInner; ++j) shared[j][threadIdx.x].merge(shared[j][threadIdx.x + half * g.along_inner]);
      }
    }
#pragma unroll
    for (int j = 0; j < kInner; ++j) state[j] = shared[j][threadIdx.x];
  }
  if (tr != 0 || !mine) return;
  const int64_t at = o * p.inner + i;
  if (p.slices == 1) {
    Vec<T, kInner> y;
#pragma unroll
    for (int j = 0; j < kInner; ++j) y.v[j] = from_acc<T>(state[j].result(Acc(p.reduced)));
    store_result(static_cast<T*>(p.y) + at, y);
  } else {
    Acc* const out = static_cast<Acc*>(p.partials) + (slice * p.outer * p.inner + at) * 2;
#pragma unroll
    for (int j = 0; j < kInner; ++j) out[2 * j] = state[j].a, out[2 * j + 1] = state[j].b;
  }
}

// A result's slices are shared by `lanes` threads, a power of 2.
template <typename T, typename R>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_merge_kernel(const __grid_constant__ ReduceParams p, int lanes) {
  using Acc = acc_t<T>;
  __shared__ R shared[kReduceThreads];
  const int lane = threadIdx.x % lanes;
  const int64_t results = p.outer * p.inner, at = (int64_t(blockIdx.x) * kReduceThreads + threadIdx.x) / lanes;
  R state;
  for (int64_t slice = lane; slice < p.slices && at < results; slice += lanes) {
    const Acc* const in = static_cast<const Acc*>(p.partials) + (slice * results + at) * 2;
    R part;
    part.a = in[0];
    part.b = in[1];
    state.merge(part);
  }
  shared[threadIdx.x] = state;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) shared[threadIdx.x].merge(shared[threadIdx.x + half]);
  }
  if (lane == 0 && at < results) {
    static_cast<T*>(p.y)[at] = from_acc<T>(shared[threadIdx.x].result(Acc(p.reduced)));
  }
}

template <typename T, typename R>
Status launch_reduce_typed(const char* name, const ReduceParams& p, cudaStream_t stream) {
  if (p.outer * p.inner == 0) return Status::Ok();
  const ReduceGeometry g = reduce_geometry(p);
  const int64_t blocks = g.inner_blocks * g.outer_blocks * p.slices;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many elements for one launch");
  auto kernel = reduce_kernel<T, R, 1, 1>;
  if constexpr (sizeof(T) < 8) {
    if (p.vector > 1) kernel = reduce_kernel<T, R, 1, kVecSize<T>>;
    if constexpr (R::kVectorsAcross) {
      if (p.vector > 1 && p.inner > 1) kernel = reduce_kernel<T, R, kVecSize<T>, 1>;
    }
  }
  kernel<<<static_cast<unsigned>(blocks), kReduceThreads, 0, stream>>>(p, g);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && p.slices > 1) {
    const int lanes = power_of_two_at_least(p.slices, 128);
    const int64_t merge_blocks = (p.outer * p.inner * lanes + kReduceThreads - 1) / kReduceThreads;
    reduce_merge_kernel<T, R><<<static_cast<unsigned>(merge_blocks), kReduceThreads, 0, stream>>>(p, lanes);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

template <template <typename> class R>
Status launch_reduction(const char* name, const ReduceParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, { status = launch_reduce_typed<T, R<acc_t<T>>>(name, p, stream); });
  return status;
}

// dx of a reduction at element `at`, whose result is at `from`; kVec neighbours along inner, or along reduced where
// inner is 1 and they have one result.
template <typename T, int kVec, typename Of>
__device__ __forceinline__ void reduce_backward_at(const ReduceBackwardParams& p, const Of& of, int64_t at,
                                                   int64_t from) {
  using Acc = acc_t<T>;
  Vec<T, kVec> dy, y, x, dx;
  if (kVec > 1 && p.inner == 1) {
    const T one = static_cast<const T*>(p.dy)[from], result = Of::kReads ? static_cast<const T*>(p.y)[from] : T();
#pragma unroll
    for (int j = 0; j < kVec; ++j) dy.v[j] = one, y.v[j] = result;
  } else {
    dy = load_vec<T, kVec>(static_cast<const T*>(p.dy) + from);
    if constexpr (Of::kReads) y = load_vec<T, kVec>(static_cast<const T*>(p.y) + from);
  }
  if constexpr (Of::kReads) x = load_vec<T, kVec>(static_cast<const T*>(p.x) + at);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    Acc result;
    if constexpr (Of::kReads) {
      result = of(to_acc(dy.v[j]), to_acc(y.v[j]), to_acc(x.v[j]));
    } else {
      result = of(to_acc(dy.v[j]), Acc(p.reduced));
    }
    dx.v[j] = from_acc<T>(result);
  }
  store_result(static_cast<T*>(p.dx) + at, dx);
}

template <typename T, int kVec, typename Of>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_backward_kernel(const __grid_constant__ ReduceBackwardParams p, Of of) {
  const int64_t total = p.outer * p.reduced * p.inner, stride = int64_t(gridDim.x) * kReduceThreads * kVec;
  const bool is_small = total + stride <= 0xffffffff;  // divisions of 64 bits cost more than the memory
  for (int64_t at = (int64_t(blockIdx.x) * kReduceThreads + threadIdx.x) * kVec; at < total; at += stride) {
    const int64_t row = is_small ? uint32_t(at) / uint32_t(p.inner) : at / p.inner;
    const int64_t o = is_small ? uint32_t(row) / uint32_t(p.reduced) : row / p.reduced;
    reduce_backward_at<T, kVec>(p, of, at, o * p.inner + (at - row * p.inner));
  }
}

// Of long rows along inner a block takes kReduceBatch accesses of each thread: no division for each access.
template <typename T, int kVec, typename Of>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_backward_rows_kernel(const __grid_constant__ ReduceBackwardParams p, int64_t parts, Of of) {
  constexpr int64_t kStep = kReduceThreads * kVec;
  const int64_t row = blockIdx.x / parts, first = (blockIdx.x - row * parts) * kReduceBatch * kStep;
  const int64_t result = row / p.reduced * p.inner;
  constexpr int kAtOnce = kVec > 1 ? 2 : kReduceBatch;
#pragma unroll kAtOnce
  for (int b = 0; b < kReduceBatch; ++b) {
    const int64_t i = first + b * kStep + threadIdx.x * kVec;
    if (i < p.inner) reduce_backward_at<T, kVec>(p, of, row * p.inner + i, result + i);
  }
}

template <typename T, int kVec, typename Of>
void launch_reduce_backward_typed(const ReduceBackwardParams& p, cudaStream_t stream) {
  const int64_t accesses = p.outer * p.reduced * p.inner / kVec, run = int64_t(kReduceThreads) * kReduceBatch * kVec;
  const int64_t parts = (p.inner + run - 1) / run;
  if constexpr (sizeof(T) < 8) {
    if (p.inner >= run && p.outer * p.reduced * parts <= 0x7fffffff) {
      const unsigned blocks = static_cast<unsigned>(p.outer * p.reduced * parts);
      reduce_backward_rows_kernel<T, kVec><<<blocks, kReduceThreads, 0, stream>>>(p, parts, Of());
      return;
    }
  }
  const int64_t blocks = std::min<int64_t>((accesses + kReduceThreads - 1) / kReduceThreads, 1 << 20);
  reduce_backward_kernel<T, kVec><<<static_cast<unsigned>(blocks), kReduceThreads, 0, stream>>>(p, Of());
}

template <typename Of>
Status launch_reduce_backward(const char* name, const ReduceBackwardParams& p, cudaStream_t stream) {
  const int64_t total = p.outer * p.reduced * p.inner;
  if (total == 0) return Status::Ok();
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {
    constexpr int kVec = sizeof(T) < 8 ? kVecSize<T> : 1;
    if (reduce_vector(p, sizeof(T), {p.dy, p.x, p.y, p.dx}) == kVec) {
      launch_reduce_backward_typed<T, kVec, Of>(p, stream);
    } else {
      launch_reduce_backward_typed<T, 1, Of>(p, stream);
    }
  });
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
