// GroupNorm backward of groups whose x and dy stay on chip: dx with one read of both, and each channel's two sums.
// The formulas are those of groupnorm/passes/backward.cu.
#include "common/device/dependent_launch.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/cluster/launch.h"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"
#include "groupnorm/shared/group_gradient.cuh"
#include "groupnorm/shared/group_share.cuh"
#include "groupnorm/shared/vectors.cuh"

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
  const float per_element = rstd * reciprocal_of_count(static_cast<float>(p.shares.elements));
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

// The same where registers hold a block's share, kHeldBwd vectors of x and of dy a thread, no vector is in two channels
// and the share is of few channels. dy becomes dz, which takes as long to compute as its loads, once.
template <typename Traits>
__global__ void __launch_bounds__(kHeldThreads, 5)
    group_norm_cluster_held_bwd_kernel(const __grid_constant__ GroupNormClusterBwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using T = typename Traits::T;
  constexpr int kVec = Traits::kVec, kHold = kHeldBwd, kWarps = kHeldThreads / 32;
  constexpr bool kCoarse = kIsCoarse<T>;
  extern __shared__ __align__(16) float4 entries[];
  __shared__ uint64_t exchanged;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const uint32_t rank = cluster_rank(), blocks = p.shares.blocks;
  const int64_t group = cluster_id();
  float2* const partials = reinterpret_cast<float2*>(entries + blocks * kWarps);  // [channel][warp]

  const ShareVectors<T> vectors(p.shares, group, rank);
  const auto has = [&](int u) { return vectors.has(tid + u * kHeldThreads); };
  const int64_t at = vectors.base + tid * kVec;
  Vec<T, kVec> xs[kHold], dys[kHold];
#pragma unroll
  for (int u = 0; u < kHold; ++u) {
    if (!has(u)) continue;
    xs[u] = load_vec<T, kVec>(static_cast<const T*>(p.x) + at + u * kHeldThreads * kVec);
    dys[u] = load_vec<T, kVec>(static_cast<const T*>(p.dy) + at + u * kHeldThreads * kVec);
  }
  asm volatile("" ::: "memory");  // nothing that these do not need comes before them
  const GroupShare<T> share(p.shares, group, rank);
  const float mean = p.mean[group], rstd = p.rstd[group];
  const int64_t channel0 = static_cast<uint32_t>(group) % p.shares.per_sample * p.shares.channels + share.row0;
  int row[kHold];
  float weight[kHold], bias[kHold];
#pragma unroll
  for (int u = 0; u < kHold; ++u) {
    row[u] = -1;
    if (!has(u)) continue;
    row[u] = static_cast<int>(share.quotient_by_s(share.position0 + (tid + u * kHeldThreads) * kVec));
    const float2 c = affine_of<T>(p.weight, p.bias, channel0 + row[u], p.affine_dtype);
    weight[u] = c.x;
    bias[u] = c.y;
  }
  let_dependents_start();
  if (tid == 0) {
    barrier_init(&exchanged, 1);
    barrier_init_fence();
  }
  __syncwarp();  // the compiler initializes it by the whole warp
  if (tid == 0) barrier_expect_bytes(&exchanged, blocks * kWarps * sizeof(float4));
  cluster_arrive();

  float dz[kHold][kVec], sum[kHold] = {}, sum_d[kHold] = {}, term = 0.f, term_d = 0.f;
#pragma unroll
  for (int u = 0; u < kHold; ++u) {
    if (!has(u)) continue;
    float x[kVec];
    values_of<Traits::kPre>(xs[u], p.pre_act, x);
    unpack(dys[u], dz[u]);
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] -= mean;
    make_dz<Traits::kAct, kCoarse>(p.act, x, dz[u], [&](int) { return make_float2(weight[u] * rstd, bias[u]); });
    float products[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) products[j] = dz[u][j] * x[j];
    sum[u] = sum_of(dz[u]);
    sum_d[u] = sum_of(products);
    term += weight[u] * sum[u];
    term_d += weight[u] * sum_d[u];
  }
  forget_values(xs);
  term = warp_sum(term);
  term_d = warp_sum(term_d);
  // Every warp also tells of the first channel, which an earlier block may have begun.
  float2 begun = make_float2(0.f, 0.f);
  for (int k = 0; k < share.rows; ++k) {
    float2 part = make_float2(0.f, 0.f);
#pragma unroll
    for (int u = 0; u < kHold; ++u) {
      part.x += row[u] == k ? sum[u] : 0.f;
      part.y += row[u] == k ? sum_d[u] : 0.f;
    }
    part = make_float2(warp_sum(part.x), warp_sum(part.y) * rstd);
    if (k == 0) begun = part;
    if (lane == 0) partials[k * kWarps + warp] = part;
  }
  cluster_wait();
  exchange(make_float4(term, term_d, begun.x, begun.y), entries, &exchanged, rank, blocks);
  term = term_d = 0.f;
