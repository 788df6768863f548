// How the kernels for small groups deal out threads, or why they do not take a tensor. Host code, free of CUDA.
#pragma once

#include <algorithm>

#include "group_norm_small_params.h"

namespace kgopt {

struct SmallPlan {
  const char* refusal = nullptr;  // why not, or null
  SmallShares shares;
  int elements = 1;  // of a thread, as compiled in
  int threads = 0;
  unsigned grid = 0;
  int smem_bytes = 0;  // dynamic
};

inline SmallDivisor small_divisor(int64_t d) {
  SmallDivisor by;
  by.d = static_cast<uint32_t>(d);
  by.magic = d == 1 ? 0 : static_cast<uint32_t>(((int64_t(1) << 32) + d - 1) / d);
  return by;
}

// Threads for `count` things: a power of two below a warp, or whole warps.
inline int64_t small_lanes(int64_t count) {
  if (count > 32) return (count + 31) / 32 * 32;
  int64_t lanes = 1;
  while (lanes < count) lanes *= 2;
  return lanes;
}

// Bytes of x from which on bulk copies and vectors are faster than single elements (H200).
inline constexpr int64_t kSmallFwdBytes = 16 << 20, kSmallBwdBytes = 16 << 20;
// Where a block's teams are neighbours it has about that many threads.
inline constexpr int64_t kSmallThreads = 128;

// max_blocks: of a cluster, as the device allows; 0 without clusters.
inline SmallPlan plan_group_norm_small(const GroupNormDims& d, bool backward, int max_blocks) {
  SmallPlan plan;
  auto refuse = [&](const char* why) {
    plan.refusal = why;
    return plan;
  };
  if (d.dtype == Dtype::kFloat64) return refuse("float64 keeps its statistics in float64");
  if (d.numel() == 0) return refuse("x is empty");
  const int64_t units = d.n * d.g, elements = d.numel() / units;
  constexpr int64_t most = kSmallMaxThreads * kSmallMaxElements;
  const int most_blocks = backward ? std::max(1, std::min(max_blocks, kSmallMaxBlocks)) : 1;
  if (elements > most * most_blocks || elements >= 65536) {
    return refuse("a group has more elements than a block's or a cluster's threads hold");
  }
  if (d.numel() * dtype_size(d.dtype) > (backward ? kSmallBwdBytes : kSmallFwdBytes)) {
    return refuse("x is large: vectors are faster than elements");
  }
  if (units * d.g >= (int64_t(1) << 32)) return refuse("over 65536 groups");
  SmallShares& p = plan.shares;
  p.units = static_cast<uint32_t>(units);
  p.elements = static_cast<uint32_t>(elements);
  p.channels = static_cast<uint32_t>(d.channels_per_group());
  p.channels_last = d.channels_last;
  p.sample = d.c * d.s;
  p.stride = static_cast<uint32_t>(d.channels_last ? p.channels : elements);
  p.pitch = d.channels_last ? d.c : d.s;
  p.by_minor = small_divisor(d.channels_last ? p.channels : d.s);
  p.by_groups = small_divisor(d.g);
  p.by_channels = small_divisor(p.channels);
  p.by_s = small_divisor(d.s);

  // Where one block does not hold a unit, a thread has four elements, if there are blocks enough.
  int64_t blocks = 1;
  while (elements > most && blocks < most_blocks && elements > blocks * most / 2) {
    blocks *= 2;
    ++p.blocks_log2;
  }
  const int64_t chunk = (elements + blocks - 1) / blocks;
  p.chunk = static_cast<uint32_t>(chunk);
  int64_t lanes = 0;
  for (int each : {1, 2, 4, kSmallMaxElements}) {
    lanes = small_lanes((chunk + each - 1) / each);
    plan.elements = each;
    // A block that has a group of all samples needs no second launch for dweight and dbias.
    p.owner = backward && blocks == 1 && d.n * lanes <= kSmallMaxThreads;
    if (p.owner || (!backward && lanes <= kSmallMaxThreads)) break;
  }
  if (backward && !p.owner) {
    for (int each : {1, 2, 4, kSmallMaxElements}) {
      lanes = small_lanes((chunk + each - 1) / each);
      plan.elements = each;
      if (lanes <= kSmallMaxThreads / (blocks == 1 ? 2 : 1)) break;
    }
  }
  p.lanes = static_cast<uint32_t>(lanes);
  p.by_lanes = small_divisor(lanes);
  const int64_t teams = blocks > 1 ? 1 : p.owner ? d.n : std::max<int64_t>(1, std::min(units, kSmallThreads / lanes));
  p.teams = static_cast<uint32_t>(teams);
  plan.threads = static_cast<int>((p.teams * lanes + 31) / 32 * 32);
  plan.grid = static_cast<unsigned>(p.owner ? d.g : (units + teams - 1) / teams * blocks);
  if (!backward) return plan;
  const int64_t sums = p.owner ? p.channels : int64_t(p.channels) * p.teams, terms = p.owner ? d.n * d.s : d.s;
  const int64_t most_terms = std::min(terms, d.channels_last ? (terms + blocks - 1) / blocks : chunk);
  p.sums = static_cast<uint32_t>(sums);
  p.terms = static_cast<uint32_t>(terms);
  const int64_t warps = plan.threads / 32;
  int64_t sum_lanes = 1;
  if (sums < warps && most_terms > 64) {
    sum_lanes = std::min(warps / sums, (most_terms + 63) / 64) * 32;
  } else {
    while (sum_lanes < 32 && sum_lanes * 2 * sums <= plan.threads && sum_lanes < most_terms) sum_lanes *= 2;
  }
  p.sum_lanes = static_cast<uint32_t>(sum_lanes);
  p.by_sum_lanes = small_divisor(sum_lanes);
  p.sum_teams = static_cast<uint32_t>(plan.threads / sum_lanes);
  plan.smem_bytes = static_cast<int>(teams * chunk * 8);
  return plan;
}

struct SlabPlan {
  const char* refusal = nullptr;  // why not, or null
  SlabShares shares;
  unsigned grid = 0;
};

// A block walks over its slab twice, the second time through L2.
inline constexpr int64_t kSlabElements = 64 << 10;

inline SlabPlan plan_group_norm_slab(const GroupNormDims& d, int sm_count) {
  SlabPlan plan;
  auto refuse = [&](const char* why) {
    plan.refusal = why;
    return plan;
  };
  if (d.dtype == Dtype::kFloat64) return refuse("float64 keeps its statistics in float64");
  if (!d.channels_last) return refuse("x is contiguous");
  if (d.numel() == 0) return refuse("x is empty");
  const int64_t channels = d.channels_per_group();
  if (channels * dtype_size(d.dtype) >= 32) return refuse("a group's channels fill a sector");
  if (d.s * 16 > kSlabElements) return refuse("a slab is long: more blocks than slabs are needed");
  if (d.numel() >= int64_t(1) << 31) return refuse("over 2^31 elements");
  SlabShares& p = plan.shares;
  for (p.columns = 32;; p.columns = 16) {
    p.groups = static_cast<uint32_t>(std::min<int64_t>(p.columns / channels, d.g));
    p.per_sample = static_cast<uint32_t>((d.g + p.groups - 1) / p.groups);
    if (p.columns == 16 || (d.n * p.per_sample >= 2 * sm_count && d.s * 32 <= kSlabElements)) break;
  }
  const int64_t blocks = d.n * p.per_sample;
  if (blocks * 2 < sm_count) return refuse("few slabs leave the GPU idle");
  if (blocks * p.per_sample >= int64_t(1) << 32) return refuse("over 65536 slabs");
  p.channels = static_cast<uint32_t>(channels);
  p.walkers = kSlabThreads / p.columns;
  p.c = static_cast<uint32_t>(d.c);
  p.g = static_cast<uint32_t>(d.g);
  p.s = static_cast<uint32_t>(d.s);
  p.by_per_sample = small_divisor(p.per_sample);
  p.by_channels = small_divisor(channels);
  plan.grid = static_cast<unsigned>(blocks);
  return plan;
}

}  // namespace kgopt
