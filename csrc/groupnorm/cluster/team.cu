// GroupNorm of groups that a team of neighbouring lanes has in its registers, where there are many of them: forward,
// and backward of groups of one channel, whose sums are the channel's. The formulas of backward are those of
// groupnorm/passes/backward.cu.
#include "common/device/dependent_launch.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"
#include "groupnorm/shared/group_gradient.cuh"
#include "groupnorm/shared/group_share.cuh"
#include "groupnorm/shared/vectors.cuh"

namespace kgopt {
namespace {

// A thread's place: its team's group and its lane. Lanes without a group may leave; `members` are the others.
struct TeamLane {
  int lanes, lane;
  int64_t group;
  uint32_t members;

  __device__ __forceinline__ explicit TeamLane(const GroupShares& p)
      : lanes(p.lanes), lane(static_cast<int>(threadIdx.x) & (p.lanes - 1)) {
    group = (blockIdx.x * int64_t(kTeamThreads) + threadIdx.x) >> (lanes == 8 ? 3 : 5);
    members = __ballot_sync(0xffffffffu, group < p.groups);
  }
  __device__ __forceinline__ float sum(float v) const {
    for (int mask = lanes / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(members, v, mask);
    return v;
  }
};

// One team of neighbouring lanes a group, which stays in registers.
template <typename Traits, int kPasses>
__global__ void __launch_bounds__(kTeamThreads, kPasses == kTeamPasses ? 3 : 2)
    group_norm_cluster_team_fwd_kernel(const __grid_constant__ GroupNormClusterFwdParams p) {
  using T = typename Traits::T;
  constexpr int kVec = Traits::kVec;
  const TeamLane team(p.shares);
  const int64_t group = team.group;
  const int lanes = team.lanes, lane = team.lane;
  if (group >= p.shares.groups) return;
  const GroupShare<T> share(p.shares, group, 0);
  const T* const x = static_cast<const T*>(p.x) + share.base;
  T* const y = static_cast<T*>(p.y) + share.base;
  const int64_t channel0 = static_cast<uint32_t>(group) % p.shares.per_sample * p.shares.channels;
  const auto coefficients_of = [&](int64_t row) {
    return affine_of<T>(p.weight, p.bias, channel0 + row, p.affine_dtype);
  };
  // Everything that the group needs is asked for before the first use.
  Vec<T, kVec> input[kPasses];
  float2 coefficients[kPasses];
#pragma unroll
  for (int u = 0; u < kPasses; ++u) {
    if (u * lanes >= share.hi) break;
    const int slot = lane + u * lanes;
    if (slot < share.lo || slot >= share.hi) continue;
    input[u] = load_vec<T, kVec>(x + slot * kVec);
    uint32_t column;
    coefficients[u] = coefficients_of(share.row_of(slot * kVec, &column));
  }
  const int edge[2] = {share.head_edge(lane), share.tail_edge(lane)};
  T edge_input[2];
  float edge_value[2] = {}, sum = 0.f;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (edge[e] < 0) continue;
    edge_input[e] = x[edge[e]];
    edge_value[e] = apply_chain<Traits::kPre>(p.pre_act, to_acc(edge_input[e]));
    sum += edge_value[e];
  }
  const float scale = reciprocal_of_count(static_cast<float>(p.shares.elements));
#pragma unroll
  for (int u = 0; u < kPasses; ++u) {
    if (u * lanes >= share.hi) break;
    const int slot = lane + u * lanes;
    if (slot >= share.lo && slot < share.hi) {
      float v[kVec];
      values_of<Traits::kPre>(input[u], p.pre_act, v);
      sum += sum_of(v);
    }
  }
  const float mean = team.sum(sum) * scale;
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (edge[e] >= 0) squares += (edge_value[e] - mean) * (edge_value[e] - mean);
  }
#pragma unroll
  for (int u = 0; u < kPasses; ++u) {
    if (u * lanes >= share.hi) break;
    const int slot = lane + u * lanes;
    if (slot >= share.lo && slot < share.hi) {
      float v[kVec];
      values_of<Traits::kPre>(input[u], p.pre_act, v);
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[j] = (v[j] - mean) * (v[j] - mean);
      squares += sum_of(v);
    }
  }
  const float rstd = reciprocal_root(team.sum(squares) * scale + p.eps);
  if (lane == 0) {
    p.mean[group] = mean;
    p.rstd[group] = rstd;
  }
#pragma unroll
  for (int u = 0; u < kPasses; ++u) {
    if (u * lanes >= share.hi) break;
    const int slot = lane + u * lanes;
    if (slot < share.lo || slot >= share.hi) continue;
    float v[kVec];
    values_of<Traits::kPre>(input[u], p.pre_act, v);
    uint32_t column;
    const uint32_t row = share.row_of(slot * kVec, &column);
    if (column + kVec <= share.s) {
      scale_shift(v, mean, coefficients[u].x * rstd, coefficients[u].y);
    } else {
      scale_shift_across<T>(v, mean, rstd, column, share.s, channel0 + row, p.weight, p.bias, p.affine_dtype);
    }
    finish_values<Traits::kAct>(p, y + slot * kVec, input[u], p.streaming_stores, v);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (edge[e] < 0) continue;
    uint32_t column;
    const float2 c = coefficients_of(share.row_of(edge[e], &column));
    const float z = extended<Traits::kAct>(p, y + edge[e], (edge_value[e] - mean) * (c.x * rstd) + c.y);
    const float out = apply_chain<Traits::kAct>(floored(p.act), z);
    y[edge[e]] = from_acc<T>(p.add_input ? out + to_acc(edge_input[e]) : out);
  }
}

template <typename Traits, int kPasses>
__global__ void __launch_bounds__(kTeamThreads, 2)
    group_norm_cluster_team_bwd_kernel(const __grid_constant__ GroupNormClusterBwdParams p) {
  using T = typename Traits::T;
  constexpr int kVec = Traits::kVec;
  let_dependents_start();
  const TeamLane team(p.shares);
  const int64_t group = team.group;
  const int lanes = team.lanes, lane = team.lane;
  if (group >= p.shares.groups) return;
  const GroupShare<T> share(p.shares, group, 0);
  const T* const x = static_cast<const T*>(p.x) + share.base;
  const T* const dy = static_cast<const T*>(p.dy) + share.base;
  T* const dx = static_cast<T*>(p.dx) + share.base;
  const auto has = [&](int u) {
    const int slot = lane + u * lanes;
    return slot >= share.lo && slot < share.hi;
  };
  // Everything that the group needs is asked for before the first use.
  Vec<T, kVec> xs[kPasses], dys[kPasses];
#pragma unroll
  for (int u = 0; u < kPasses; ++u) {
    if (u * lanes >= share.hi) break;
    if (!has(u)) continue;
    xs[u] = load_vec<T, kVec>(x + (lane + u * lanes) * kVec);
    dys[u] = load_vec<T, kVec>(dy + (lane + u * lanes) * kVec);
  }
  const int edge[2] = {share.head_edge(lane), share.tail_edge(lane)};
  T edge_x[2], edge_dy[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (edge[e] < 0) continue;
    edge_x[e] = x[edge[e]];
    edge_dy[e] = dy[edge[e]];
  }
  const float mean = p.mean[group], rstd = p.rstd[group];
  const float2 c = affine_of<T>(p.weight, p.bias, static_cast<uint32_t>(group) % p.shares.per_sample, p.affine_dtype);
  const float2 all = make_float2(c.x * rstd, c.y);
  ChannelSums<Traits> mine;
#pragma unroll
  for (int u = 0; u < kPasses; ++u) {
    if (u * lanes >= share.hi) break;
    if (!has(u)) continue;
    float xv[kVec], dyv[kVec];
    unpack(xs[u], xv);
    unpack(dys[u], dyv);
    mine.add(p, xv, dyv, mean, all.x, all.y);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (edge[e] < 0) continue;
    float xv[1] = {to_acc(edge_x[e])}, dyv[1] = {to_acc(edge_dy[e])};
    mine.add(p, xv, dyv, mean, all.x, all.y);
  }
  const float dz = team.sum(mine.dz[0] + mine.dz[1]), dz_xhat = team.sum(mine.dz_d[0] + mine.dz_d[1]) * rstd;
  if (lane == 0) put_channel_sums(p, group, make_float2(dz, dz_xhat));
  const float per_element = all.x * reciprocal_of_count(static_cast<float>(p.shares.elements));
  const float2 terms = make_float2(dz * per_element, dz_xhat * (per_element * rstd));
#pragma unroll
  for (int u = 0; u < kPasses; ++u) {
    if (u * lanes >= share.hi) break;
    if (!has(u)) continue;
    float xv[kVec], dyv[kVec];
    unpack(xs[u], xv);
    unpack(dys[u], dyv);
    input_gradient<Traits>(p, xv, dyv, mean, [&](int) { return all; }, terms);
    store_values<T, kVec>(dx + (lane + u * lanes) * kVec, xv, p.streaming_stores);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (edge[e] < 0) continue;
    float xv[1] = {to_acc(edge_x[e])}, dyv[1] = {to_acc(edge_dy[e])};
    input_gradient<Traits>(p, xv, dyv, mean, [&](int) { return all; }, terms);
    dx[edge[e]] = from_acc<T>(xv[0]);
  }
}

}  // namespace

