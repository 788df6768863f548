// GroupNorm forward with one read of x; see group_norm_fwd_params.h. Three kinds of warps work side by side in a block:
//   workers    statistics of a tile in shared memory, and normalization of the tile `lag` before
//   publisher  makes the workers' moments the tile's word; the block with the last tile of a group waits for the words
//              of the others and merges them
//   producer   one thread that starts the loads into slots that have become free
#pragma once

#include "../common/async.cuh"
#include "../common/dtype.cuh"
#include "../common/reduce.cuh"
#include "group_norm_fwd_params.h"
#include "vectors.cuh"
#include "words.cuh"

namespace kgopt {

// Threads beside the workers: the producer's and the publisher's warp.
inline constexpr int kServants = 64;

template <typename T_, Chain kPre_, Chain kAct_>
struct GroupNormFwdTraits {
  using T = T_;
  static constexpr Chain kPre = kPre_, kAct = kAct_;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kSlots = kFwdSlots, kPasses = kFwdPasses;
  static constexpr int kTileVectors = kFwdThreads * kPasses, kTileBytes = kTileVectors * 16;
  static constexpr int kThreads = kServants + kFwdThreads;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct FwdShared {
  uint64_t loaded[kFwdSlots], freed[kFwdSlots];  // of a slot
  uint64_t box_full[2], box_empty[2];
  Moments<float> box[2][kFwdThreads / 32];  // the warps' moments of the last two tiles
};

template <typename Traits>
struct FwdBlock {
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = Traits::kPasses, kSlots = Traits::kSlots;
  static constexpr int kWarps = kFwdThreads / 32;

  const GroupNormFwdParams& p;
  FwdShared& s;
  char* const slots;
  const uint32_t own;                                         // tiles of this block
  const int tid = static_cast<int>(threadIdx.x) - kServants;  // of a worker

