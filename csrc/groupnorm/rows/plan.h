// How the channels_last GroupNorm kernels with roles cut x into shares, or why they do not take it. Host code, free of
// CUDA.
#pragma once

#include <cmath>

#include "common/refusal.h"
#include "groupnorm/columns/plan.h"
#include "groupnorm/rows/params.h"

namespace kgopt {

struct RowPlan {
  const char* refusal = nullptr;  // why not, or null
  RowShares shares;
  static constexpr bool cluster = false;
  int smem_bytes = 0;  // dynamic, of a block
  int smem_limit = 0;  // of any plan on this device
  int64_t words = 0;
};

inline constexpr uint32_t kRowAgain = 3;  // slots of chunks that come again

// Shares for so many teams, with at least so many chunks read again, of a kernel whose writers hold chunks or not.
// False where there are none.
inline bool set_row_shares(const NormPlanInput& in, uint32_t teams, uint32_t rereads, bool holds, RowPlan* plan) {
  const GroupNormDims& d = in.dims;
  const int size = dtype_size(d.dtype), vec = 16 / size, passes = kRowPasses / in.tensors;
  const int summers = holds ? kRowFewSummers : kRowSummers;
  *plan = RowPlan();
  RowShares& p = plan->shares;
  p.turns = static_cast<uint32_t>(vec / std::gcd<int64_t>(d.c, vec));
  const int64_t vectors = d.c * p.turns / vec;
  if (d.s % p.turns != 0 || vectors > summers) return false;
  p.samples = static_cast<uint32_t>(d.n);
  p.summers = static_cast<uint32_t>(summers);
  p.teams = teams;
  p.blocks = static_cast<uint32_t>(in.sm_count) / teams;
  p.rows = static_cast<uint32_t>(d.s / p.turns);
  p.share = (p.rows + p.blocks - 1) / p.blocks;
  p.vectors = static_cast<uint32_t>(vectors);
  p.walkers = summers / p.vectors;
  uint32_t most_rows = p.walkers * (kRowWriters / summers) * passes;
  // Shares and chunks are whole sectors of 32 bytes, or half of the bulk copies and of the warps' stores would begin
  // and end within one: 128 x 24 x 22 x 30 x 30 in bf16 took 82 us instead of 73 (H200).
  uint32_t sector_rows = static_cast<uint32_t>(2 / std::gcd<int64_t>(2, vectors));
  if (most_rows < sector_rows || p.share < 16 * sector_rows) sector_rows = 1;
  const auto whole_sectors = [&](uint32_t n) { return (n + sector_rows - 1) / sector_rows * sector_rows; };
  p.share = whole_sectors(p.share);
  most_rows = most_rows / sector_rows * sector_rows;
  p.chunks = (p.share + most_rows - 1) / most_rows;
  p.chunk_rows = whole_sectors((p.share + p.chunks - 1) / p.chunks);  // alike, so that slots are no larger than that
  p.chunks = (p.share + p.chunk_rows - 1) / p.chunk_rows;
  p.tensor_bytes = p.chunk_rows * p.vectors * 16;
  p.channels = static_cast<uint32_t>(d.c);
  p.groups = static_cast<uint32_t>(d.g);
  p.channels_per_group = p.channels / p.groups;

  p.group_lanes_log2 = log2_below(int64_t(p.channels_per_group) * p.turns, 5);
  const int64_t elements = vectors * vec, lanes = std::max<int64_t>(1, kRowPublishers * 32 / elements);
  p.element_lanes_log2 = log2_below(std::min<int64_t>(lanes, p.walkers), 5);
  p.team_lanes_log2 = team_lanes_log2(p.blocks);
  // More words a lane where they make it one trip: neighbouring lanes ask for whole sectors still, and the summers of a
  // block's only sample, who would help, have no registers for more.
  const uint32_t fewer = team_lanes_log2(p.blocks, row_words(in.tensors, size, holds));
  const auto is_one_trip = [&](uint32_t lanes_log2) { return int64_t(p.groups) << lanes_log2 <= kRowCollectors * 32; };
  if (!is_one_trip(p.team_lanes_log2) && is_one_trip(fewer) && fewer >= 2 && d.n >= 2 * int64_t(teams)) {
    p.team_lanes_log2 = fewer;
  }
  const double per_row = double(p.channels_per_group) * p.turns;
  p.full_blocks = p.rows / p.share;
  p.full_count = static_cast<float>(p.share * per_row);
  p.rest_count = static_cast<float>((p.rows - p.full_blocks * p.share) * per_row);
  p.total_count = static_cast<float>(p.rows * per_row);

  // Entries of the summers, sums of a row's elements, pivots or sums of all samples, parameters, statistics.
  const int64_t tables = int64_t(vec) * summers * 8 + elements * 16 + p.channels * 8 + p.groups * 8 * kRowAhead;
  const int64_t slot = int64_t(p.tensor_bytes) * in.tensors;
  plan->smem_limit = static_cast<int>(in.smem_bytes) - 1024;
  const int64_t slots = std::min<int64_t>((plan->smem_limit - tables) / slot, kRowSlots);
  if (slots < 4) return false;
  p.rereads = std::min(p.chunks, std::max(rereads, p.chunks > slots ? p.chunks - uint32_t(slots) + kRowAgain : 0));
  p.again_slots = p.rereads > 0 ? kRowAgain : 0;
  if (p.rereads == p.chunks) p.again_slots = static_cast<uint32_t>(slots) / 2;
  p.slots = static_cast<uint32_t>(slots) - p.again_slots;
  p.held = holds ? std::min<uint32_t>(p.chunks - p.rereads, row_held(in.tensors, size)) : 0;
  p.by_blocks = divisor(p.blocks);
  p.by_vectors = divisor(p.vectors);
  p.by_walkers = divisor(p.walkers);
  p.by_chunk_rows = divisor(p.chunk_rows);
  p.by_slots = divisor(p.slots);
  p.by_channels = divisor(p.channels);
  p.by_channels_per_group = divisor(p.channels_per_group);
  plan->smem_bytes = static_cast<int>(slots * slot + tables);
  plan->words = d.n * d.g * p.blocks + (d.n + 1) / 2;
  set_cleared(in, kRowPublishers * 32, plan);
  return true;
}

// What a plan takes on an H200, in microseconds, within a tenth of what was measured. A chunk that stays has its slot
// from its load until its sample's statistics are known and it is written: a latency, and most of the share's transfer.
// With as many chunks on the way as there are slots, that bounds what a sample takes, where memory does not. Chunks
// that come again are bounded by L2. More words than the collectors ask for at a time are another trip. Where registers
// hold chunks, too, a team waits the longer for its slowest block the more it has.
inline double row_time(const NormPlanInput& in, const RowPlan& plan) {
  constexpr double kBytesPerMicrosecond = 32000;  // of a multiprocessor
  const RowShares& p = plan.shares;
  const bool backward = in.tensors == 2;
  const double trips = std::ceil(double(p.blocks) * p.groups / (kRowCollectors * 32 * kTeamWords)) - 1;
  const double bytes = double(p.share) * p.vectors * 16 * (in.tensors + 1), transfer = bytes / kBytesPerMicrosecond;
  const double rounds = (p.samples + p.teams - 1) / p.teams;
  if (backward && p.held > 0) {
    const double kept = (7.5 + 0.005 * p.blocks + 0.8 * transfer) * (p.chunks + 1) / (p.slots + p.held);
    const double slow = dtype_size(in.dims.dtype) == 2 ? 0.25 : 0,
                 flow = transfer + slow * std::max(0., 3.5 - transfer);
    return rounds * (std::max({flow, kept, 1.85 + 0.8 * trips}) + 0.2) + 11;
  }
  const double latency = p.held > 0 ? 8 + 0.016 * p.blocks : backward ? 7.2 + 1.6 * trips : 7.5 + 2 * trips;
  const double least = backward ? 2.5 + 1.6 * trips : 2.6 + 2 * trips;
  const double kept = (latency + (backward ? 0.8 : 0.95) * transfer) * (p.chunks + 1) / (p.slots + p.held);
  const bool halves_held = !backward && p.held > 0 && dtype_size(in.dims.dtype) == 2;
  const double flow = transfer + (halves_held ? 0.2 : 0.3), rest = halves_held ? 0.15 : 0.4;
  return rounds * (std::max({flow, p.rereads > 0 ? 1.62 * transfer : kept, least}) + rest) + (backward ? 11 : 14);
}

// The same of the kernel that keeps slabs (groupnorm/columns/params.h): it loads, waits, and stores.
inline double column_time(const NormPlanInput& in, const ColumnPlan& plan) {
  const ColumnShares& p = plan.shares;
  const double bytes = double(p.share) * p.channels * p.turns * dtype_size(in.dims.dtype) * 2;
  return p.rounds * (1.1 * bytes / 32000 + 4) + 10;
}

// x and dy of so many samples are read again from wherever they are: all are read, then all are written. Of more, what
// teams have at a time must stay in L2 two and a half times, as chunks come so far ahead.
inline constexpr int64_t kRowFewSamples = 4, kRowFlowBytes = 24 << 20;

// Of two plans that are alike, the one of fewer teams, and the forward's that holds nothing: less than so much of the
// time is not alike.
inline constexpr double kRowTeamGain = 0.978, kRowHoldingTeamGain = 0.95, kRowHoldingGain = 0.93;

inline RowPlan plan_group_norm_rows(const NormPlanInput& in) {
  const GroupNormDims& d = in.dims;
  RowPlan plan;
  const auto refuse = refused<RowPlan>;
  if (!d.channels_last) return refuse("x is contiguous");
  if (in.max_blocks == 0) return refuse("bulk copies need compute capability 9.0 and code built for it");
  if (d.dtype == Dtype::kFloat64) return refuse("float64 keeps its statistics in float64");
  if (d.numel() == 0) return refuse("x is empty");
  if (!in.aligned) return refuse("a tensor does not start at a multiple of 16 bytes");
  // The backward computes the chain once and reads x once, which is more than what fewer warps lose: in fp32 always.
  const bool crowds_out = in.backward() ? in.crowds_out() && dtype_size(d.dtype) == 2 : in.long_chain;
  if (crowds_out) return refuse("slow activations need more warps than fit beside x");
  if (in.extended) return refuse("a residual or a PReLU needs registers that columns have");
  const int64_t sample = d.numel() / d.n * dtype_size(d.dtype), limit = int64_t(1) << 30;
  if (d.s >= limit || d.c >= (1 << 20) || d.n * d.g >= limit) return refuse("over 2^30 positions or groups");
  if (sample < kColumnLeastSlab) return refuse("a sample is below 256 KB: two passes are faster");
  if (!set_row_shares(in, 1, 0, false, &plan)) return refuse("a row is no whole vectors, or too long");
  const bool backward = in.tensors == 2, few = d.n <= kRowFewSamples;
  const bool holds = in.holds && plan.shares.vectors <= uint32_t(kRowFewSummers);
  double least = 0;
  const auto try_teams = [&](bool in_registers, double most) {
    for (int64_t teams = 1; teams <= std::min<int64_t>(d.n, in.sm_count); ++teams) {
      for (const bool stays : {true, false}) {
        RowPlan next;
        if (!set_row_shares(in, static_cast<uint32_t>(teams), stays ? 0 : ~0u, in_registers, &next)) continue;
        if (stays && next.shares.rereads > 0) continue;
        if (!stays && (!backward || few || teams * sample * 2 > kRowFlowBytes)) continue;
        next.shares.distance = next.shares.rereads * 5 / 2;
        const double time = row_time(in, next);
        if (least == 0 || time < most * least) {
          least = time;
          plan = next;
          most = in_registers ? kRowHoldingTeamGain : kRowTeamGain;
        }
      }
    }
  };
  // The backward's kernel holds chunks wherever its activation allows. The forward's has fewer summers then, which
  // small shares wait for.
  try_teams(backward && holds, 1);
  if (!backward && holds) try_teams(true, kRowHoldingGain);
  if (!backward) {
    if (least == 0) return refuse("a sample does not stay on chip: warps without roles are faster");
    const ColumnPlan columns = plan_group_norm_columns(in);
    const double gain = plan.shares.held > 0 ? kRowHoldingGain : 1;
    if (columns.refusal || (!columns.cluster && gain * column_time(in, columns) > least)) return plan;
    return refuse("slabs are faster");
  }
  if (least > 0) return plan;
  if (!few) return refuse("x and dy of a sample are more than stays in L2");
  if (d.n > in.sm_count) return refuse("more samples than multiprocessors");
  if (!set_row_shares(in, static_cast<uint32_t>(d.n), 0, holds, &plan)) return refuse("a row's tables do not fit");
  RowShares& p = plan.shares;
  if (p.rereads > 0) {
    p.slots += p.again_slots;
    p.again_slots = 0;
    p.by_slots = divisor(p.slots);
    p.held = holds ? std::min<uint32_t>(row_held(in.tensors, dtype_size(d.dtype)), p.chunks) : 0;
    const uint32_t kept = p.slots - kRowAgain + p.held;
    p.rereads = p.chunks > kept ? p.chunks - kept : 0;
  }
  p.backwards = true;
  return plan;
}

inline NormScratch scratch_of(const RowPlan& plan, const NormPlanInput& in) {
  const int64_t blocks = int64_t(plan.shares.teams) * plan.shares.blocks;
  NormScratch scratch = in.backward() ? sums_of_rows(blocks, in.dims) : NormScratch();
  scratch.words = plan.words;
  return scratch;
}

}  // namespace kgopt
