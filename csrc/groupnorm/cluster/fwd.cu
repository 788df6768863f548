// GroupNorm forward of groups that stay on chip: one launch, x read once.
#include <mutex>

#include "groupnorm/cluster/launch.h"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"
#include "groupnorm/shared/group_share.cuh"
#include "groupnorm/shared/vectors.cuh"

namespace kgopt {
namespace {

// (x - mean) * rstd * weight + bias of neighbouring channels, the first of them `column`.
template <int kVec>
__device__ __forceinline__ void scale_shift_minor(float (&x)[kVec], float mean, float rstd, uint32_t column,
                                                  uint32_t channels, const float2* table) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const float2 c = table[column];
    x[j] = (x[j] - mean) * (c.x * rstd) + c.y;
    if (++column == channels) column = 0;
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Of what has been told, up to 32 * kOwn entries; the same in every thread.
template <int kOwn>
__device__ __forceinline__ Moments<float> merge_entries(const float4* entries, int count, uint32_t elements) {
  Moments<float> sets[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = static_cast<int>(threadIdx.x % 32) + 32 * i;
    if (at < count) {
      const float4 entry = entries[at];
      sets[i] = Moments<float>{entry.x, entry.y, entry.z};
    }
  }
  return warp_pool(sets, static_cast<float>(elements));
}

// Weight and bias of the share's channels, or of all where channels are innermost.
template <typename T>
__device__ __forceinline__ void load_table(const GroupNormClusterFwdParams& p, const GroupShare<T>& share,
                                           int64_t group, bool minor, int tid, int threads, float2* table) {
  const int64_t channel0 =
      minor ? 0 : static_cast<uint32_t>(group) % p.shares.per_sample * p.shares.channels + share.row0;
  const int rows = minor ? static_cast<int>(p.shares.channels) : share.rows;
  for (int k = tid; k < rows; k += threads) {
    table[k] = affine_at_once<T>(p.weight, p.bias, channel0 + k, p.affine_dtype);
  }
}

// An element of the share that is in no whole vector.
template <int kVec>
__device__ __forceinline__ void add_edge(ThreadMoments<kVec>& mine, float value) {
  if (mine.count == 0) mine.shift = value;
  const float d = value - mine.shift;
  mine.sums[0] += d;
  mine.squares[0] += d * d;
  ++mine.count;
}

// A vector of the share, relative to the group's mean, by the channels' table.
template <typename T, int kVec>
__device__ __forceinline__ void scale_vector(float (&v)[kVec], const GroupShare<T>& share, bool minor, int slot,
                                             float mean, float rstd, const float2* table) {
  uint32_t column;
  const uint32_t row = share.row_of(slot * kVec, &column);
  if (minor) {
    scale_shift_minor(v, mean, rstd, column, share.s, table);
  } else if (column + kVec <= share.s) {
    const float2 c = table[row];
    scale_shift(v, mean, c.x * rstd, c.y);
  } else {
    scale_shift_across(v, mean, rstd, column, share.s, row, [&](uint32_t r) { return table[r]; });
  }
}

#endif

// One cluster a group.
template <typename Traits>
__global__ void __launch_bounds__(kClusterMaxThreads, 2)
    group_norm_cluster_fwd_kernel(const __grid_constant__ GroupNormClusterFwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using T = typename Traits::T;
  constexpr int kVec = Traits::kVec, kPasses = kClusterPasses;
  constexpr bool kExtends = Traits::kAct == Chain::kAny;
  extern __shared__ __align__(128) char memory[];
  __shared__ ShareBarriers barriers;
  const int tid = threadIdx.x, lane = tid % 32, threads = blockDim.x, warps = threads / 32;
  const uint32_t rank = cluster_rank(), blocks = p.shares.blocks;
  const int64_t group = blockIdx.x / blocks;
  const GroupShare<T> share(p.shares, group, rank);
  T* const xs = reinterpret_cast<T*>(memory);
  float4* const entries = reinterpret_cast<float4*>(memory + p.shares.share * sizeof(T));
  float2* const table = reinterpret_cast<float2*>(entries + blocks * warps);

  if (tid == 0) {
    const void* const from[1] = {p.x};
    start_loads(share, &barriers, memory, 0, from, blocks * warps * sizeof(float4));
  }
  __syncthreads();
  const bool minor = p.shares.minor;
  load_table(p, share, group, minor, tid, threads, table);
  const T* const x = static_cast<const T*>(p.x) + share.base;
  const int edge = tid < 32 ? share.edge(lane) : -1;
  float edge_value = 0.f;
  if (edge >= 0) edge_value = apply_chain<Traits::kPre>(p.pre_act, to_acc(x[edge]));
  cluster_arrive();

  ThreadMoments<kVec> mine;
  const int first = tid < share.lo ? tid + threads : tid;
  const int step = threads * kPasses;
  for (int base = 0, k = 0; base < share.hi; base += step, ++k) {
    barrier_wait(&barriers.loaded[k], 0);
    if (k == 0 && first < share.hi) {
      float v[kVec];
      values_of<Traits::kPre>(load_vec<T, kVec>(xs + first * kVec), p.pre_act, v);
      mine.shift = sum_of(v) * (1.f / kVec);
    }
    const T* const from = xs + (base + tid) * kVec;
    if (base >= share.lo && base + step <= share.hi) {
#pragma unroll
      for (int u = 0; u < kPasses; ++u) {
        float v[kVec];
        values_of<Traits::kPre>(load_vec<T, kVec>(from + u * threads * kVec), p.pre_act, v);
        mine.add(v);
      }
      mine.count += kPasses * kVec;
    } else {
#pragma unroll
      for (int u = 0; u < kPasses; ++u) {
        const int slot = base + tid + u * threads;
        if (slot >= share.lo && slot < share.hi) {
          float v[kVec];
          values_of<Traits::kPre>(load_vec<T, kVec>(from + u * threads * kVec), p.pre_act, v);
          mine.add(v);
          mine.count += kVec;
        }
      }
    }
  }
  if (edge >= 0) add_edge(mine, edge_value);
  const int counted = __reduce_add_sync(0xffffffffu, mine.count);
  {
    const Moments<float> own[1] = {mine.moments()};
    const Moments<float> m = warp_pool(own, static_cast<float>(max(counted, 1)));
    cluster_wait();
    exchange(make_float4(m.mean, m.m2, static_cast<float>(counted), 0.f), entries, &barriers.exchanged, rank, blocks);
  }
  constexpr int kOwn = kClusterMaxBlocks * kClusterMaxThreads / 32 / 32;
  const Moments<float> all = merge_entries<kOwn>(entries, static_cast<int>(blocks) * warps, p.shares.elements);
  const float mean = all.mean, rstd = reciprocal_root(quotient(all.m2, all.count) + p.eps);
  if (rank == 0 && tid == 0) {
    p.mean[group] = mean;
    p.rstd[group] = rstd;
  }

  T* const y = static_cast<T*>(p.y) + share.base;
  const auto normalize = [&](int base, auto is_full) {
    constexpr bool kFull = decltype(is_full)::value;
    uint32_t row[kPasses], column[kPasses];
    float2 coefficients[kPasses];
#pragma unroll
    for (int u = 0; u < kPasses; ++u) {
      int slot = base + tid + u * threads;
      if (!kFull && (slot < share.lo || slot >= share.hi)) slot = share.lo;
      row[u] = share.row_of(slot * kVec, &column[u]);
      coefficients[u] = table[minor ? column[u] : row[u]];
    }
#pragma unroll
    for (int u = 0; u < kPasses; ++u) {
      const int slot = base + tid + u * threads;
      if (!kFull && (slot < share.lo || slot >= share.hi)) continue;
      const Vec<T, kVec> input = load_vec<T, kVec>(xs + slot * kVec);
      float v[kVec];
      values_of<Traits::kPre>(input, p.pre_act, v);
      if (minor) {
        scale_shift_minor(v, mean, rstd, column[u], share.s, table);
      } else if (column[u] + kVec <= share.s) {
        scale_shift(v, mean, coefficients[u].x * rstd, coefficients[u].y);
      } else {
        scale_shift_across(v, mean, rstd, column[u], share.s, row[u], [&](uint32_t r) { return table[r]; });
      }
      finish_values<Traits::kAct, false, kExtends>(p, y + slot * kVec, input, p.streaming_stores, v);
    }
  };
  for (int base = 0; base < share.hi; base += step) {
    if (base >= share.lo && base + step <= share.hi) {
      normalize(base, std::true_type());
    } else {
      normalize(base, std::false_type());
    }
  }
  if (edge >= 0) {
    uint32_t column;
    const uint32_t row = share.row_of(edge, &column);
    const float2 c = table[minor ? column : row];
    float z = (edge_value - mean) * (c.x * rstd) + c.y;
    if constexpr (kExtends) z = extended<Traits::kAct>(p, y + edge, z);
    const float out = apply_chain<Traits::kAct>(floored(p.act), z);
    y[edge] = from_acc<T>(p.add_input ? out + to_acc(x[edge]) : out);
  }
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Of what a block's warps have left in its shared memory, in the order of the warps: what the block tells its cluster.
template <int kWarps>
__device__ __forceinline__ float4 merge_warps(const float4* warps) {
  const float origin = warps[0].x;
  float count = 0.f, sum = 0.f, m2 = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 m = warps[w];
    count += m.z;
    sum += m.z * (m.x - origin);
    m2 += m.y;
  }
  const float offset = __fdividef(sum, fmaxf(count, 1.f));
  asm volatile("" ::: "memory");  // read again: registers hold the share
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 m = warps[w];
    const float d = m.x - origin - offset;
    m2 += m.z * (d * d);
  }
  return make_float4(origin + offset, m2, count, 0.f);
}

#endif

// The same where a block's share is no more than its threads' registers hold, kHold vectors each: the first loads are
// on their way a trip through shared memory earlier, and what comes is not read twice. Nothing that the loads do not
// need comes before them, and a block tells its cluster one entry: both are in the way of all that follows.
template <typename Traits, int kHold, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 128   ? (kHold > 4 ? 5 : 6)
                                            : kThreads == 256 ? 3
                                                              : 2)
    group_norm_cluster_held_fwd_kernel(const __grid_constant__ GroupNormClusterFwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using T = typename Traits::T;
  constexpr int kVec = Traits::kVec, kWarps = kThreads / 32;
  constexpr bool kExtends = Traits::kAct == Chain::kAny;
  extern __shared__ __align__(16) float4 entries[];
  __shared__ uint64_t exchanged;
  const int tid = threadIdx.x, lane = tid % 32;
  const uint32_t rank = cluster_rank(), blocks = p.shares.blocks;
  const int64_t group = cluster_id();

  const ShareVectors<T> vectors(p.shares, group, rank);
  const auto has = [&](int u) { return vectors.has(tid + u * kThreads); };
  Vec<T, kVec> input[kHold];
  {
    const T* const x = static_cast<const T*>(p.x) + vectors.base + tid * kVec;
#pragma unroll
    for (int u = 0; u < kHold; ++u) {
      if (has(u)) input[u] = load_vec<T, kVec>(x + u * kThreads * kVec);
    }
  }
  asm volatile("" ::: "memory");

  const GroupShare<T> share(p.shares, group, rank);
  float4* const warp_entries = entries + blocks;
  float2* const table = reinterpret_cast<float2*>(warp_entries + kWarps);
  const int edge = tid < 32 ? share.edge(lane) : -1;
  T edge_input{};
  if (edge >= 0) edge_input = static_cast<const T*>(p.x)[share.base + edge];
  if (tid == 0) {
    barrier_init(&exchanged, 1);
    barrier_init_fence();
  }
  __syncwarp();  // the compiler initializes it by the whole warp
  if (tid == 0) barrier_expect_bytes(&exchanged, blocks * sizeof(float4));
  cluster_arrive();
  const bool minor = p.shares.minor;
  load_table(p, share, group, minor, tid, kThreads, table);

  ThreadMoments<kVec> mine;
#pragma unroll
  for (int u = 0; u < kHold; ++u) {
    if (!has(u)) continue;
    float v[kVec];
    values_of<Traits::kPre>(input[u], p.pre_act, v);
    if (u < 2 && mine.count == 0) mine.shift = sum_of(v) * (1.f / kVec);
    mine.add(v);
    mine.count += kVec;
  }
  float edge_value = 0.f;
  if (edge >= 0) {
    edge_value = apply_chain<Traits::kPre>(p.pre_act, to_acc(edge_input));
    add_edge(mine, edge_value);
  }
  const int counted = __reduce_add_sync(0xffffffffu, mine.count);
  {
    const Moments<float> own[1] = {mine.moments()};
    const Moments<float> m = warp_pool(own, static_cast<float>(max(counted, 1)));
    forget_values(input);
    if (lane == 0) warp_entries[tid / 32] = make_float4(m.mean, m.m2, static_cast<float>(counted), 0.f);
  }
  cluster_wait();
  __syncthreads();
  if (tid < static_cast<int>(blocks)) {
    cluster_send(merge_warps<kWarps>(warp_entries), entries + rank, &exchanged, tid);
  }
  cluster_barrier_wait(&exchanged, 0);
  const Moments<float> all = merge_entries<1>(entries, static_cast<int>(blocks), p.shares.elements);
  const float mean = all.mean, rstd = reciprocal_root(quotient(all.m2, all.count) + p.eps);
  if (rank == 0 && tid == 0) {
    p.mean[group] = mean;
    p.rstd[group] = rstd;
  }

  T* const y = static_cast<T*>(p.y) + share.base;
  const uint64_t policy = store_policy(p.streaming_stores);
  const auto normalize = [&](auto is_whole) {
#pragma unroll
    for (int u = 0; u < kHold; ++u) {
      if (!has(u)) continue;
      const int slot = tid + u * kThreads;
      float v[kVec];
      values_of<Traits::kPre>(input[u], p.pre_act, v);
      if constexpr (decltype(is_whole)::value) {
        const float2 c = table[share.quotient_by_s(share.position0 + slot * kVec)];
        scale_shift(v, mean, c.x * rstd, c.y);
      } else {
        scale_vector(v, share, minor, slot, mean, rstd, table);
      }
      finish_values<Traits::kAct, false, kExtends>(p, y + slot * kVec, input[u], policy, v);
    }
  };
  // Where no vector is in two channels, a third of the instructions, which come from memory as x does.
  if (!minor && (share.s | static_cast<uint32_t>(vectors.origin)) % kVec == 0) {
    normalize(std::true_type());
    return;
  }
  normalize(std::false_type());
  if (edge >= 0) {
    uint32_t column;
    const uint32_t row = share.row_of(edge, &column);
    const float2 c = table[minor ? column : row];
    float z = (edge_value - mean) * (c.x * rstd) + c.y;
    if constexpr (kExtends) z = extended<Traits::kAct>(p, y + edge, z);
    const float out = apply_chain<Traits::kAct>(floored(p.act), z);
    y[edge] = from_acc<T>(p.add_input ? out + to_acc(edge_input) : out);
  }
#endif
}

