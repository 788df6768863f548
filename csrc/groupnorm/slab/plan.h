// How the kernels for narrow channels_last groups cut samples into slabs, or why they do not take a tensor. Host code,
// free of CUDA.
#pragma once

#include <algorithm>

#include "common/refusal.h"
#include "groupnorm/plan_input.h"
#include "groupnorm/slab/params.h"
#include "groupnorm/small/plan.h"

namespace kgopt {

struct SlabPlan {
  const char* refusal = nullptr;  // why not, or null
  SlabShares shares;
  unsigned grid = 0;
};

// A block walks over its slab twice, the second time through L2.
inline constexpr int64_t kSlabElements = 64 << 10;

inline SlabPlan plan_group_norm_slab(const NormPlanInput& in) {
  const GroupNormDims& d = in.dims;
  SlabPlan plan;
  const auto refuse = refuser(plan);
  if (d.dtype == Dtype::kFloat64) return refuse("float64 keeps its statistics in float64");
  if (!d.channels_last) return refuse("x is contiguous");
  if (d.numel() == 0) return refuse("x is empty");
  const int64_t channels = d.channels_per_group();
  if (!has_narrow_groups(d)) return refuse("a group's channels fill a sector");
  if (d.s * 16 > kSlabElements) return refuse("a slab is long: more blocks than slabs are needed");
  if (d.numel() >= int64_t(1) << 31) return refuse("over 2^31 elements");
  SlabShares& p = plan.shares;
  for (p.columns = 32;; p.columns = 16) {
    p.groups = static_cast<uint32_t>(std::min<int64_t>(p.columns / channels, d.g));
    p.per_sample = static_cast<uint32_t>((d.g + p.groups - 1) / p.groups);
    if (p.columns == 16 || (d.n * p.per_sample >= 2 * in.sm_count && d.s * 32 <= kSlabElements)) break;
  }
  const int64_t blocks = d.n * p.per_sample;
  // A short slab takes less than the launches of passes do (H200).
  const bool is_short = d.s * 16 <= kSlabElements / 2;
  if (blocks * (is_short ? 3 : 2) < in.sm_count) return refuse("few slabs leave the GPU idle");
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

inline NormScratch scratch_of(const SlabPlan&, const NormPlanInput& in) {
  return in.backward() ? sums_of_rows(in.dims.n, in.dims) : NormScratch();
}

}  // namespace kgopt
