// A team of threads that has a group in its registers, in the backward.
#pragma once

#include "groupnorm/small/small.cuh"

namespace kgopt {

template <typename Traits>
struct SmallTeam {
  using T = typename Traits::Element;
  static constexpr int kRun = Traits::kRun, kRuns = Traits::kRuns, kElements = Traits::kElements;

  const SmallShares& s;
  const uint32_t tid = threadIdx.x;
  uint32_t team, lane, unit, channel0;
  uint32_t rank, first, end;  // in the cluster; elements of the unit
  uint32_t base;
  uint32_t offset[kElements], channel[kElements];
  bool has[kElements];

  __device__ __forceinline__ explicit SmallTeam(const SmallShares& shares) : s(shares) {
    team = s.by_lanes(tid);
    lane = tid - team * s.by_lanes.d;
    rank = blockIdx.x & ((1u << s.blocks_log2) - 1);
    first = rank * s.chunk;
    end = min(first + s.chunk, s.elements);
    uint32_t n, g;
    if (s.owner) {
      n = team;
      g = blockIdx.x;
      unit = n * s.by_groups.d + g;
    } else {
      unit = (blockIdx.x >> s.blocks_log2) * s.teams + team;
      n = s.by_groups(unit);
      g = unit - n * s.by_groups.d;
    }
    if (team >= s.teams || unit >= s.units) end = 0;
    channel0 = g * s.channels;
    base = n * s.sample + g * s.stride;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) find(r);
  }
  // Element of the unit.
  __device__ __forceinline__ uint32_t element(int r) const { return first + (lane + r * s.by_lanes.d) * kRun; }
  __device__ __forceinline__ bool active() const { return end > 0; }
  __device__ __forceinline__ void find(int r) {
    const uint32_t i = element(r);
    uint32_t row = s.by_minor(i), column = i - row * s.by_minor.d, at = base + row * s.pitch + column;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int k = r * kRun + j;
      has[k] = i + j < end;
      offset[k] = at;
      channel[k] = channel0 + (s.channels_last ? column : row);
      ++at;
      if (++column == s.by_minor.d) {
        at += s.pitch - column;
        column = 0;
        ++row;
      }
    }
  }
  __device__ __forceinline__ void load(const void* from, T (&raw)[kElements]) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if constexpr (kRun > 1) {
        Vec<T, kRun> v{};
        if (has[r * kRun]) v = load_vec<T, kRun>(static_cast<const T*>(from) + offset[r * kRun]);
#pragma unroll
        for (int j = 0; j < kRun; ++j) raw[r * kRun + j] = v.v[j];
      } else {
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
          const int k = r * kRun + j;
          raw[k] = has[k] ? static_cast<const T*>(from)[offset[k]] : from_acc<T>(0.f);
        }
      }
    }
  }
  __device__ __forceinline__ void store(void* to, const float (&v)[kElements]) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if constexpr (kRun > 1) {
        float x[kRun];
#pragma unroll
        for (int j = 0; j < kRun; ++j) x[j] = v[r * kRun + j];
        if (has[r * kRun]) store_vec(static_cast<T*>(to) + offset[r * kRun], pack<T, kRun>(x));
      } else {
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
          const int k = r * kRun + j;
          if (has[k]) static_cast<T*>(to)[offset[k]] = from_acc<T>(v[k]);
        }
      }
    }
  }
  // Weight or bias of each element, as bits: what converts them would wait for each load in turn.
  __device__ __forceinline__ void load_affine(const void* values, bool wide, uint32_t (&bits)[kElements]) const {
    if (values == nullptr) return;
    const auto load_one = [&](int k) -> uint32_t {
      if (!has[k]) return 0;
      return wide ? static_cast<const uint32_t*>(values)[channel[k]] : static_cast<const uint16_t*>(values)[channel[k]];
    };
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      bits[r * kRun] = load_one(r * kRun);
#pragma unroll
      for (int j = 1; j < kRun; ++j) {
        // A run in one row of a contiguous tensor has one channel.
        bits[r * kRun + j] = kRun > 1 && !s.channels_last ? bits[r * kRun] : load_one(r * kRun + j);
      }
    }
  }
  __device__ __forceinline__ void affine(const void* values, bool wide, float none, const uint32_t (&bits)[kElements],
                                         float (&v)[kElements]) const {
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      if (sizeof(T) == 4 || wide) {
        v[k] = __uint_as_float(bits[k]);
      } else {
        const uint16_t half = static_cast<uint16_t>(bits[k]);
        v[k] = to_acc(*reinterpret_cast<const T*>(&half));
      }
      if (values == nullptr) v[k] = none;
    }
  }
  // Over the whole team. `shared` has an entry a warp, and is written once.
  template <int kValues>
  __device__ __forceinline__ void sum(float (&v)[kValues], float (*shared)[kValues]) const {
    const uint32_t lanes = s.by_lanes.d;
    lanes_sum(lanes, v);
    if (lanes <= 32) return;
    const uint32_t warps = lanes / 32, in_warp = tid % 32;
    if (in_warp == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared[tid / 32][i] = v[i];
    }
    __syncthreads();
    const uint32_t from = min(team * warps + in_warp, uint32_t(kSmallMaxThreads / 32 - 1));
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = in_warp < warps ? shared[from][i] : 0.f;
    // Lanes from `warps` on hold zeros, and the first ones are read.
    lanes_sum(warps > 16 ? 32 : warps > 8 ? 16 : warps > 4 ? 8 : warps > 2 ? 4 : 2, v);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = __shfl_sync(0xffffffffu, v[i], 0);
  }
};

}  // namespace kgopt