template <typename Traits>
Status launch(Traits, const GroupNormClusterFwdParams& p, const ClusterPlan& plan, cudaStream_t stream) {
  // LeakyReLU's instances have no registers for a residual.
  if constexpr (Traits::kAct == Chain::kLeakyRelu) {
    if (p.is_extended) return launch(NormTraits<typename Traits::T, Chain::kAny, Chain::kAny>(), p, plan, stream);
  }
  if (plan.hold == 0) {
    return launch_clusters("group_norm_cluster_fwd_kernel", group_norm_cluster_fwd_kernel<Traits>, p, plan, stream);
  }
  const auto launch_held = [&](auto kernel) {
    return launch_clusters("group_norm_cluster_held_fwd_kernel", kernel, p, plan, stream);
  };
  if (plan.threads == kHeldMostThreads) {
    return launch_held(group_norm_cluster_held_fwd_kernel<Traits, kHeldWide, kHeldMostThreads>);
  }
  if (plan.threads == 256) return launch_held(group_norm_cluster_held_fwd_kernel<Traits, kHeldWide, 256>);
  return plan.hold == kHeldFew ? launch_held(group_norm_cluster_held_fwd_kernel<Traits, kHeldFew, kHeldThreads>)
                               : launch_held(group_norm_cluster_held_fwd_kernel<Traits, kHeldMost, kHeldThreads>);
}

}  // namespace

int max_cluster_blocks(int device) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static int cache[kMaxDevices];
  static bool known[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) return 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (!known[device]) {
    cache[device] = max_cluster_of(group_norm_cluster_fwd_kernel<NormTraits<float, Chain::kNone, Chain::kRelu>>);
    known[device] = true;
  }
  return cache[device];
}

Status run_group_norm_cluster_fwd(const GroupNormClusterFwdParams& p, const ClusterPlan& plan, cudaStream_t stream) {
  if (p.shares.blocks == 0) return run_group_norm_cluster_team_fwd(p, plan, stream);
  return dispatch_norm("group_norm_cluster_fwd_kernel", p,
                       [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
