// GroupNorm backward of small groups; see groupnorm/small/params.h. The formulas are those of
// groupnorm/passes/backward.cu.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "common/device/floor.cuh"
#include "groupnorm/small/activations.cuh"
#include "groupnorm/small/box.cuh"
#include "groupnorm/small/bwd_team.cuh"

namespace kgopt {

// The sums of a channel in shared memory and where they go: of all samples, or of a sample's part that a block has.
template <typename Traits>
__device__ __forceinline__ void write_sums(const GroupNormSmallBwdParams& p, const SmallTeam<Traits>& t, uint32_t team,
                                           uint32_t c, float dz, float dz_xhat) {
  const SmallShares& s = p.shares;
  if (s.owner) {
    const int64_t at = int64_t(blockIdx.x) * s.channels + c;
    store_as(p.dbias, at, p.gradient_dtype, dz);
    store_as(p.dweight, at, p.gradient_dtype, dz_xhat);
    return;
  }
  const uint32_t unit = (blockIdx.x >> s.blocks_log2) * s.teams + team;
  if (unit >= s.units) return;
  const uint32_t n = s.by_groups(unit), part = (n << s.blocks_log2) + t.rank;
  const int64_t at = (int64_t(part) * s.by_groups.d + unit - n * s.by_groups.d) * s.channels + c;
  reinterpret_cast<float2*>(p.channel_sums)[at] = make_float2(dz, dz_xhat);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kElements == kSmallMaxElements ? kSmallMaxBwdThreads : kSmallMaxThreads)
    group_norm_small_bwd_kernel(const __grid_constant__ GroupNormSmallBwdParams p) {
  using T = typename Traits::Element;
  constexpr int kRun = Traits::kRun, kRuns = Traits::kRuns, kElements = Traits::kElements;
  extern __shared__ float2 pairs[];  // [teams][terms of a chunk] of dz and dz * xhat
  __shared__ float shared[2][kSmallMaxWarps][2];
  __shared__ SmallBox box;
  let_dependents_start();
  const SmallTeam<Traits> t(p.shares);
  const SmallShares& s = p.shares;
  const uint32_t blocks = 1u << s.blocks_log2;
  const bool wide = p.affine_dtype == Dtype::kFloat32;
  const float mean = t.active() ? p.mean[t.unit] : 0.f, rstd = t.active() ? p.rstd[t.unit] : 0.f;
  T raw_x[kElements], raw_dy[kElements];
  uint32_t weight_bits[kElements] = {}, bias_bits[kElements] = {};
  t.load(p.x, raw_x);
  t.load(p.dy, raw_dy);
  t.load_affine(p.weight, wide, weight_bits);
  if (s.act_kind != Chain::kNone) t.load_affine(p.bias, wide, bias_bits);
  if (blocks > 1) open_box(&box, blocks);
  float xhat[kElements], dz[kElements], z[kElements], slope[kElements], weight[kElements], bias[kElements];
  uint32_t stopped = 0;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = to_acc(raw_x[k]);
    dz[k] = to_acc(raw_dy[k]);
    slope[k] = rstd;
  }
  if constexpr (Traits::kAct == Chain::kAny) stopped = apply_slope(s.pre_kind, p.pre_act, xhat, slope);
  t.affine(p.weight, wide, 1.f, weight_bits, weight);
  t.affine(p.bias, wide, 0.f, bias_bits, bias);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = (xhat[k] - mean) * rstd;
    z[k] = xhat[k] * weight[k] + bias[k];
  }
  if constexpr (Traits::kAct == Chain::kAny) {
    multiply_slope(s.act_kind, p.act, z, dz);
  } else {
    multiply_slopes<Traits::kAct, false>(floored(p.act), z, dz);
  }
  // With one channel the sums of the group are those of the channel, but for the weight.
  const bool one_channel = s.channels == 1;
  float terms[2] = {0.f, 0.f};
  if (one_channel) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      terms[0] += t.has[k] ? dz[k] : 0.f;
      terms[1] += t.has[k] ? dz[k] * xhat[k] : 0.f;
      dz[k] *= weight[k];
    }
  } else {
    float2* const own = pairs + t.team * (s.chunk >> s.run_log2);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      float2 run = make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const int k = r * kRun + j;
        const float product = dz[k] * xhat[k];
        if (t.has[k]) {
          if (s.run_log2 == 0) own[t.element(r) - t.first + j] = make_float2(dz[k], product);
          run.x += dz[k];
          run.y += product;
          terms[0] += weight[k] * dz[k];
          terms[1] += weight[k] * product;
        }
        dz[k] *= weight[k];
      }
      if (s.run_log2 > 0 && t.has[r * kRun]) own[(t.element(r) - t.first) >> s.run_log2] = run;
    }
  }
  t.sum(terms, shared[0]);
  if (s.by_lanes.d <= 32) __syncthreads();  // the pairs are there
  if (one_channel) {
    if (!s.owner) {
      if (t.active() && t.lane == 0) write_sums(p, t, t.team, 0, terms[0], terms[1]);
    } else if (t.lane == 0 && t.active()) {
      pairs[t.team] = make_float2(terms[0], terms[1]);
    }
  }
  if (blocks > 1) exchange(&box, blocks, t.rank, terms);
  // Divided, not multiplied by a reciprocal: its rounding error would be the same for every group, and add up in sums
  // of dx.
  const float scale = one_channel ? weight[0] : 1.f, elements = static_cast<float>(s.elements);
  terms[0] = scale * terms[0] / elements;
  terms[1] = scale * terms[1] / elements;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    z[k] = stopped >> k & 1 ? 0.f : slope[k] * (dz[k] - (terms[0] + xhat[k] * terms[1]));
  }
  t.store(p.dx, z);
  if (one_channel) {
    if (!s.owner) return;
    __syncthreads();
    if (t.tid >= 32) return;
    float sums[2] = {0.f, 0.f};
    for (uint32_t n = t.tid; n < s.teams; n += 32) {
      sums[0] += pairs[n].x;
      sums[1] += pairs[n].y;
    }
    lanes_sum(32, sums);
    if (t.tid == 0) write_sums(p, t, 0, 0, sums[0], sums[1]);
    return;
  }

  const uint32_t sum_team = s.by_sum_lanes(t.tid), sum_lane = t.tid - sum_team * s.by_sum_lanes.d;
  for (uint32_t first_sum = 0; first_sum < s.sums; first_sum += s.sum_teams) {
    const uint32_t m = first_sum + sum_team, team0 = s.by_channels(m), c = m - team0 * s.channels;
    const bool is_mine = sum_team < s.sum_teams && m < s.sums;
    float sums[2] = {0.f, 0.f};
    if (is_mine) {
      const uint32_t row_terms = s.by_row_terms.d, skipped = t.first >> s.run_log2;
      uint32_t begin = 0, end = s.terms;
      if (blocks > 1) {  // what this block has of the channel
        const auto term_of = [&](uint32_t i) {
          if (s.channels_last) return i > c ? s.by_channels(i - c - 1) + 1 : 0;
          i = (i + (1u << s.run_log2) - 1) >> s.run_log2;
          return i > c * row_terms ? min(i - c * row_terms, row_terms) : 0;
        };
        begin = term_of(t.first);
        end = term_of(t.end);
      }
#pragma unroll 4
      for (uint32_t e = begin + sum_lane; e < end; e += s.by_sum_lanes.d) {
        const uint32_t team = s.by_row_terms(e), position = e - team * row_terms;
        const uint32_t i = s.channels_last ? position * s.channels + c : c * row_terms + position;
        const float2 pair = pairs[(team0 + team) * (s.chunk >> s.run_log2) + i - skipped];
        sums[0] += pair.x;
        sums[1] += pair.y;
      }
    }
    lanes_sum(s.by_sum_lanes.d, sums);
    if (s.by_sum_lanes.d > 32) {  // then there is one round
      if (t.tid % 32 == 0) {
        shared[1][t.tid / 32][0] = sums[0];
        shared[1][t.tid / 32][1] = sums[1];
      }
      __syncthreads();
      if (sum_lane == 0 && is_mine) {
        for (uint32_t w = 1; w < s.by_sum_lanes.d / 32; ++w) {
          sums[0] += shared[1][t.tid / 32 + w][0];
          sums[1] += shared[1][t.tid / 32 + w][1];
        }
      }
    }
    if (is_mine && sum_lane == 0) write_sums(p, t, team0, c, sums[0], sums[1]);
  }
}

}  // namespace kgopt
