// GroupNorm backward of groups whose x and dy stay on chip: dx with one read of both, and each channel's two sums.
// The formulas are those of group_norm_backward.cu.
#include "../common/dependent_launch.cuh"
#include "../common/pointwise.cuh"
#include "../common/reduce.cuh"
#include "group_gradient.cuh"
#include "group_norm_cluster_launch.h"
#include "group_share.cuh"
#include "groupnorm.h"
#include "vectors.cuh"

namespace kgopt {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

inline constexpr int kBwdPasses = 2;  // vectors of x, and as many of dy, that a thread has in registers

#endif

template <typename Traits>
__global__ void __launch_bounds__(kClusterMaxThreads, 2)
    group_norm_cluster_bwd_kernel(const __grid_constant__ GroupNormClusterBwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using T = typename Traits::T;
  constexpr int kVec = Traits::kVec;
  extern __shared__ __align__(128) char memory[];
  __shared__ ShareBarriers barriers;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, threads = blockDim.x, warps = threads / 32;
  const uint32_t rank = cluster_rank(), blocks = p.shares.blocks, bytes = p.shares.share * sizeof(T);
  const int64_t group = blockIdx.x / blocks;
  const GroupShare<T> share(p.shares, group, rank);
  T* const xs = reinterpret_cast<T*>(memory);
  T* const dys = reinterpret_cast<T*>(memory + bytes);
  float4* const entries = reinterpret_cast<float4*>(memory + 2 * bytes);
  float2* const table = reinterpret_cast<float2*>(entries + blocks * warps);
  float2* const sums = table + p.shares.rows;
  float2* const partials = sums + p.shares.rows;  // [channel][warp], where all warps go through a channel together

  let_dependents_start();
  if (tid == 0) {
    const void* const from[2] = {p.x, p.dy};
    start_loads(share, &barriers, memory, bytes, from, blocks * warps * sizeof(float4));
  }
  const float mean = p.mean[group], rstd = p.rstd[group];
  const int64_t channel0 = static_cast<uint32_t>(group) % p.shares.per_sample * p.shares.channels + share.row0;
  for (int k = tid; k < share.rows; k += threads) {
    table[k] = affine_at_once<T>(p.weight, p.bias, channel0 + k, p.affine_dtype);
  }
  const int edge = tid < 32 ? share.edge(lane) : -1;
  if (edge >= 0) {
    xs[edge] = static_cast<const T*>(p.x)[share.base + edge];
    dys[edge] = static_cast<const T*>(p.dy)[share.base + edge];
  }
  __syncthreads();
  cluster_arrive();

  const bool together = p.shares.together;
  const int piece = threads * kClusterPasses, stride = together ? threads : 32, at = together ? tid : lane;
  int landed = 0;
  const auto wait_for = [&](int slot) {
    for (; slot >= landed && landed < share.hi; landed += piece) barrier_wait(&barriers.loaded[landed / piece], 0);
  };
  const int s = static_cast<int>(share.s);
  for (int k = together ? 0 : warp; k < share.rows; k += together ? 1 : warps) {
    const int first = max(share.begin, k * s - share.position0), last = min(share.end, (k + 1) * s - share.position0);
    const float2 c = table[k];
    const float scale = c.x * rstd, shift = c.y;
    ChannelSums<Traits> mine;
    const int lo = (first + kVec - 1) / kVec, hi = last / kVec;
    for (int base = lo; base < hi; base += stride * kBwdPasses) {
      wait_for(min(base + stride * kBwdPasses, hi) - 1);
#pragma unroll
      for (int u = 0; u < kBwdPasses; ++u) {
        const int slot = base + at + u * stride;
        if (slot >= hi) continue;
        float x[kVec], dy[kVec];
        unpack(load_vec<T, kVec>(xs + slot * kVec), x);
        unpack(load_vec<T, kVec>(dys + slot * kVec), dy);
        mine.add(p, x, dy, mean, scale, shift);
      }
    }
    if (first % kVec != 0 || last % kVec != 0) {  // less than a vector at either end
      wait_for(min((last - 1) / kVec, share.hi - 1));
      const int head = min(lo * kVec, last), tail = max(hi * kVec, head);
      const int i = at < 16 ? first + at : tail + at - 16;
      if (i < (at < 16 ? head : last)) {
        float x[1] = {to_acc(xs[i])}, dy[1] = {to_acc(dys[i])};
        mine.add(p, x, dy, mean, scale, shift);
      }
    }
    const float dz = warp_sum(mine.dz[0] + mine.dz[1]), dz_xhat = warp_sum(mine.dz_d[0] + mine.dz_d[1]) * rstd;
    if (lane == 0) (together ? partials[k * warps + warp] : sums[k]) = make_float2(dz, dz_xhat);
  }
  __syncthreads();
  float term = 0.f, term_xhat = 0.f;
  for (int k = tid; k < share.rows; k += threads) {
    if (together) {
      float2 total = partials[k * warps];
      for (int w = 1; w < warps; ++w) {
        const float2 part = partials[k * warps + w];
        total.x += part.x;
        total.y += part.y;
      }
      sums[k] = total;
    }
    const float2 total = sums[k];
    term += table[k].x * total.x;
    term_xhat += table[k].x * total.y;
  }
  __syncwarp();
  term = warp_sum(term);
  term_xhat = warp_sum(term_xhat);
  // The first warp also tells of the first channel, which an earlier block may have begun.
  const float2 begun = warp == 0 && share.rows > 0 ? sums[0] : make_float2(0.f, 0.f);
  cluster_wait();
  exchange(make_float4(term, term_xhat, begun.x, begun.y), entries, &barriers.exchanged, rank, blocks);
  term = term_xhat = 0.f;
  for (int i = lane; i < static_cast<int>(blocks) * warps; i += 32) {
    term += entries[i].x;
    term_xhat += entries[i].y;
  }
  __syncwarp();
  const float per_element = rstd / static_cast<float>(p.shares.elements);
  term = warp_sum(term) * per_element;
  const float term_d = warp_sum(term_xhat) * (per_element * rstd);

  for (int k = tid; k < share.rows; k += threads) {
    if (k * s - share.position0 < share.begin) continue;  // begun by an earlier block, which writes it
    float2 total = sums[k];
    const int last = (k + 1) * s - share.position0;
    for (uint32_t r = 1; rank + r < blocks && last > static_cast<int>(r * p.shares.share); ++r) {
      const float4 rest = entries[(rank + r) * warps];
      total.x += rest.z;
      total.y += rest.w;
    }
    put_channel_sums(p, group * p.shares.channels + share.row0 + k, total);
  }

  T* const dx = static_cast<T*>(p.dx) + share.base;
  const int step = threads * kBwdPasses;
  const auto write = [&](int base, auto is_full) {
    constexpr bool kFull = decltype(is_full)::value;
#pragma unroll
    for (int u = 0; u < kBwdPasses; ++u) {
      const int slot = base + tid + u * threads;
      if (!kFull && (slot < share.lo || slot >= share.hi)) continue;
      uint32_t column;
      uint32_t row = share.row_of(slot * kVec, &column);
      float x[kVec], dy[kVec];
      unpack(load_vec<T, kVec>(xs + slot * kVec), x);
      unpack(load_vec<T, kVec>(dys + slot * kVec), dy);
      float2 c = table[row];
      if (column + kVec <= share.s) {
        const float2 all = make_float2(c.x * rstd, c.y);
        input_gradient<Traits>(p, x, dy, mean, [&](int) { return all; }, make_float2(term, term_d));
      } else {
        float2 each[kVec];
#pragma unroll
        for (int j = 0; j < kVec; ++j, ++column) {
          if (column == share.s) {
            column = 0;
            c = table[++row];
          }
          each[j] = make_float2(c.x * rstd, c.y);
        }
        input_gradient<Traits>(p, x, dy, mean, [&](int j) { return each[j]; }, make_float2(term, term_d));
      }
      store_values<T, kVec>(dx + slot * kVec, x, p.streaming_stores);
    }
  };
  for (int base = 0; base < share.hi; base += step) {
    if (base >= share.lo && base + step <= share.hi) {
      write(base, std::true_type());
    } else {
      write(base, std::false_type());
    }
  }
  if (edge >= 0) {
    uint32_t column;
    const float2 c = table[share.row_of(edge, &column)];
    float x[1] = {to_acc(xs[edge])}, dy[1] = {to_acc(dys[edge])};
    input_gradient<Traits>(
        p, x, dy, mean, [&](int) { return make_float2(c.x * rstd, c.y); }, make_float2(term, term_d));
    dx[edge] = from_acc<T>(x[0]);
  }
#endif
}

}  // namespace

Status run_group_norm_cluster_bwd(const GroupNormClusterBwdParams& p, const ClusterPlan& plan, cudaStream_t stream) {
  if (p.shares.blocks == 0) return run_group_norm_team_bwd(p, plan, stream);
  Status status;
  switch (p.dtype) {
#define KGOPT_CLUSTER_DTYPE(name, T)                                                                             \
  case Dtype::name:                                                                                              \
    KGOPT_DISPATCH_CHAINS(                                                                                       \
        p.pre_act, p.act, kPre, kAct,                                                                            \
        status = launch_clusters("group_norm_cluster_bwd_kernel",                                                \
                                 group_norm_cluster_bwd_kernel<ClusterTraits<T, kPre, kAct>>, p, plan, stream)); \
    break;
    KGOPT_CLUSTER_DTYPE(kFloat32, float)
    KGOPT_CLUSTER_DTYPE(kBFloat16, __nv_bfloat16)
    KGOPT_CLUSTER_DTYPE(kFloat16, __half)
#undef KGOPT_CLUSTER_DTYPE
    default: return Status::Unsupported("group_norm_cluster_bwd_kernel", "float64");
  }
  return status;
}

}  // namespace kgopt
