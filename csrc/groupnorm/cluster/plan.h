// How the GroupNorm kernels that keep a group on chip deal it out, or why they do not take it. Host code, free of CUDA.
#pragma once

#include <algorithm>

#include "common/refusal.h"
#include "groupnorm/cluster/params.h"
#include "groupnorm/plan_input.h"
#include "groupnorm/shared/divisor.h"

namespace kgopt {

// Barriers of a block, and what the runtime reserves.
inline constexpr int kClusterStaticSmem = 256, kReservedSmem = 1024;

struct ClusterPlan {
  const char* refusal = nullptr;  // why not, or null
  GroupShares shares;
  int threads = 0;
  unsigned grid = 0;
  int hold = 0;        // vectors of a thread whose block has its share in registers; 0: in shared memory
  int smem_bytes = 0;  // dynamic, of a block
  int smem_limit = 0;  // of any plan on this device
};

// Shares of clusters of `blocks` blocks with `threads` threads, or of teams where blocks is 0. False where they do not
// fit.
inline bool set_shares(const NormPlanInput& in, int blocks, int threads, ClusterPlan* plan) {
  const GroupNormDims& d = in.dims;
  const int size = dtype_size(d.dtype), line = 128 / size;
  GroupShares& p = plan->shares;
  const int64_t groups = d.n * d.g, elements = d.numel() / groups;
  p.groups = groups;
  p.elements = static_cast<uint32_t>(elements);
  p.x_line = in.x_offset % 128 / size;
  p.blocks = blocks;
  p.minor = d.channels_last;
  p.s = static_cast<uint32_t>(p.minor ? d.c : d.s);
  set_divisor(p.s, &p.s_magic, &p.s_shift);
  p.channels = static_cast<uint32_t>(d.channels_per_group());
  p.per_sample = static_cast<uint32_t>(d.g);
  // A group starts anywhere in a line.
  const int64_t positions = elements + (elements % line == 0 && p.x_line == 0 ? 0 : line - 1);
  const int64_t share = (positions + std::max(blocks, 1) - 1) / std::max(blocks, 1);
  p.share = static_cast<uint32_t>((share + line - 1) / line * line);
  p.rows = p.minor ? p.channels : static_cast<uint32_t>(std::min<int64_t>(p.channels, p.share / d.s + 2));
  if (blocks == 0) {
    p.lanes = int64_t(p.share) * size <= kTeamPasses * 8 * 16 ? 8 : 32;
    p.passes = int64_t(p.share) * size <= int64_t(kTeamPasses) * p.lanes * 16 ? kTeamPasses : kTeamMostPasses;
    plan->threads = kTeamThreads;
    plan->grid = static_cast<unsigned>((groups * p.lanes + kTeamThreads - 1) / kTeamThreads);
    plan->smem_bytes = 0;
    return int64_t(p.share) * size <= int64_t(p.passes) * p.lanes * 16;
  }
  p.together = d.s >= int64_t(threads) * 16;
  const int64_t warps = threads / 32, data = int64_t(p.share) * size;
  int64_t smem = in.tensors * data + blocks * warps * 16 + int64_t(p.rows) * 8;
  if (in.tensors == 2) smem += int64_t(p.rows) * 8 * (1 + (p.together ? warps : 0));
  plan->threads = threads;
  plan->grid = static_cast<unsigned>(groups * blocks);
  plan->smem_bytes = static_cast<int>(std::min<int64_t>(smem, 1 << 30));
  plan->smem_limit = static_cast<int>(in.smem_bytes) - kClusterStaticSmem;
  return smem + kClusterStaticSmem <= in.smem_bytes &&
         data <= int64_t(kClusterMaxPieces) * threads * kClusterPasses * 16 && groups * blocks < (int64_t(1) << 31);
}

// The most data of a block: several blocks then share a multiprocessor, and while one waits for its cluster the others
// load and store. Backward waits longer. A cluster of sixteen finds room in fewer places, so that two blocks of one of
// eight on a multiprocessor are as fast.
inline int64_t cluster_data(int tensors, int blocks) {
  return blocks == 8 ? 112 << 10 : tensors == 1 ? 76 << 10 : 52 << 10;
}
// Below that a block's barriers cost more than a second block saves.
inline constexpr int64_t kClusterLeastData = 8 << 10;

// One thread for some 250 bytes: fewer wait for their loads, more for each other, in backward longer (H200).
inline int cluster_threads(int tensors, int64_t data) {
  const int64_t few = tensors == 1 ? 36 << 10 : 44 << 10;
  return data <= few ? 128 : data <= (76 << 10) ? 256 : 512;
}

// Blocks of kHeldThreads threads that a multiprocessor runs at a time with their shares in registers, whatever gaps
// clusters leave.
inline constexpr int64_t kHeldBlocksPerSm = 4;

// Shares move from shared memory to registers where they fit and all blocks run at a time: the first loads are on their
// way earlier, and nothing is read, or in backward computed, twice. In more than one wave copies into shared memory are
// faster, since nobody's registers wait for them (H200).
inline void hold_shares(const NormPlanInput& in, ClusterPlan* plan) {
  const GroupShares& p = plan->shares;
  const int64_t vectors = int64_t(p.share) * dtype_size(in.dims.dtype) / 16, blocks = p.groups * p.blocks;
  if (in.long_chain || p.blocks == 0 || blocks > kHeldBlocksPerSm * in.sm_count) return;
  int threads = kHeldThreads, hold = vectors <= kHeldThreads * kHeldFew ? kHeldFew : kHeldMost;
  if (in.tensors == 2) {
    // No vector is in two channels or two groups.
    const int vec = 16 / dtype_size(in.dims.dtype);
    if (p.s % vec != 0 || p.x_line % vec != 0 || p.rows > uint32_t(kHeldRows)) return;
    hold = kHeldBwd;
  } else if (hold == kHeldMost && blocks <= in.sm_count) {
    threads = vectors <= 256 * kHeldWide ? 256 : kHeldMostThreads;
    hold = kHeldWide;
  }
  if (vectors > int64_t(threads) * hold) return;
  plan->hold = hold;
  plan->threads = threads;
  const int64_t warps = threads / 32, rows = p.rows;
  plan->smem_bytes = static_cast<int>(in.tensors == 2 ? (p.blocks * 16 + rows * 8) * warps  // each for itself
                                                      : (p.blocks + warps) * 16 + rows * 8);
}

// Fewer blocks than three quarters of the multiprocessors.
inline bool leaves_gpu_idle(const ClusterPlan& plan, int sm_count) {
  return plan.shares.groups * plan.shares.blocks * 4 < int64_t(sm_count) * 3;
}

inline ClusterPlan plan_group_norm_cluster(const NormPlanInput& in) {
  const GroupNormDims& d = in.dims;
  ClusterPlan plan;
  const auto refuse = refuser(plan);
  if (d.dtype == Dtype::kFloat64) return refuse("float64 keeps its statistics in float64");
  if (d.numel() == 0) return refuse("x is empty");
  // Backward's sums are of channels, of which the vectors of such a tensor have several.
  if (d.channels_last && (d.g > 1 || in.tensors == 2)) {
    return refuse("a group of a channels_last tensor is not contiguous");
  }
  if (!in.aligned_alike) return refuse("the tensors start at different distances from a multiple of 16 bytes");
  const int64_t groups = d.n * d.g, elements = d.numel() / groups, bytes = elements * dtype_size(d.dtype);
  if (groups >= (int64_t(1) << 26)) return refuse("over 2^26 groups");
  if (in.tensors * bytes > kClusterMaxBlocks * in.smem_bytes) {
    return refuse("a group is larger than the shared memory of a cluster");
  }
  // Few groups of over 1 KB leave lanes of other multiprocessors idle: a block each is faster.
  const bool many_or_small = bytes <= 1024 || groups > 4 * in.sm_count || in.max_blocks == 0;
  // A team sums up one channel, so that backward takes no more.
  const bool for_teams = many_or_small && !d.channels_last && (in.tensors == 1 || d.channels_per_group() == 1);
  if (for_teams && set_shares(in, 0, 0, &plan)) return plan;
  if (in.max_blocks == 0) return refuse("clusters and bulk copies need compute capability 9.0 and code built for it");
  if (d.channels_last && in.crowds_out()) return refuse("slow activations need more warps than fit beside x");
  // A block for each would take longer than passes over all of them.
  if (bytes < 768 && groups > 8192) return refuse("there are many groups of under 768 bytes");
  bool found = false;
  for (int blocks = 1; blocks <= std::min(in.max_blocks, kClusterMaxBlocks); blocks *= 2) {
    const int64_t data = in.tensors * bytes / blocks;
    ClusterPlan wider;
    if (!set_shares(in, blocks, cluster_threads(in.tensors, data), &wider)) continue;
    plan = wider;
    found = true;
    // Two blocks for every multiprocessor, or there is nothing to overlap.
    const bool enough = data <= cluster_data(in.tensors, blocks) && groups * blocks >= 2 * in.sm_count;
    if (enough || data <= kClusterLeastData) break;
  }
  if (!found) return refuse("a group is larger than the shared memory of a cluster");
  hold_shares(in, &plan);
  if (leaves_gpu_idle(plan, in.sm_count)) {
    const int64_t data = in.tensors * int64_t(plan.shares.share) * dtype_size(d.dtype);
    if (in.long_chain && data > (16 << 10)) return refuse("few groups and slow activations need the whole GPU");
    if ((in.tensors == 2 || d.channels_last) && data > (64 << 10)) return refuse("few large groups need the whole GPU");
  }
  return plan;
}

// Without a second sample, a block or a team has all of a channel.
inline NormScratch scratch_of(const ClusterPlan&, const NormPlanInput& in) {
  return in.backward() && in.dims.n > 1 ? sums_of_rows(in.dims.n, in.dims) : NormScratch();
}

}  // namespace kgopt
