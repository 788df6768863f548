// How the kernels for small groups deal out threads, or why they do not take a tensor. Host code, free of CUDA.
#pragma once

#include <algorithm>

#include "common/refusal.h"
#include "groupnorm/plan_input.h"
#include "groupnorm/small/params.h"

namespace kgopt {

struct SmallPlan {
  const char* refusal = nullptr;  // why not, or null
  SmallShares shares;
  int run = 1, runs = 1;  // elements of a thread: `runs` vectors of `run`
  int threads = 0;
  unsigned grid = 0;
  int smem_bytes = 0;   // dynamic
  bool single = false;  // backward: what a block or a team has of a channel is one element
  bool plane = false;   // backward: a unit is one channel, contiguous: groupnorm/small/plane.cu
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

// Bytes of x from which on bulk copies are faster, and from which on narrow groups go side by side; of fewer bytes they
// do from so many positions on, in forward, where clusters of columns take them (H200).
inline constexpr int64_t kSmallBytes = 4 << 20, kSmallNarrowBytes = 1 << 20, kSmallNarrowPositions = 2048;
// Contiguous groups of more elements come faster through shared memory, in forward, where they are few, which then have
// several blocks each, or x is large (H200).
inline constexpr int64_t kSmallFwdElements = 4096, kSmallFwdManyGroups = 16, kSmallFwdBytes = 5 << 19;
// Up to here a thread has one element: as many threads as elements, but no more than a few warps, and in all no more
// than about half of what the GPU runs at a time (H200).
inline constexpr int64_t kSmallFwdSingles = 256, kSmallBwdSingles = 128, kSmallFwdSingleThreads = 96 << 10;
// Likewise for four elements a thread, from where on it has eight; and of contiguous vectors, from so many elements on.
inline constexpr int64_t kSmallFwdFourThreads = 160 << 10, kSmallFwdFourVectors = 3072;
// Backward: channels of up to so many elements are added up faster in a cluster of blocks with registers (H200).
inline constexpr int64_t kSmallShortRow = 64;
// Where a block's teams are neighbours it has about that many threads.
inline constexpr int64_t kSmallThreads = 128;
// Vectors of a unit of one channel, which starts anywhere in one.
inline int64_t plane_vectors(int64_t elements) {
  return (elements + (elements % kSmallRun == 0 ? 0 : 2 * (kSmallRun - 1))) / kSmallRun;
}

// Backward: teams for units of one channel, of which a thread has `runs` vectors. Whether a block's threads suffice.
inline bool set_planes(const NormPlanInput& in, int runs, SmallPlan* plan) {
  const GroupNormDims& d = in.dims;
  SmallShares& p = plan->shares;
  const int64_t units = d.n * d.g, vectors = plane_vectors(d.s);
  const int64_t lanes = std::max<int64_t>(32, small_lanes((vectors + runs - 1) / runs));
  p.by_lanes = small_divisor(lanes);
  p.owner = d.n * lanes <= kSmallMaxThreads;
  p.teams = static_cast<uint32_t>(p.owner ? d.n : lanes == 32 ? std::min(units, kSmallThreads / 32) : 1);
  plan->plane = true;
  plan->run = kSmallRun;
  plan->runs = runs;
  plan->threads = static_cast<int>(p.teams * lanes);
  plan->grid = static_cast<unsigned>(p.owner ? d.g : (units + p.teams - 1) / p.teams);
  return plan->threads <= (runs >= 4 ? kSmallMaxBwdThreads : kSmallMaxThreads);
}
// Vectors of a thread: few warps with several each are done sooner than many with one, for what they all do counts
// more than what they wait for. A block that has all samples saves a launch (H200).
inline bool set_planes(const NormPlanInput& in, SmallPlan* plan) {
  const int64_t vectors = plane_vectors(in.dims.s);
  if (vectors <= 64) return set_planes(in, vectors <= 32 ? 1 : 2, plan);
  if (set_planes(in, 4, plan) && plan->shares.owner) return true;
  return set_planes(in, vectors <= 128 ? 1 : 2, plan) || set_planes(in, 4, plan);
}

inline SmallPlan plan_group_norm_small(const NormPlanInput& in) {
  const GroupNormDims& d = in.dims;
  SmallPlan plan;
  const auto refuse = refused<SmallPlan>;
  if (d.dtype == Dtype::kFloat64) return refuse("float64 keeps its statistics in float64");
  if (d.numel() == 0) return refuse("x is empty");
  const int64_t units = d.n * d.g, elements = d.numel() / units, bytes = d.numel() * dtype_size(d.dtype);
  if (bytes > kSmallBytes) return refuse("x is large: bulk copies are faster");
  if (!in.backward() && !d.channels_last && in.max_blocks > 0 && elements > kSmallFwdElements &&
      (units < kSmallFwdManyGroups || bytes > kSmallFwdBytes)) {
    return refuse("large groups come faster through shared memory");
  }
  if (has_narrow_groups(d) && bytes > kSmallNarrowBytes) return refuse("narrow groups go side by side");
  if (units * d.g >= (int64_t(1) << 32)) return refuse("over 65536 groups");
  if (elements >= 65536) return refuse("a group has over 65535 elements");
  SmallShares& p = plan.shares;
  p.units = static_cast<uint32_t>(units);
  p.elements = static_cast<uint32_t>(elements);
  p.scale = 1.f / static_cast<float>(elements);
  p.channels = static_cast<uint32_t>(d.channels_per_group());
  p.channels_last = d.channels_last;
  p.sample = static_cast<uint32_t>(d.c * d.s);
  p.stride = static_cast<uint32_t>(d.channels_last ? p.channels : elements);
  p.pitch = static_cast<uint32_t>(d.channels_last ? d.c : d.s);
  const int64_t minor = d.channels_last ? p.channels : d.s;
  p.by_minor = small_divisor(minor);
  p.by_groups = small_divisor(d.g);
  const auto place_of = [&](int64_t i) { return static_cast<uint32_t>(i / minor * p.pitch + i % minor); };
  p.middle = place_of(elements / 2);
  p.last = place_of(elements - 1);
  if (in.backward() && in.plain && in.aligned && !d.channels_last && p.channels == 1 &&
      elements > kSmallPlaneElements) {
    if (set_planes(in, &plan)) return plan;
    plan.plane = p.owner = false;
  }

  // A block that has a group of all samples needs no second launch for dweight and dbias. Blocks of a cluster share a
  // unit where one would be full.
  // With several channels of some length, adding up their sums takes the blocks longer than shared memory takes the
  // others; forward's contiguous groups of that size come faster through shared memory (H200).
  const bool clusters = d.channels_last || (in.backward() && (p.channels == 1 || d.s <= kSmallShortRow));
  const int most_blocks = clusters ? std::max(1, std::min(in.max_blocks, kSmallMaxBlocks)) : 1;
  // Chains that are walked have no instances with vectors, which were 5 percent faster and a quarter of the code.
  const bool vectors = in.plain && in.aligned && minor % kSmallRun == 0;
  // Forward's teams of several elements a thread are whole blocks, which take more than a warp.
  const bool crowded = units * small_lanes(elements) > kSmallFwdSingleThreads;
  const int64_t singles = in.backward() ? kSmallBwdSingles : crowded ? 32 * kSmallRun : kSmallFwdSingles;
  int64_t lanes = 0, blocks = 1;
  bool found = false;
  for (; !found && blocks <= most_blocks; blocks *= 2) {
    const int64_t part = (elements + blocks - 1) / blocks;
    p.chunk = static_cast<uint32_t>((part + kSmallRun - 1) / kSmallRun * kSmallRun);
    for (const int each : {1, 4, kSmallMaxElements}) {
      if (found || (each == 1 && elements > singles)) continue;
      lanes = small_lanes(((blocks > 1 ? p.chunk : elements) + each - 1) / each);
      const bool fits_eight = elements > 32 * kSmallMaxElements;
      const bool four_are_few =
          units * lanes > kSmallFwdFourThreads || (vectors && !d.channels_last && elements > kSmallFwdFourVectors);
      if (!in.backward() && each == 4 && fits_eight && four_are_few) continue;
      plan.run = vectors && each > 1 ? kSmallRun : 1;
      plan.runs = each / plan.run;
      const int64_t most = in.backward() && each == kSmallMaxElements ? kSmallMaxBwdThreads : kSmallMaxThreads;
      p.owner = in.backward() && blocks == 1 && d.n * lanes <= most;
      found = p.owner || lanes <= (in.backward() || blocks > 1 ? kSmallMaxBwdThreads : most);
      if (!in.backward() && blocks > 1 && each < kSmallMaxElements) found = false;
      // An owner with more elements a thread is worth more than fewer elements a thread.
      if (found && in.backward() && blocks == 1 && !p.owner) {
        const int64_t fewest = small_lanes((elements + kSmallMaxElements - 1) / kSmallMaxElements);
        found = each == kSmallMaxElements || d.n * fewest > kSmallMaxBwdThreads;
      }
    }
  }
  blocks = found ? blocks / 2 : blocks;
  if (!found) return refuse("a group has more elements than a block's or a cluster's threads hold");
  for (int64_t b = blocks; b > 1; b /= 2) ++p.blocks_log2;
  p.by_lanes = small_divisor(lanes);
  // Neighbouring teams share a block if they are less than a warp, or for the sake of dweight and dbias.
  const bool is_alone = !in.backward() || (d.s == 1 && blocks == 1);
  const int64_t neighbours = lanes <= 32 || !is_alone ? std::min(units, kSmallThreads / lanes) : 1;
  const int64_t teams = blocks > 1 ? 1 : p.owner ? d.n : std::max<int64_t>(1, neighbours);
  p.teams = static_cast<uint32_t>(teams);
  plan.threads = static_cast<int>((teams * lanes + 31) / 32 * 32);
  plan.grid = static_cast<unsigned>(p.owner ? d.g : (units + teams - 1) / teams * blocks);
  if (!in.backward()) return plan;

  p.run_log2 = plan.run > 1 && !d.channels_last ? 2 : 0;
  const int64_t run = int64_t(1) << p.run_log2, row_terms = d.s / run;
  p.by_row_terms = small_divisor(row_terms);
  p.by_channels = small_divisor(p.channels);
  const int64_t sums = p.owner ? p.channels : p.channels * teams, terms = p.owner ? d.n * row_terms : row_terms;
  const int64_t own_terms =
      std::min<int64_t>(terms, d.channels_last ? (terms + blocks - 1) / blocks : (p.chunk + run - 1) / run * teams);
  const int64_t warps = plan.threads / 32;
  int64_t sum_lanes = 1;
  if (sums < warps && own_terms > 64) {
    sum_lanes = std::min(warps / sums, (own_terms + 63) / 64) * 32;
  } else {
    while (sum_lanes < 32 && sum_lanes * 2 * sums <= plan.threads && sum_lanes < own_terms) sum_lanes *= 2;
  }
  p.sums = static_cast<uint32_t>(sums);
  p.terms = static_cast<uint32_t>(terms);
  p.by_sum_lanes = small_divisor(sum_lanes);
  p.sum_teams = static_cast<uint32_t>(plan.threads / sum_lanes);
  plan.single = d.s == 1 && blocks == 1 && (!p.owner || d.n == 1);
  if (plan.single) {  // either layout's elements lie side by side
    plan.runs *= plan.run;
    plan.run = 1;
    return plan;
  }
  // With one channel the group's sums are the channel's.
  plan.smem_bytes =
      p.channels == 1 ? static_cast<int>(teams * 8) : static_cast<int>(teams * (p.chunk >> p.run_log2) * 8);
  return plan;
}

inline NormScratch scratch_of(const SmallPlan& plan, const NormPlanInput& in) {
  if (!in.backward() || plan.shares.owner) return {};
  return sums_of_rows(in.dims.n << plan.shares.blocks_log2, in.dims);
}

}  // namespace kgopt