  __device__ FwdBlock(const GroupNormFwdParams& params, FwdShared& shared, char* memory)
      : p(params), s(shared), slots(memory), own((params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x) {}

  // A group's tiles lie on 128-byte lines, or loads and stores would touch twice as many: position 0 of its first tile
  // is up to `head` vectors before the group.
  struct Tile {
    uint32_t group, index;  // index in the group
    int head, lo, hi;       // vectors lo <= v < hi of the tile are the group's
    int64_t base;           // vector 0, from the tensor's start
    // Whether all threads of a warp, and all warps, have as many of its vectors.
    __device__ __forceinline__ bool is_full() const { return lo == 0 && hi != 0 && hi % kFwdThreads == 0; }
  };
  __device__ __forceinline__ int head_of(uint32_t group) const {
    return static_cast<int>(p.x_line + group * p.group_vectors) & 7;
  }
  __device__ __forceinline__ int end_of(int head, uint32_t index) const {
    const int64_t left = p.group_vectors + head - int64_t(index) * Traits::kTileVectors;
    return static_cast<int>(left < 0 ? 0 : left < Traits::kTileVectors ? left : Traits::kTileVectors);
  }
  __device__ __forceinline__ Tile tile_of(uint32_t i) const {
    const uint32_t t = i * gridDim.x + blockIdx.x;
    Tile tile;
    tile.group = t / p.tiles_per_group;
    tile.index = t - tile.group * p.tiles_per_group;
    tile.head = head_of(tile.group);
    tile.lo = tile.index == 0 ? tile.head : 0;
    tile.hi = end_of(tile.head, tile.index);
    tile.base = tile.group * p.group_vectors - tile.head + int64_t(tile.index) * Traits::kTileVectors;
    return tile;
  }
  __device__ __forceinline__ const T* slot(uint32_t i) const {
    return reinterpret_cast<const T*>(slots + i % kSlots * Traits::kTileBytes);
  }

  __device__ __forceinline__ void produce() const {
    const uint64_t policy = evict_first_policy();  // nobody reads x again
    for (uint32_t i = 0; i < own; ++i) {
      const uint32_t k = i % kSlots;
      if (i >= kSlots) barrier_wait(&s.freed[k], (i / kSlots - 1) & 1);
      const Tile t = tile_of(i);
      const int vectors = t.hi - t.lo;
      if (vectors <= 0) {  // the other groups' heads need this tile
        barrier_arrive(&s.loaded[k]);
        continue;
      }
      barrier_expect_bytes(&s.loaded[k], vectors * 16);
      bulk_load(slots + k * Traits::kTileBytes + t.lo * 16, static_cast<const T*>(p.x) + (t.base + t.lo) * kVec,
                vectors * 16, &s.loaded[k], policy);
    }
  }

  __device__ __forceinline__ void publish() const {
    const int lane = threadIdx.x % 32;
    for (uint32_t i = 0; i < own; ++i) {
      const int b = i & 1;
      const Tile t = tile_of(i);
      barrier_wait(&s.box_full[b], i / 2 & 1);
      Moments<float> m;
      if (lane < kWarps) m = s.box[b][lane];
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.box_empty[b]);
      if (t.is_full()) {
        m = warp_merge_equal(__shfl_sync(0xffffffffu, m.mean, lane % kWarps),
                             __shfl_sync(0xffffffffu, m.m2, lane % kWarps), float(t.hi * kVec / kWarps), kWarps);
      } else {
        m = warp_merge(m);
      }
      uint64_t* const words = p.partials + int64_t(t.group) * p.tiles_per_group;
      if (lane == 0) store_word(words + t.index, pack_word(m.mean, m.m2));
      if (t.index != p.tiles_per_group - 1) continue;
      __syncwarp();
      m = fold_words<Moments<float>>(
          words, static_cast<int>(p.tiles_per_group),
          [&](Moments<float>& sum, uint64_t word, int j) {
            const float2 v = unpack_word(word);
            const int vectors = end_of(t.head, j) - (j == 0 ? t.head : 0);
            merge(sum, Moments<float>{v.x, v.y, float(vectors * kVec)});
          },
          [](const Moments<float>& sum) { return warp_merge(sum); });
      if (lane == 0) {
        const float rstd = 1.f / sqrtf(m.m2 / m.count + p.eps);
        store_word(p.ready + t.group, pack_word(m.mean, rstd));
        p.mean[t.group] = m.mean;
        p.rstd[t.group] = rstd;
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ float2 affine(int64_t c) const { return affine_of(p.weight, p.bias, c, p.affine_dtype); }

  // Exact deviations from the mean of a thread's values, then merges: nothing cancels whatever the offset.
  __device__ __forceinline__ void stats(uint32_t i) const {
    const Tile t = tile_of(i);
    barrier_wait(&s.loaded[i % kSlots], i / kSlots & 1);
    const T* const from = slot(i) + tid * kVec;
    float x[kPasses][kVec];
    float sums[kVec] = {};  // side by side: a single chain of additions would take longer than all else
    int used = 0;
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      const int v = tid + k * kFwdThreads;
      if (v >= t.lo && v < t.hi) {
        values_of<Traits::kPre>(load_vec<T, kVec>(from + k * kFwdThreads * kVec), p.pre_act, x[k]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[j] += x[k][j];
        used += kVec;
      }
    }
    const float mean = quotient(sum_of(sums), float(used == 0 ? 1 : used));
    float squares[kVec] = {};
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      const int v = tid + k * kFwdThreads;
      if (v >= t.lo && v < t.hi) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const float d = x[k][j] - mean;
          squares[j] += d * d;
        }
      }
    }
    const Moments<float> own_moments{mean, sum_of(squares), float(used)};
    const Moments<float> m =
        t.is_full() ? warp_merge_equal(own_moments.mean, own_moments.m2, own_moments.count) : warp_merge(own_moments);
    const int b = i & 1;
    if (tid % 32 == 0) {
      barrier_wait(&s.box_empty[b], (i / 2 & 1) ^ 1);
      s.box[b][tid / 32] = m;
      barrier_arrive(&s.box_full[b]);
    }
    __syncwarp();
  }
  // `word`: the group's, or zero where it was not there yet.
  __device__ __forceinline__ void normalize(uint32_t i, uint64_t word) const {
    const Tile t = tile_of(i);
    const int64_t begin = t.index == 0 ? 0 : (int64_t(t.index) * Traits::kTileVectors - t.head) * kVec;
    const int64_t row = __umul64hi(begin, p.s_magic64);
    const uint32_t column0 = static_cast<uint32_t>(begin - row * p.dims.s), length = static_cast<uint32_t>(p.dims.s);
    const int64_t channel0 = int64_t(t.group % static_cast<uint32_t>(p.dims.g)) * p.channels_per_group + row;
    T* const y = static_cast<T*>(p.y) + t.base * kVec;
    const T* const from = slot(i);
    if (word == 0) word = wait_word(p.ready + t.group);
    const float2 statistics = unpack_word(word);
    const float mean = statistics.x, rstd = statistics.y;
    const float2 first = affine(channel0);
    if (column0 + uint32_t(t.hi - t.lo) * kVec <= length) {
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        const int v = tid + k * kFwdThreads;
        if (v < t.lo || v >= t.hi) continue;
        const Vec<T, kVec> input = load_vec<T, kVec>(from + v * kVec);
        float x[kVec];
        values_of<Traits::kPre>(input, p.pre_act, x);
        scale_shift(x, mean, first.x * rstd, first.y);
        finish_values<Traits::kAct>(y + v * kVec, input, p.act, p.add_input, p.streaming_stores, x);
      }
      return;
    }
    // Row, weight and bias of each vector's first element; loads of all vectors before the first use.
    uint32_t row_of[kPasses], column_of[kPasses];
    float2 coefficients[kPasses];
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      const int v = tid + k * kFwdThreads;
      const uint32_t position = column0 + uint32_t(v >= t.lo && v < t.hi ? v - t.lo : 0) * kVec;
      row_of[k] = __umulhi(position, p.s_magic) >> p.s_shift;
      column_of[k] = position - row_of[k] * length;
      coefficients[k] = affine(channel0 + row_of[k]);
    }
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      const int v = tid + k * kFwdThreads;
      if (v < t.lo || v >= t.hi) continue;
      const Vec<T, kVec> input = load_vec<T, kVec>(from + v * kVec);
      float x[kVec];
      values_of<Traits::kPre>(input, p.pre_act, x);
      if (column_of[k] + kVec <= length) {
        scale_shift(x, mean, coefficients[k].x * rstd, coefficients[k].y);
      } else {
        scale_shift_across(x, mean, rstd, column_of[k], length, channel0 + row_of[k],
                           [&](int64_t c) { return affine(c); });
      }
      finish_values<Traits::kAct>(y + v * kVec, input, p.act, p.add_input, p.streaming_stores, x);
    }
  }

  __device__ __forceinline__ void work() const {
    for (uint32_t i = 0; i < own + p.lag; ++i) {
      const uint32_t j = i - p.lag;
      const bool normalizes = i >= p.lag;
      // Asked for now, looked at after the statistics.
      const uint64_t word = normalizes ? load_word(p.ready + (j * gridDim.x + blockIdx.x) / p.tiles_per_group) : 0;
      if (i < own) stats(i);
      if (!normalizes) continue;
      normalize(j, word);
      __syncwarp();
      if (tid % 32 == 0) barrier_arrive(&s.freed[j % kSlots]);
    }
  }
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    group_norm_fwd_kernel(const __grid_constant__ GroupNormFwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char slots[];
  __shared__ FwdShared shared;
  if (threadIdx.x == 0) {
    for (int k = 0; k < Traits::kSlots; ++k) {
      barrier_init(&shared.loaded[k], 1);
      barrier_init(&shared.freed[k], kFwdThreads / 32);
    }
    for (int b = 0; b < 2; ++b) {
      barrier_init(&shared.box_full[b], kFwdThreads / 32);
      barrier_init(&shared.box_empty[b], 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const FwdBlock<Traits> block(p, shared, slots);
  if (threadIdx.x >= kServants) {
    block.work();
  } else if (threadIdx.x >= 32) {
    block.publish();
  } else if (threadIdx.x == 0) {
    block.produce();
  }
#endif
}

}  // namespace kgopt
