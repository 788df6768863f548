// Host-side planning of the kernel that does a small chain in one launch: how a sample is divided among the blocks of a
// cluster, what lies in shared memory, what it costs. Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/implicit_gemm/plan.h"
#include "conv3d/small_chain/params.h"
#include "conv3d/wgmma/tap_columns/plan.h"

namespace kgopt {

// Shared memory, in 32-bit words, in the order in which the kernel lays it out.
struct ChainSmemLayout {
  int offsets;  // of each (K step, lane % 4) where its two entries lie in the halo, an int2
  int sources;  // of each K entry where its weights lie
  int rows;     // of each row of the halo where it lies there, ~ if it lies outside of x, and its offset in x, an int2
  int weights;  // in the order of fragments: [tile of 8 channels][K step][lane] of two
  int bias;     // of the convolution
  int affine;   // weight and bias of the norm, a float2 of each channel
  int columns;  // what the epilogue does to a channel, a float2
  int groups;   // mean and rstd, a float2
  int parts;    // moments of parts of channels
  int moments;  // [block of the cluster][channel], or of a team [channel], of a float4
  int outputs;  // of a chunk
  int halo;
  int total;
};

KGOPT_HD ChainSmemLayout chain_smem_layout(const ChainPlan& p, int c_in, int c_out, int conv_groups, int num_groups) {
  auto align = [](int words) { return (words + 3) / 4 * 4; };
  const int channels = c_out * conv_groups;
  ChainSmemLayout s{};
  s.offsets = 0;
  s.sources = s.offsets + align(p.k_steps * 8);
  s.rows = s.sources + align(p.k_steps * 8);
  s.weights = s.rows + align(c_in * conv_groups * p.halo[0] * p.halo[1] * 2);
  s.bias = s.weights + conv_groups * p.n_tiles * p.k_steps * 64;
  s.affine = s.bias + align(channels);
  s.columns = s.affine + align(channels * 2);
  s.groups = s.columns + align(channels * 2);
  s.parts = s.groups + align(num_groups * 2);
  s.moments = s.parts + align(channels * p.stat_parts * 3);
  s.outputs = s.moments + channels * (p.is_team ? 1 : p.blocks) * 4;
  s.halo = s.outputs + align(channels * p.chunk_pitch);
  s.total = s.halo + align(p.plane * c_in * conv_groups);
  return s;
}

namespace plan_detail {

inline int log2_floor(int64_t v) {
  int bits = 0;
  while ((int64_t(2) << bits) <= v) ++bits;
  return bits;
}

// Fills what depends on how a sample is divided. False where it does not fit in shared memory.
inline bool chain_split(ChainPlan* p, const ConvProblem& q, const DeviceLimits& limits, int depth, int height,
                        int threads) {
  const int64_t c_in = q.c_in / q.groups, c_out = q.c_out / q.groups;
  p->split[0] = depth, p->split[1] = height, p->blocks = depth * height, p->threads = threads;
  int64_t positions = q.out[2], words = 1;
  for (int i = 0; i < 3; ++i) {
    const int64_t tile = i == 2 ? q.out[2] : (q.out[i] + p->split[i] - 1) / p->split[i];
    if (i < 2) positions *= tile;
    const int64_t halo = (tile - 1) * q.stride[i] + (q.kernel[i] - 1) * q.dilation[i] + 1;
    words *= halo;
    if (words > 64 * 1024) return false;
    p->halo[i] = static_cast<int>(halo);
  }
  if (positions * q.c_out > 16 * 1024 * 1024) return false;
  // Neighbouring K entries may be neighbouring channels: their planes begin a quarter of the banks apart.
  p->plane = static_cast<int>(words);
  while (p->plane % 32 != 8) ++p->plane;
  if (int64_t(p->plane) * q.c_in > 64 * 1024) return false;
  p->row_lanes_log2 = 0;
  while ((1 << p->row_lanes_log2) < std::min(p->halo[2], 32)) ++p->row_lanes_log2;
  const int row_lanes = 1 << p->row_lanes_log2;
  p->pieces = (p->halo[2] + row_lanes - 1) / row_lanes;
  p->by_pieces = known_divisor(p->pieces);
  p->by_height = known_divisor(p->halo[1]);
  p->by_depth = known_divisor(p->halo[0]);
  const int64_t pieces = q.c_in * p->halo[0] * p->halo[1] * p->pieces, at_once = int64_t(threads >> p->row_lanes_log2);
  const int64_t weights = q.groups * p->n_tiles * 8 * p->k_steps * 8;
  p->load_rounds =
      static_cast<int>(std::max((pieces + at_once * kChainLoads - 1) / (at_once * kChainLoads),
                                (weights + int64_t(threads) * kChainWeights - 1) / (int64_t(threads) * kChainWeights)));
  p->by_blocks = known_divisor(p->blocks);
  for (int i = 0; i < 2; ++i) p->by_split[i] = known_divisor(p->split[i]);
  p->by_weight_rows = known_divisor(p->n_tiles * 8);
  p->by_batches = known_divisor((p->n_tiles + p->n_batch - 1) / p->n_batch);
  p->by_channels = known_divisor(q.c_out);
  p->by_group = known_divisor(q.c_out / q.norm_groups);
  for (int i = 0; i < 3; ++i) p->by_kernel[i] = known_divisor(q.kernel[i]);
  p->by_out_width = known_divisor(q.out[2]);
  p->by_padded_k = known_divisor(p->k_steps * 8);

  const int channels = static_cast<int>(q.c_out);
  const int stat_lanes = log2_floor(std::max(1, threads / channels));
  p->team_lanes_log2 = std::min(5, std::max(2, stat_lanes));
  p->stat_lanes_log2 = std::min(5, stat_lanes);
  p->stat_parts_log2 = std::max(0, stat_lanes - 5);
  p->stat_parts = 1 << p->stat_parts_log2;
  const int room = limits.smem_per_block / 4;
  for (int64_t chunk = (positions + 15) / 16 * 16;; chunk = (chunk / 2 + 15) / 16 * 16) {
    p->chunk = static_cast<int>(chunk);
    p->chunks = static_cast<int>((positions + chunk - 1) / chunk);
    p->chunk_pitch = p->chunk;
    while (p->chunk_pitch % 32 != 8) p->chunk_pitch += 8;
    // What is left of the block's positions in each chunk has a thread or several.
    p->lanes_log2 = std::min(5, std::min(log2_floor(channels), log2_floor(std::max<int64_t>(1, threads / chunk))));
    const int64_t total = chain_smem_layout(*p, static_cast<int>(c_in), static_cast<int>(c_out),
                                            static_cast<int>(q.groups), static_cast<int>(q.norm_groups))
                              .total;
    if (int64_t(p->chunk_pitch) * channels < 1024 * 1024 && total <= room) {
      p->smem_bytes = static_cast<int>(total * 4);
      return true;
    }
    if (chunk < 4 * 16 * 8) return false;
  }
}

// Estimated cycles of the launch, of counts and what they took on an H200, by least squares over 694 plans of 85
// chains: nine in ten are within 0.89 and 1.09 of what was measured.
inline double chain_cycles(const ChainPlan& p, const ConvProblem& q, const DeviceLimits& limits) {
  const double warps = p.threads / 32, quarter = warps / 4;
  double positions = double(q.out[2]);
  for (int i = 0; i < 2; ++i) positions *= double((q.out[i] + p.split[i] - 1) / p.split[i]);
  // Blocks of a multiprocessor, by shared memory and by registers, and clusters at a time, each on one GPC.
  constexpr int kGpc = 18;
  const int together = std::max(1, std::min(limits.smem_per_sm / (p.smem_bytes + 1024), 512 / p.threads));
  const int clusters =
      p.is_team ? 1 << 30
                : limits.sm_count / kGpc * (kGpc * together / p.blocks) + limits.sm_count % kGpc * together / p.blocks;
  const double waves = std::ceil(double(q.n) / std::max(1, clusters));
  // Neighbours on a multiprocessor share its instruction issue.
  const double beside = std::max(1.0, std::min<double>(together, double(q.n) * p.blocks / limits.sm_count / waves));
  const double loads = double(q.c_in) * p.halo[0] * p.halo[1] * p.pieces * (1 << p.row_lanes_log2) / p.threads;
  const double weights = double(q.groups) * p.n_tiles * p.k_steps * 64 / p.threads;
  const bool lse = q.epilogue == ConvEpilogue::kResidualLse;
  const double split = p.exact ? 3 : 1, times = lse && p.chunks > 1 ? 2 : 1;
  const double tiles = std::ceil(positions / 16) * double((p.n_tiles + p.n_batch - 1) / p.n_batch * q.groups);
  const double own_tiles = std::ceil(tiles / warps) * times, values = positions * double(q.c_out) / 128 * beside;
  const double wave = 7900 + 1150 * p.load_rounds + (41 * loads + 71 * weights) * quarter * beside +
                      own_tiles * (570 + p.k_steps * (15 + 11.5 * p.n_batch * split)) +
                      1.7 * tiles * times * p.k_steps * (11 + 3 * p.n_batch * split) / 4 * beside + 23 * values +
                      (lse ? 430 + 56 * values : 0) + (p.blocks > 1 && !p.is_team ? 1050 : 0) +
                      (p.chunks - 1) * (lse ? 3700 : 2600);
  // Teams: counters are cleared ahead of the launch, and moments come through L2 in rounds of nine for each lane.
  const double rounds = std::ceil(double(q.c_out) / (p.threads >> p.team_lanes_log2)) *
                        std::ceil(double(p.blocks) / (9 << p.team_lanes_log2));
  return 6800 + waves * wave + (p.is_team ? 4200 + 1500 * rounds : 0);
}

}  // namespace plan_detail

inline ChainPlan plan_chain(const ConvProblem& q, const DeviceLimits& limits) {
  ChainPlan p;
  const auto refuse = refuser(p);
  if (q.is_empty()) return refuse(kEmptyProblem);
  const int most_blocks = std::min(limits.cluster_blocks, kChainMaxBlocks);
  if (!limits.has_wgmma || most_blocks < 1) return refuse("clusters need compute capability 9.0 and code built for it");
  if (q.norm_groups < 1) return refuse("no GroupNorm behind it");
  if (q.transposed) return refuse("a transposed convolution");
  if (q.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  const bool lse = q.epilogue == ConvEpilogue::kResidualLse;
  if (!lse && q.epilogue != ConvEpilogue::kStats) return refuse("it ends in a mean or in logsumexp");
  if (lse && q.out[0] != 1) return refuse("logsumexp of a depth other than 1");
  if (q.c_in < 1 || q.c_out < 1) return refuse("no channels");
  if (q.c_out > 1024) return refuse("more than 1024 output channels");
  int64_t taps = 1;
  for (int i = 0; i < 3; ++i) {
    const int64_t limit = int64_t(1) << 24;
    if (q.in[i] > limit || q.out[i] > limit || q.kernel[i] > 1024 || q.padding[i] > limit || q.dilation[i] > limit ||
        q.stride[i] > limit) {
      return refuse("a size, kernel, stride, padding or dilation is too large");
    }
    if (q.out[i] < 1) return refuse("an empty output");
    taps *= q.kernel[i];
  }
  const int64_t c_in = q.c_in / q.groups, c_out = q.c_out / q.groups;
  if (c_in * taps > 4096) return refuse("the weights do not fit in shared memory");
  // cuDNN does grouped convolutions without TF32 where that is allowed.
  p.exact = q.dtype == Dtype::kFloat32 && (!q.allow_tf32 || q.groups > 1);
  p.k = static_cast<int>(c_in * taps);
  p.k_steps = (p.k + 7) / 8;
  p.n_tiles = static_cast<int>((c_out + 7) / 8);
  p.n_batch = p.n_tiles == 1 ? 1 : p.n_tiles == 2 ? 2 : 4;
  bool found = false;
  ChainPlan best = p;
  auto offer = [&](int depth, int height) {
    if (q.n * depth * height > (int64_t(1) << 31) - 1) return;
    for (int threads : {256, 512}) {
      if (!plan_detail::chain_split(&p, q, limits, depth, height, threads)) continue;
      p.cycles = plan_detail::chain_cycles(p, q, limits);
      if (!found || p.cycles < best.cycles) found = true, best = p;
    }
  };
  for (int depth = 1; depth <= kChainMaxBlocks; depth *= 2) {
    for (int height = 1; depth * height <= most_blocks; height *= 2) {
      if (depth <= q.out[0] && height <= q.out[1]) offer(depth, height);
    }
  }
  // Teams of more blocks than a cluster has, one block a multiprocessor, of as few rows as there are blocks for.
  p.is_team = true;
  const int64_t most = limits.sm_count / q.n;
  for (int64_t depth = 1; depth <= std::min(most, q.out[0]); depth = depth < 8 ? depth + 1 : depth * 5 / 4) {
    const int64_t rows = (q.out[1] + std::min(most / depth, q.out[1]) - 1) / std::min(most / depth, q.out[1]);
    const int64_t height = (q.out[1] + rows - 1) / rows;
    if (depth * height > kChainMaxBlocks) offer(static_cast<int>(depth), static_cast<int>(height));
  }
  if (!found) return refuse("a sample does not fit in the shared memory of its blocks");
  return best;
}

}  // namespace kgopt
