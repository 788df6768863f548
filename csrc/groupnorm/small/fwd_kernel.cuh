// GroupNorm forward of small groups; see groupnorm/small/params.h.
#pragma once

#include "common/device/async.cuh"
#include "common/device/floor.cuh"
#include "groupnorm/shared/prelu.cuh"
#include "groupnorm/small/activations.cuh"
#include "groupnorm/small/box.cuh"
#include "groupnorm/small/small.cuh"

namespace kgopt {

// Forward is all latency, so each of its kernels computes what it needs and no more: a team is the block (kBlock) or up
// to a warp, blocks share a unit (kCluster) or not, and contiguous offsets need no rows.
template <typename Traits, bool kBlock_, bool kLast_, bool kCluster_ = false>
struct SmallFwdTraits : Traits {
  static constexpr bool kBlock = kBlock_, kLast = kLast_, kCluster = kCluster_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kCluster ? kSmallMaxBwdThreads : kSmallMaxThreads)
    group_norm_small_fwd_kernel(const __grid_constant__ GroupNormSmallFwdParams p) {
  if constexpr (Traits::kCluster && !kHasClusters) return;
  using T = typename Traits::Element;
  constexpr int kRun = Traits::kRun, kRuns = Traits::kRuns, kElements = Traits::kElements;
  constexpr bool kBlock = Traits::kBlock, kLast = Traits::kLast, kCluster = Traits::kCluster;
  __shared__ float4 shared[kCluster ? 3 : 2][kSmallMaxWarps / 4];
  __shared__ SmallBox box;
  const SmallShares& s = p.shares;
  const uint32_t tid = threadIdx.x, lanes = s.by_lanes.d, warps = blockDim.x / 32;
  const uint32_t blocks = kCluster ? 1u << s.blocks_log2 : 1,
                 block = kCluster ? blockIdx.x >> s.blocks_log2 : blockIdx.x;
  const uint32_t rank = kCluster ? blockIdx.x & (blocks - 1) : 0, begin = kCluster ? rank * s.chunk : 0;
  // Below a warp lanes are a power of two.
  const uint32_t lane = kBlock ? tid : tid & (lanes - 1);
  const uint32_t unit = kBlock ? block : block * s.teams + s.by_lanes(tid);
  const bool active = kBlock || unit < s.units;
  const uint32_t end = !active ? 0 : kCluster ? min(begin + s.chunk, s.elements) : s.elements;
  const uint32_t n = s.by_groups(unit), g = unit - n * s.by_groups.d;

  T raw[kElements];
  uint32_t offset[kElements], channel[kElements];
  const auto has = [&](int k) { return begin + (lane + k / kRun * lanes) * kRun + k % kRun < end; };
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const uint32_t i = begin + (lane + r * lanes) * kRun;
    uint32_t row = s.by_minor(i), column = i - row * s.by_minor.d;
    uint32_t at = kLast ? n * s.sample + g * s.stride + row * s.pitch + column : unit * s.elements + i;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int k = r * kRun + j;
      offset[k] = at++;
      channel[k] = g * s.channels + (kLast ? column : row);
      if (++column == s.by_minor.d) {
        if (kLast) at += s.pitch - column;
        column = 0;
        ++row;
      }
    }
  }
  const bool wide = p.affine_dtype == Dtype::kFloat32;
  constexpr bool kOneChannel = kRun > 1 && !kLast;  // of a vector
  const bool weighted = p.weight != nullptr, biased = p.bias != nullptr;
  constexpr bool kBoth = kElements == 1 || kOneChannel;
  SmallAffine<T, kElements, kBoth> weights, biases;
  const auto load_affine = [&] {
    load_as_wanted<T, kBoth>(wide, [&](auto as_words, auto as_halves) {
#pragma unroll
      for (int k = 0; k < kElements; k += kOneChannel ? kRun : 1) {
        const bool words = has(k) && (wide || !as_halves), halves = has(k) && !(wide && as_words);
        if (as_words) weights.load_words(p.weight, k, channel[k], words && weighted);
        if (as_halves) weights.load_halves(p.weight, k, channel[k], halves && weighted);
        if (as_words) biases.load_words(p.bias, k, channel[k], words && biased);
        if (as_halves) biases.load_halves(p.bias, k, channel[k], halves && biased);
      }
    });
  };
  // Few, they come ahead of x: ptxas puts uses of x ahead of loads that come later, which then wait for x.
  constexpr bool kParametersFirst = kBlock && kBoth;
  if (kParametersFirst) load_affine();
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    if constexpr (kRun > 1) {
      Vec<T, kRun> v{};
      if (has(r * kRun)) v = load_vec<T, kRun>(static_cast<const T*>(p.x) + offset[r * kRun]);
#pragma unroll
      for (int j = 0; j < kRun; ++j) raw[r * kRun + j] = v.v[j];
    } else {
      raw[r] = load_in_order<T>(p.x, offset[r], has(r));
    }
  }
  // Values relative to one of them: summed as they are, an offset that is large beside their spread would cost digits.
  // So would one that is far from all others: it is the median of three.
  const uint32_t start = kLast ? n * s.sample + g * s.stride : unit * s.elements;
  const T first = load_in_order<T>(p.x, start, active);
  T middle{}, last{};
  if (!kCluster) {
    middle = load_in_order<T>(p.x, start + s.middle, active);
    last = load_in_order<T>(p.x, start + s.last, active);
  }
  if (!kParametersFirst) load_affine();
  if (kCluster) open_box(&box, blocks);
  if (kBlock && tid >= warps && tid < kSmallMaxWarps) {
    reinterpret_cast<float*>(shared[0])[tid] = reinterpret_cast<float*>(shared[1])[tid] = 0.f;
    if (kCluster) reinterpret_cast<float*>(shared[kCluster ? 2 : 0])[tid] = 0.f;
  }
  const auto team_sum = [&](float v, float4* entries) {
    if (kBlock) return block_total(v, entries, warps);
    float total[1] = {v};
    lanes_sum(lanes, total);
    return total[0];
  };
  float v[kElements], origin[1] = {kCluster ? to_acc(first) : median(to_acc(first), to_acc(middle), to_acc(last))};
