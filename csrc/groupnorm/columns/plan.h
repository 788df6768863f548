// How the channels_last GroupNorm forward cuts x into slabs and shares, or why it does not take it. Host code, free of
// CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/refusal.h"
#include "groupnorm/columns/params.h"
#include "groupnorm/plan_input.h"
#include "groupnorm/shared/divisor.h"

namespace kgopt {

struct ColumnPlan {
  const char* refusal = nullptr;  // why not, or null
  ColumnShares shares;
  bool cluster = false;  // a team is a cluster
  int threads = 0;
  int smem_bytes = 0;  // dynamic, of a block
  int smem_limit = 0;  // of any plan on this device
  int64_t words = 0;
};

// What a plan settles on.
struct ColumnChoice {
  uint32_t groups = 1;  // of a slab
  uint32_t blocks = 1;  // of a team
  uint32_t teams = 1;
  bool cluster = false;
  int threads = kColumnMaxThreads;  // that go through x
};

inline int log2_below(int64_t n, int most) {
  int log2 = 0;
  while (log2 < most && int64_t(2) << log2 <= n) ++log2;
  return log2;
}

inline ColumnDivisor divisor(uint32_t d) {
  ColumnDivisor by;
  set_divisor(d, &by.magic, &by.shift);
  ++by.shift;
  return by;
}

// The fewest lanes that ask for a group's words of so many blocks at once, `words` each at most.
inline uint32_t team_lanes_log2(uint32_t blocks, int words = kTeamWords) {
  uint32_t log2 = 0;
  while (log2 < 5 && uint32_t(words) << log2 < blocks) ++log2;
  return log2;
}

// Where the blocks clear their words themselves. Launches that count blocks have a multiprocessor for each, and more
// than half of them.
template <typename Plan>
void set_cleared(const NormPlanInput& in, int threads, Plan* plan) {
  const int64_t blocks = int64_t(plan->shares.teams) * plan->shares.blocks;
  if (blocks * 2 <= in.sm_count || plan->words > blocks * threads * kClearedWords) return;
  plan->shares.cleared = static_cast<uint32_t>(plan->words);
  if (plan->words > 0) plan->smem_bytes = std::max(plan->smem_bytes, static_cast<int>(in.smem_bytes / 2) + 1024);
}

// Whether there are shares of this choice.
inline bool set_column_shares(const NormPlanInput& in, const ColumnChoice& choice, ColumnPlan* plan) {
  const GroupNormDims& d = in.dims;
  const int size = dtype_size(d.dtype), vec = 16 / size;
  ColumnShares& p = plan->shares;
  p = ColumnShares();
  p.groups = choice.groups;
  p.slabs_per_sample = static_cast<uint32_t>(d.g / choice.groups);
  p.slabs = static_cast<uint32_t>(d.n * p.slabs_per_sample);
  p.channels_per_group = static_cast<uint32_t>(d.channels_per_group());
  p.channels = p.channels_per_group * p.groups;
  p.affines = (p.channels + vec - 1) / vec * vec;
  p.turns = p.slabs_per_sample == 1 ? static_cast<uint32_t>(vec / std::gcd<int64_t>(d.c, vec)) : 1;
  const int64_t row_elements = int64_t(p.channels) * p.turns;
  if (d.s % p.turns != 0 || row_elements % vec != 0 || p.groups > 256) return false;
  p.rows = static_cast<uint32_t>(d.s / p.turns);
  p.pitch = d.c * p.turns;
  p.teams = choice.teams;
  p.blocks = choice.blocks;
  p.share = (p.rows + p.blocks - 1) / p.blocks;
  p.rounds = (p.slabs + p.teams - 1) / p.teams;
  p.last_round = (p.rounds - 1) * p.teams;

  p.vectors = static_cast<uint32_t>(row_elements / vec);
  p.warps_per_row = (p.vectors + 31) / 32;
  p.columns = (p.vectors + p.warps_per_row - 1) / p.warps_per_row;
  p.positions = 32 / p.columns;
  while (p.positions_power < p.positions) p.positions_power *= 2;
  p.walkers = choice.threads / 32 / p.warps_per_row;
  if (p.walkers == 0) return false;
  p.stride = p.walkers * p.positions;
  const int64_t passes = (p.share + p.stride - 1) / p.stride;
  p.chunks = static_cast<uint32_t>((passes + kColumnPasses - 1) / kColumnPasses);
  if (choice.cluster && p.chunks > kColumnSlots) return false;
  p.held = p.chunks >= kColumnSlots + kColumnHeld ? kColumnHeld : 0;
  p.pass_bytes = p.stride * p.vectors * 16;
  p.slot_bytes = p.pass_bytes * kColumnPasses;
  p.data_bytes = p.slot_bytes * std::min<uint32_t>(p.chunks, kColumnSlots);

  const uint32_t run = std::gcd(p.channels_per_group, static_cast<uint32_t>(vec));
  p.run_log2 = log2_below(run, 3);
  p.runs_per_vector = vec / run;
  p.group_runs = p.channels_per_group / run;
  p.turn_runs = p.channels / run;
  p.runs = p.turn_runs * p.turns;
  // No more than leave all groups one step of the block.
  p.block_lanes_log2 = std::min(log2_below(int64_t(p.group_runs) * p.walkers, 5),
                                log2_below(std::max<int64_t>(1, choice.threads / p.groups), 5));
  p.lanes_walkers = (1u << p.block_lanes_log2) / p.group_runs;
  p.lanes_runs = (1u << p.block_lanes_log2) % p.group_runs;
  p.team_lanes_log2 = choice.cluster ? log2_below(p.blocks, 5) : team_lanes_log2(p.blocks);
  const double per_row = double(p.channels_per_group) * p.turns;
  p.full_blocks = p.rows / p.share;
  p.full_count = static_cast<float>(p.share * per_row);
  p.rest_count = static_cast<float>((p.rows - p.full_blocks * p.share) * per_row);
  p.total_count = static_cast<float>(p.rows * per_row);
  p.by_blocks = divisor(p.blocks);
  p.by_warps_per_row = divisor(p.warps_per_row);
  p.by_columns = divisor(p.columns);
  p.by_stride = divisor(p.stride);
  p.by_channels = divisor(p.channels);
  p.by_channels_per_group = divisor(p.channels_per_group);
  p.by_slabs_per_sample = divisor(p.slabs_per_sample);
  p.by_group_runs = divisor(p.group_runs);

  const int64_t tables = int64_t(p.walkers) * p.runs * 8 + (p.groups + p.affines) * 16 + p.walkers * 4 +
                         (choice.cluster ? int64_t(p.blocks) * p.groups * 16 : 0);
  plan->cluster = choice.cluster;
  plan->threads = choice.threads;
  plan->smem_limit = static_cast<int>(in.smem_bytes) - 1024;
  plan->smem_bytes = static_cast<int>(std::min<int64_t>(p.data_bytes + tables, 1 << 30));
  plan->words = choice.cluster ? 0 : int64_t(p.slabs) * p.groups * p.blocks + (p.slabs + 1) / 2;
  set_cleared(in, 32, plan);
  return plan->smem_bytes + 1024 <= in.smem_bytes;
}

// Tensors below are one launch, of clusters; others a launch after a memset. Columns narrower than a line cost twice
// the time in DRAM, but not in L2, where a small tensor is (H200). Slabs of less work per block wait longer for each
// other than passes over memory take.
inline constexpr int64_t kColumnSmallTensor = 4 << 20, kColumnLine = 128, kColumnLeastSlab = 256 << 10;

// The fewest groups of whole sectors that are `width` bytes wide and `least` bytes in all, or the whole sample.
inline uint32_t column_groups(const GroupNormDims& d, int64_t width, int64_t least) {
  const int64_t group_bytes = d.channels_per_group() * dtype_size(d.dtype);
  for (int64_t groups = 1; groups < d.g; ++groups) {
    const int64_t bytes = groups * group_bytes;
    if (d.g % groups == 0 && bytes % kSectorBytes == 0 && bytes >= width && bytes * d.s >= least) {
      return static_cast<uint32_t>(groups);
    }
  }
  return static_cast<uint32_t>(d.g);
}

// Data of a cluster's block: a share that is smaller is not worth another block, one that is larger is worth twice the
// threads, and one that is larger still is better shared by all of the GPU, where the clusters leave half of it idle.
inline constexpr int64_t kColumnLeastShare = 4 << 10, kColumnWideShare = 8 << 10, kColumnMostShare = 32 << 10;

// One cluster a slab. False where the slabs are too many, or too large.
inline bool set_column_clusters(const NormPlanInput& in, ColumnPlan* plan) {
  ColumnChoice choice;
  choice.cluster = true;
  choice.groups = column_groups(in.dims, 0, 0);
  const int64_t slabs = in.dims.n * (in.dims.g / choice.groups);
  const int64_t bytes = in.dims.numel() * dtype_size(in.dims.dtype) / slabs;
  if (slabs > 4 * in.sm_count) return false;
  choice.teams = static_cast<uint32_t>(slabs);
  bool found = false;
  for (int blocks = 1; blocks <= std::min(in.max_blocks, 16); blocks *= 2) {
    choice.blocks = blocks;
    // More blocks than multiprocessors run at a time only if they have few threads: else a second wave makes it 1.6
    // times the time (H200).
    choice.threads = bytes / blocks > kColumnWideShare && slabs * blocks <= in.sm_count ? 256 : 128;
    ColumnPlan wider;
    if (!set_column_shares(in, choice, &wider)) continue;
    *plan = wider;
    found = true;
    if (slabs * blocks >= in.sm_count || bytes / blocks <= kColumnLeastShare) break;
  }
  const int64_t blocks = slabs * plan->shares.blocks;
  return found && (blocks * 2 > in.sm_count || bytes / plan->shares.blocks <= kColumnMostShare || in.long_chain);
}

// Teams of blocks all over the GPU, one block a multiprocessor: as many teams as slabs fit on chip at a time, and no
// more than take as many rounds.
inline bool set_column_teams(const NormPlanInput& in, ColumnPlan* plan) {
  const GroupNormDims& d = in.dims;
  const int64_t sample = d.numel() / d.n * dtype_size(d.dtype), grid = in.sm_count;
  ColumnChoice choice;
  choice.blocks = static_cast<uint32_t>(grid);
  // A sample that does not fit is read twice: then whole rows count for more than what columns would keep.
  const bool fits = sample <= grid * kColumnSlots * kColumnPasses * kColumnMaxThreads * 16;
  choice.groups = fits ? column_groups(d, kColumnLine, kColumnLeastSlab) : static_cast<uint32_t>(d.g);
  if (!set_column_shares(in, choice, plan)) return false;
  const int64_t kept = int64_t(plan->shares.stride) * kColumnPasses * kColumnSlots, slabs = plan->shares.slabs;
  const int64_t blocks = (plan->shares.rows + kept - 1) / kept;
  const int64_t most = std::max<int64_t>(1, std::min(grid / blocks, slabs)), rounds = (slabs + most - 1) / most;
  choice.teams = static_cast<uint32_t>((slabs + rounds - 1) / rounds);
  choice.blocks = static_cast<uint32_t>(grid / choice.teams);
  if (!set_column_shares(in, choice, plan)) return false;
  plan->shares.ahead = plan->shares.slabs > choice.teams;
  return true;
}

inline ColumnPlan plan_group_norm_columns(const NormPlanInput& in) {
  const GroupNormDims& d = in.dims;
  ColumnPlan plan;
  const auto refuse = refused<ColumnPlan>;
  if (!d.channels_last) return refuse("x is contiguous");
  if (in.tensors == 2) return refuse("backward goes through whole samples");
  if (in.max_blocks == 0) return refuse("clusters need compute capability 9.0 and code built for it");
  if (d.dtype == Dtype::kFloat64) return refuse("float64 keeps its statistics in float64");
  if (d.numel() == 0) return refuse("x is empty");
  if (!in.aligned) return refuse("x or y does not start at a multiple of 16 bytes");
  const int64_t bytes = d.numel() * dtype_size(d.dtype), limit = int64_t(1) << 30;
  if (d.s >= limit || d.c >= (1 << 20) || d.n * d.g >= limit) return refuse("over 2^30 positions or groups");
  if (d.by_sample && d.n * d.c >= limit) return refuse("over 2^30 parameters");
  if (in.tensors == 1 && bytes < kColumnSmallTensor && set_column_clusters(in, &plan)) return plan;
  if (in.sums && d.numel() > most_summed(dtype_size(d.dtype))) {
    return refuse("a residual is so large that passes over memory are faster");
  }
  if (in.crowds_out()) return refuse("slow activations need more warps than fit beside x");
  if (bytes / d.n < kColumnLeastSlab) return refuse("a sample is below 256 KB: two passes are faster");
  if (set_column_teams(in, &plan)) return plan;
  return refuse("C is no multiple of a vector and S not of what makes it one, or a row's tables do not fit");
}

inline NormScratch scratch_of(const ColumnPlan& plan, const NormPlanInput&) { return {plan.words, 0, 0}; }

}  // namespace kgopt
