// GroupNorm forward and backward of channels_last tensors with narrow groups; see SlabShares. The formulas of backward
// are those of groupnorm/passes/backward.cu.
#include "common/device/dependent_launch.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/reduce.cuh"
#include "common/host/launch.h"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"
#include "groupnorm/shared/vectors.cuh"
#include "groupnorm/slab/plan.h"

namespace kgopt {
namespace {

inline constexpr int kSlabUnroll = 8;
inline constexpr int kSlabWarps = kSlabThreads / 32;
// Entries of a walker and a column, a walker apart by one more than the columns so that warps read without conflicts.
inline constexpr int kSlabEntries = kSlabThreads + kSlabThreads / 16;

struct SlabBlock {
  const SlabShares& s;
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  uint32_t column, walker, groups, channel0, unit0;  // of the slab: its groups, first channel and first group
  uint32_t own_group;                                // of the column, in the slab
  bool active;
  uint32_t first, step, rows;  // elements of this thread

  __device__ __forceinline__ explicit SlabBlock(const SlabShares& shares) : s(shares) {
    const uint32_t n = s.by_per_sample(blockIdx.x), slab = blockIdx.x - n * s.per_sample;
    column = tid & (s.columns - 1);
    walker = tid >> (s.columns == 32 ? 5 : 4);
    const uint32_t group0 = slab * s.groups;
    groups = min(s.groups, s.g - group0);
    channel0 = group0 * s.channels;
    unit0 = n * s.g + group0;
    active = column < groups * s.channels;
    own_group = active ? s.by_channels(column) : 0;
    rows = active && walker < s.s ? (s.s - walker + s.walkers - 1) >> (s.columns == 32 ? 4 : 5) : 0;
    first = (n * s.s + walker) * s.c + channel0 + column;
    step = s.walkers * s.c;
  }
  __device__ __forceinline__ uint32_t entry(uint32_t w, uint32_t at) const { return w * (s.columns + 1) + at; }
  template <typename Params>
  __device__ __forceinline__ float2 affine(const Params& p) const {
    return active ? affine_of(p.weight, p.bias, channel0 + column, p.affine_dtype) : make_float2(0.f, 0.f);
  }
};

template <typename T>
__device__ __forceinline__ void to_values(const T (&raw)[kSlabUnroll], float (&x)[kSlabUnroll]) {
#pragma unroll
  for (int k = 0; k < kSlabUnroll; ++k) x[k] = to_acc(raw[k]);
}

static_assert(kSlabThreads == 512, "SlabBlock::rows divides by the walkers: 16 or 32");

template <typename T, Chain kPre, Chain kAct>
__global__ void __launch_bounds__(kSlabThreads, 2)
    group_norm_slab_fwd_kernel(const __grid_constant__ GroupNormSlabFwdParams p) {
  __shared__ float2 entries[kSlabEntries];
  __shared__ float2 stats[32];
  const SlabBlock b(p.shares);
  const T* const x = static_cast<const T*>(p.x);
  const float2 affine = b.affine(p);
  ShiftedSums<float> mine;
  for (uint32_t k0 = 0; k0 < b.rows; k0 += kSlabUnroll) {
    T raw[kSlabUnroll];
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k < b.rows) raw[k] = x[b.first + (k0 + k) * b.step];
    }
    float u[kSlabUnroll];
    to_values(raw, u);
    apply_chain<kPre, kIsCoarse<T>>(p.pre_act, u);
    if (k0 == 0) mine.shift = u[0];
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k < b.rows) mine.add(u[k]);
    }
  }
  const Moments<float> m = mine.moments(static_cast<float>(b.rows));
  entries[b.entry(b.walker, b.column)] = make_float2(m.mean, m.m2);
  __syncthreads();
  const uint32_t counted = min(b.s.walkers, b.s.s), sets = counted * b.s.channels;
  const uint32_t full = b.s.s >> (b.s.columns == 32 ? 4 : 5), rest = b.s.s - full * b.s.walkers;
  const float elements = static_cast<float>(b.s.s) * static_cast<float>(b.s.channels);
  for (uint32_t g = b.warp; g < b.groups; g += kSlabWarps) {
    const auto set_of = [&](uint32_t i, float* count) {
      const uint32_t w = b.s.by_channels(i), c = i - w * b.s.channels;
      *count = static_cast<float>(full + (w < rest ? 1 : 0));
      return entries[b.entry(w, g * b.s.channels + c)];
    };
    // Means are merged relative to one of them, so that an offset common to all does not cancel.
    const float origin = entries[b.entry(0, g * b.s.channels)].x;
    float sum = 0.f, m2 = 0.f, count;
    for (uint32_t i = b.lane; i < sets; i += 32) {
      const float2 e = set_of(i, &count);
      sum += count * (e.x - origin);
    }
    const float mean = origin + quotient(warp_sum(sum), elements);
    for (uint32_t i = b.lane; i < sets; i += 32) {
      const float2 e = set_of(i, &count);
      m2 += e.y + count * (e.x - mean) * (e.x - mean);
    }
    const float rstd = reciprocal_root(quotient(warp_sum(m2), elements) + p.eps);
    if (b.lane == 0) {
      stats[g] = make_float2(mean, rstd);
      p.mean[b.unit0 + g] = mean;
      p.rstd[b.unit0 + g] = rstd;
    }
  }
  __syncthreads();
  const float2 stat = stats[b.own_group];
  const float scale = stat.y * affine.x;
  T* const y = static_cast<T*>(p.y);
  for (uint32_t k0 = 0; k0 < b.rows; k0 += kSlabUnroll) {
    T raw[kSlabUnroll];
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k < b.rows) raw[k] = x[b.first + (k0 + k) * b.step];
    }
    float u[kSlabUnroll];
    to_values(raw, u);
    apply_chain<kPre, kIsCoarse<T>>(p.pre_act, u);
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) u[k] = (u[k] - stat.x) * scale + affine.y;
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k < b.rows) u[k] = extended<kAct>(p, y + b.first + (k0 + k) * b.step, u[k]);
    }
    apply_chain<kAct, kIsCoarse<T>>(floored(p.act), u);
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k >= b.rows) break;
      y[b.first + (k0 + k) * b.step] = from_acc<T>(p.add_input ? u[k] + to_acc(raw[k]) : u[k]);
    }
  }
}

