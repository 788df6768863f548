// How the channels_last GroupNorm kernels with roles cut x into shares, or why they do not take it. Host code, free of
// CUDA.
#pragma once

#include "group_norm_columns_plan.h"
#include "group_norm_rows_params.h"

namespace kgopt {

struct RowPlan {
  const char* refusal = nullptr;  // why not, or null
  RowShares shares;
  static constexpr bool cluster = false;
  int smem_bytes = 0;  // dynamic, of a block
  int smem_limit = 0;  // of any plan on this device
  int64_t words = 0;
};

// Shares for so many teams, with at least so many chunks read again. False where there are none.
inline bool set_row_shares(const ColumnPlanInput& in, uint32_t teams, uint32_t rereads, RowPlan* plan) {
  const GroupNormDims& d = in.dims;
  const int size = dtype_size(d.dtype), vec = 16 / size, passes = kRowPasses / in.tensors;
  *plan = RowPlan();
  RowShares& p = plan->shares;
  p.turns = static_cast<uint32_t>(vec / std::gcd<int64_t>(d.c, vec));
  const int64_t vectors = d.c * p.turns / vec;
  if (d.s % p.turns != 0 || vectors > kRowThreads) return false;
  p.samples = static_cast<uint32_t>(d.n);
  p.teams = teams;
  p.blocks = static_cast<uint32_t>(in.sm_count) / teams;
  p.rows = static_cast<uint32_t>(d.s / p.turns);
  p.share = (p.rows + p.blocks - 1) / p.blocks;
  p.vectors = static_cast<uint32_t>(vectors);
  p.walkers = kRowThreads / p.vectors;
  p.chunk_rows = p.walkers * passes;
  p.chunks = (p.share + p.chunk_rows - 1) / p.chunk_rows;
  p.tensor_bytes = p.chunk_rows * p.vectors * 16;
  p.channels = static_cast<uint32_t>(d.c);
  p.groups = static_cast<uint32_t>(d.g);
  p.channels_per_group = p.channels / p.groups;

  const uint32_t run = std::gcd(p.channels_per_group, static_cast<uint32_t>(vec));
  p.run_log2 = log2_below(run, 3);
  p.vector_runs_log2 = log2_below(vec / run, 3);
  p.group_runs = p.channels_per_group / run;
  p.turn_runs = p.channels / run;
  // Of the forward, a group's runs; of the backward, its channels.
  p.block_lanes_log2 = log2_below(in.tensors == 1 ? int64_t(p.group_runs) * p.walkers : p.channels_per_group, 5);
  p.lanes_walkers = (1u << p.block_lanes_log2) / p.group_runs;
  p.lanes_runs = (1u << p.block_lanes_log2) % p.group_runs;
  p.channel_lanes_log2 = log2_below(std::min<int64_t>(kRowThreads / std::min(p.channels, 256u), p.walkers), 5);
  p.team_lanes_log2 = log2_below(p.blocks, 5);
  while (p.team_lanes_log2 > 0 && (5u << (p.team_lanes_log2 - 1)) >= p.blocks) --p.team_lanes_log2;
  const double per_row = double(p.channels_per_group) * p.turns;
  p.full_blocks = p.rows / p.share;
  p.full_count = static_cast<float>(p.share * per_row);
  p.rest_count = static_cast<float>((p.rows - p.full_blocks * p.share) * per_row);
  p.total_count = static_cast<float>(p.rows * per_row);

  const int64_t entries = in.tensors == 1 ? int64_t(1) << p.vector_runs_log2 : vec;
  const int64_t rest = in.tensors == 1 ? kRowThreads * 4 : p.channels * 16;
  const int64_t tables = entries * kRowThreads * 8 + p.groups * 16 + p.channels * 8 + rest;
  const int64_t slot = int64_t(p.tensor_bytes) * in.tensors;
  plan->smem_limit = static_cast<int>(in.smem_bytes) - 1024;
  p.slots = static_cast<uint32_t>(std::clamp<int64_t>((plan->smem_limit - tables) / slot, 0, kRowSlots));
  if (p.slots < 2) return false;
  p.rereads = std::min(p.chunks, std::max(rereads, p.chunks > p.slots ? p.chunks - p.slots : 0));
  p.by_blocks = divisor(p.blocks);
  p.by_vectors = divisor(p.vectors);
  p.by_walkers = divisor(p.walkers);
  p.by_slots = divisor(p.slots);
  p.by_channels = divisor(p.channels);
  p.by_channels_per_group = divisor(p.channels_per_group);
  p.by_group_runs = divisor(p.group_runs);
  plan->smem_bytes = static_cast<int>(p.slots * slot + tables);
  plan->words = d.n * d.g * p.blocks;
  return true;
}

}  // namespace kgopt