#pragma unroll
  for (int k = 0; k < kElements; ++k) v[k] = to_acc(raw[k]);
  if constexpr (Traits::kAct == Chain::kAny) {
    apply_kind(s.pre_kind, p.pre_act, v);
    apply_kind(s.pre_kind, p.pre_act, origin);
  }
  float sum = 0.f, squares = 0.f, rest = 0.f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const float relative = v[k] - origin[0];
    sum += has(k) ? relative : 0.f;
    if (!kCluster) v[k] = relative;
  }
  const auto count_of = [&](uint32_t r) { return static_cast<float>(min(s.chunk, s.elements - r * s.chunk)); };
  const float scale = kCluster ? reciprocal_of_count(count_of(rank)) : s.scale,
              from_origin = team_sum(sum, shared[0]) * scale;
  float mean = origin[0] + from_origin;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    v[k] -= kCluster ? mean : from_origin;
    squares += has(k) ? v[k] * v[k] : 0.f;
    rest += has(k) ? v[k] : 0.f;
  }
  squares = team_sum(squares, shared[1]);
  if constexpr (kCluster) {
    // All blocks' moments, merged in their order. A block's mean is rounded to the digits of its size or of its
    // distance from the origin, which may be far from all others; the mean of what is left says by how much. Relative
    // to the first block's the means are exact.
    rest = team_sum(rest, shared[kCluster ? 2 : 0]) * scale;
    exchange(&box, blocks, rank, make_float4(mean, squares, rest, 0.f));
    const float own = mean, zero = box.parts[0].x;
    const auto mean_of = [&](uint32_t r) { return box.parts[r].x - zero + box.parts[r].z; };
    float shift = 0.f;
    for (uint32_t r = 0; r < blocks; ++r) shift += count_of(r) * mean_of(r);
    shift *= s.scale;
    mean = zero + shift;
    squares = 0.f;
    for (uint32_t r = 0; r < blocks; ++r) {
      const float d = mean_of(r) - shift, left = box.parts[r].z;
      squares += box.parts[r].y + count_of(r) * (d * d - left * left);
    }
    const float to_mean = zero - own + shift;
#pragma unroll
    for (int k = 0; k < kElements; ++k) v[k] -= to_mean;
  }
  const float rstd = rsqrtf(squares * s.scale + p.eps);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const int from = kOneChannel ? k / kRun * kRun : k;
    const float weight = weighted ? weights.value(from, wide) : 1.f;
    v[k] = v[k] * (rstd * weight) + (biased ? biases.value(from, wide) : 0.f);
  }
  if constexpr (Traits::kAct == Chain::kAny) {
    if (p.residual) {
#pragma unroll
      for (int k = 0; k < kElements; ++k) v[k] += to_acc(load_in_order<T>(p.residual, offset[k], has(k)));
    }
    if (p.slopes.data) apply_prelu<T>(p.slopes, offset, v);
    apply_kind(s.act_kind, p.act, v);
  } else {
    apply_chain<Traits::kAct, false>(floored(p.act), v);
  }
  if (p.add_input) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) v[k] += to_acc(raw[k]);
  }
  T* const y = static_cast<T*>(p.y);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    if constexpr (kRun > 1) {
      float x[kRun];
#pragma unroll
      for (int j = 0; j < kRun; ++j) x[j] = v[r * kRun + j];
      if (has(r * kRun)) store_vec(y + offset[r * kRun], pack<T, kRun>(x));
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const int k = r * kRun + j;
        if (has(k)) y[offset[k]] = from_acc<T>(v[k]);
      }
    }
  }
  if (active && lane == 0 && rank == 0) {
    p.mean[unit] = mean;
    p.rstd[unit] = rstd;
  }
}

}  // namespace kgopt