template <typename T, Chain kPre, Chain kAct>
__global__ void __launch_bounds__(kSlabThreads, 2)
    group_norm_slab_bwd_kernel(const __grid_constant__ GroupNormSlabBwdParams p) {
  __shared__ float2 entries[kSlabEntries];
  __shared__ float2 totals[32];  // weighted
  let_dependents_start();
  const SlabBlock b(p.shares);
  const T* const x = static_cast<const T*>(p.x);
  const T* const dy = static_cast<const T*>(p.dy);
  const float2 affine = b.affine(p);
  const float mean = p.mean[b.unit0 + b.own_group], rstd = p.rstd[b.unit0 + b.own_group];
  const auto load_both = [&](uint32_t k0, T(&raw_x)[kSlabUnroll], T(&raw_dy)[kSlabUnroll]) {
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k < b.rows) {
        raw_x[k] = x[b.first + (k0 + k) * b.step];
        raw_dy[k] = dy[b.first + (k0 + k) * b.step];
      }
    }
  };
  float2 sums = make_float2(0.f, 0.f);
  for (uint32_t k0 = 0; k0 < b.rows; k0 += kSlabUnroll) {
    T raw_x[kSlabUnroll], raw_dy[kSlabUnroll];
    load_both(k0, raw_x, raw_dy);
    float xhat[kSlabUnroll], dz[kSlabUnroll];
    to_values(raw_x, xhat);
    to_values(raw_dy, dz);
    apply_chain<kPre, kIsCoarse<T>>(p.pre_act, xhat);
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) xhat[k] = (xhat[k] - mean) * rstd;
    make_dz<kAct, kIsCoarse<T>>(p.act, xhat, dz, [&](int) { return affine; });
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k >= b.rows) break;
      sums.x += dz[k];
      sums.y += dz[k] * xhat[k];
    }
  }
  entries[b.entry(b.walker, b.column)] = sums;
  __syncthreads();
  for (uint32_t c = b.warp; c < b.groups * b.s.channels; c += kSlabWarps) {
    const float2 e = b.lane < b.s.walkers ? entries[b.entry(b.lane, c)] : make_float2(0.f, 0.f);
    const float dz = warp_sum(e.x), dz_xhat = warp_sum(e.y);
    if (b.lane == 0) {
      reinterpret_cast<float2*>(p.channel_sums)[int64_t(b.unit0) * b.s.channels + c] = make_float2(dz, dz_xhat);
      const float weight = affine_of(p.weight, nullptr, b.channel0 + c, p.affine_dtype).x;
      totals[c] = make_float2(weight * dz, weight * dz_xhat);
    }
  }
  __syncthreads();
  float term = 0.f, term_xhat = 0.f;
  for (uint32_t c = 0; c < b.s.channels; ++c) {
    const float2 total = totals[b.own_group * b.s.channels + c];
    term += total.x;
    term_xhat += total.y;
  }
  const float elements = static_cast<float>(b.s.s) * static_cast<float>(b.s.channels);
  const float2 terms = make_float2(term * rstd / elements, term_xhat * rstd * rstd / elements);
  const float2 coefficients = make_float2(affine.x * rstd, affine.y);
  T* const dx = static_cast<T*>(p.dx);
  for (uint32_t k0 = 0; k0 < b.rows; k0 += kSlabUnroll) {
    T raw_x[kSlabUnroll], raw_dy[kSlabUnroll];
    load_both(k0, raw_x, raw_dy);
    float values[kSlabUnroll], dz[kSlabUnroll];
    to_values(raw_x, values);
    to_values(raw_dy, dz);
    make_dx<kPre, kAct, kIsCoarse<T>, false>(
        p.pre_act, p.act, values, dz, [&](int) { return mean; }, [&](int) { return coefficients; },
        [&](int) { return terms; });
#pragma unroll
    for (int k = 0; k < kSlabUnroll; ++k) {
      if (k0 + k >= b.rows) break;
      dx[b.first + (k0 + k) * b.step] = from_acc<T>(values[k]);
    }
  }
}

}  // namespace

Status run_group_norm_slab_fwd(const GroupNormSlabFwdParams& p, const SlabPlan& plan, cudaStream_t stream) {
  constexpr const char* kName = "group_norm_slab_fwd_kernel";
  return dispatch_norm<false>(kName, p, [&](auto traits) {
    using Traits = decltype(traits);
    constexpr auto kKernel = group_norm_slab_fwd_kernel<typename Traits::T, Traits::kPre, Traits::kAct>;
    return launch_kernel<kKernel>(kName, p, dim3(plan.grid), kSlabThreads, 0, stream);
  });
}

Status run_group_norm_slab_bwd(const GroupNormSlabBwdParams& p, const SlabPlan& plan, cudaStream_t stream) {
  constexpr const char* kName = "group_norm_slab_bwd_kernel";
  return dispatch_norm<false>(kName, p, [&](auto traits) {
    using Traits = decltype(traits);
    constexpr auto kKernel = group_norm_slab_bwd_kernel<typename Traits::T, Traits::kPre, Traits::kAct>;
    return launch_kernel<kKernel>(kName, p, dim3(plan.grid), kSlabThreads, 0, stream);
  });
}

}  // namespace kgopt