#pragma unroll
  for (int i = 0; i < kClusterMaxBlocks * kWarps; i += 32) {
    if (lane + i < static_cast<int>(blocks) * kWarps) {
      term += entries[lane + i].x;
      term_d += entries[lane + i].y;
    }
  }
  const float per_element = rstd * reciprocal_of_count(static_cast<float>(p.shares.elements));
  const float2 terms = make_float2(warp_sum(term) * per_element, warp_sum(term_d) * (per_element * rstd * rstd));

  T* const dx = static_cast<T*>(p.dx) + at;
  const uint64_t policy = store_policy(p.streaming_stores);
#pragma unroll
  for (int u = 0; u < kHold; ++u) {
    if (!has(u)) continue;
    float x[kVec];
    unpack(xs[u], x);
    make_dx<Traits::kPre, Traits::kAct, kCoarse, true>(
        p.pre_act, p.act, x, dz[u], [&](int) { return mean; },
        [&](int) { return make_float2(weight[u] * rstd, bias[u]); }, [&](int) { return terms; });
    store_values<T, kVec>(dx + u * kHeldThreads * kVec, x, policy);
  }

  const int s = static_cast<int>(share.s);
  for (int k = warp; k < share.rows; k += kWarps) {
    if (k * s - share.position0 < share.begin) continue;  // begun by an earlier block, which writes it
    float2 total = lane < kWarps ? partials[k * kWarps + lane] : make_float2(0.f, 0.f);
    const int last = (k + 1) * s - share.position0;
    const int more = min(static_cast<int>(blocks - rank) - 1, (last - 1) / static_cast<int>(p.shares.share));
    for (int i = lane; i < more * kWarps; i += 32) {
      const float4 rest = entries[(rank + 1) * kWarps + i];
      total.x += rest.z;
      total.y += rest.w;
    }
    __syncwarp();
    total = make_float2(warp_sum(total.x), warp_sum(total.y));
    if (lane == 0) put_channel_sums(p, group * p.shares.channels + share.row0 + k, total);
  }
#endif
}

template <typename Traits>
Status launch(Traits, const GroupNormClusterBwdParams& p, const ClusterPlan& plan, cudaStream_t stream) {
  return plan.hold > 0
             ? launch_clusters("group_norm_cluster_held_bwd_kernel", group_norm_cluster_held_bwd_kernel<Traits>, p,
                               plan, stream)
             : launch_clusters("group_norm_cluster_bwd_kernel", group_norm_cluster_bwd_kernel<Traits>, p, plan, stream);
}

}  // namespace

Status run_group_norm_cluster_bwd(const GroupNormClusterBwdParams& p, const ClusterPlan& plan, cudaStream_t stream) {
  if (p.shares.blocks == 0) return run_group_norm_cluster_team_bwd(p, plan, stream);
  return dispatch_norm("group_norm_cluster_bwd_kernel", p,
                       [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