Status run_group_norm_cluster_team_fwd(const GroupNormClusterFwdParams& p, const ClusterPlan& plan,
                                       cudaStream_t stream) {
  constexpr const char* kName = "group_norm_cluster_team_fwd_kernel";
  return dispatch_norm<false>(kName, p, [&](auto traits) {
    using Traits = decltype(traits);
    constexpr auto kFew = group_norm_cluster_team_fwd_kernel<Traits, kTeamPasses>;
    constexpr auto kMost = group_norm_cluster_team_fwd_kernel<Traits, kTeamMostPasses>;
    return p.shares.passes == kTeamPasses ? launch_kernel<kFew>(kName, p, plan.grid, kTeamThreads, 0, stream)
                                          : launch_kernel<kMost>(kName, p, plan.grid, kTeamThreads, 0, stream);
  });
}

Status run_group_norm_cluster_team_bwd(const GroupNormClusterBwdParams& p, const ClusterPlan& plan,
                                       cudaStream_t stream) {
  constexpr const char* kName = "group_norm_cluster_team_bwd_kernel";
  return dispatch_norm<false>(kName, p, [&](auto traits) {
    using Traits = decltype(traits);
    // Chains that are walked have the one instance: their code is three times the others', and registers are the same.
    constexpr int kFewest = Traits::kAct == Chain::kAny ? kTeamMostPasses : kTeamPasses;
    constexpr auto kFew = group_norm_cluster_team_bwd_kernel<Traits, kFewest>;
    constexpr auto kMost = group_norm_cluster_team_bwd_kernel<Traits, kTeamMostPasses>;
    return p.shares.passes == kTeamPasses ? launch_kernel<kFew>(kName, p, plan.grid, kTeamThreads, 0, stream)
                                          : launch_kernel<kMost>(kName, p, plan.grid, kTeamThreads, 0, stream);
  });
}

}  // namespace kgopt
