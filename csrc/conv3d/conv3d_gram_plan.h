// Host-side planning of the Gram kernel: which convolutions it takes, how its ring of slabs lies in shared memory, and
// how a sample is cut. Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv3d_gram_params.h"
#include "conv3d_plan.h"

namespace kgopt {
namespace plan_detail {

// Fills everything that depends on the tile. False when it does not fit in shared memory.
inline bool gram_tile(GramPlan* p, const ConvProblem& q, const DeviceLimits& limits, int rows, int columns, int slabs,
                      int stages) {
  const int in_slab_rows = p->outer == 0 ? static_cast<int>(q.out[1]) : 1;
  const int offsets = p->channels == 8 ? 2 : 4, per_row = p->per_row;
  p->tile[0] = rows, p->tile[1] = columns;
  p->halo[0] = rows + (p->kernel[1] - 1) * p->row_step;
  p->halo[1] = columns + (p->kernel[2] - 1) * static_cast<int>(q.dilation[2]);
  p->tiles[0] = (in_slab_rows + rows - 1) / rows;
  p->tiles[1] = static_cast<int>((q.out[2] + columns - 1) / columns);
  p->steps = (columns / p->pair + 15) / 16;
  p->lead = (4 - p->pad[2] % 4) % 4;
  p->vectors = (p->lead + p->halo[1] + 3) / 4;
  const int last_offset = p->lead + (per_row * offsets - 1) * p->unit;
  if (p->pair == 2) {
    // Neighbouring threads write the two halves in turn: in other banks where the second begins 64 bytes on.
    p->half = std::max(p->steps * 16 + last_offset / 2 + 1, p->vectors * 2);
    while (p->half % 8 != 4) ++p->half;
    p->row_entries = 2 * p->half;
  } else {
    p->half = 0;
    p->row_entries = std::max(p->steps * 16 + last_offset + 1, p->vectors * 4);
  }
  p->slab_entries = p->halo[0] * p->row_entries;
  if (int64_t(p->slab_entries) * 16 > limits.smem_per_block) return false;
  auto entry = [&](int offset) {  // of the first position's
    const int column = p->lead + offset * p->unit;
    return p->pair == 2 ? column % 2 * p->half + column / 2 : column;
  };
  for (int i = 0; i < p->blocks; ++i) {
    p->block_at[i] = 16 * (i / per_row * p->row_step * p->row_entries + entry(i % per_row * offsets));
  }
  p->second_at = entry(offsets / 2) - entry(0);
  p->stage_slabs = slabs;
  p->stages = stages;
  const int reach = (p->lags - 1) * p->lag_step;
  p->ahead = (reach + slabs - 1) / slabs;
  p->shared = slabs >= 2 * p->teams ? 0 : rows >= 2 * p->teams ? 1 : 2;
  if (stages < p->ahead + 2) return false;
  auto align = [](int bytes) { return (bytes + 127) / 128 * 128; };
  p->at_taps = 512;
  p->at_sums = align(p->at_taps + p->taps * 16);
  p->at_filters = align(p->at_sums + p->lags * p->blocks * 64);
  p->at_gram = align(p->at_filters + (p->taps << p->column_bits) * 4);
  p->at_ring = p->at_gram + p->lags * (p->lags + 1) / 2 * p->blocks * p->blocks * 1024;
  const int64_t ring = int64_t(stages) * slabs * p->slab_entries * 16 * (p->accurate ? 2 : 1);
  const int64_t finish =
      int64_t(p->taps) * ((p->taps + 7) / 8 * 8 + 4) * 4 + 32 * kGramComputing * 16 + 128 * 12 + p->taps * 8;
  const int64_t total = p->at_ring + (std::max(ring, finish) + 127) / 128 * 128;
  if (total > limits.smem_per_block) return false;
  p->smem_bytes = static_cast<int>(total);
  return true;
}

// Estimated cycles of a block for `slice` outputs along the outer dim: products, or bytes, and what comes once.
inline double gram_cost(const GramPlan& p, const ConvProblem& q, int slice) {
  const int sweeps = p.tiles[0] * p.tiles[1];
  const double slabs = slice + (p.lags - 1) * p.lag_step;
  const double products = (p.lags - 0.5) * p.blocks * p.blocks * (p.accurate ? 3.2 : 1.0);
  const double multiply = slabs * p.tile[0] * p.steps * (products * 3.5 + 20) + p.lags * 1500.0;
  const double load =
      slabs * p.halo[0] * p.halo[1] * std::max<double>(q.c_in * (q.dtype == Dtype::kFloat32 ? 4 : 3), 8) / 16;
  return sweeps * std::max(multiply, load) + 9000;
}

}  // namespace plan_detail

inline GramPlan plan_gram(const ConvProblem& q, const DeviceLimits& limits) {
  GramPlan p;
  auto refuse = [&](const char* why) {
    p.refusal = why;
    return p;
  };
  if (!limits.has_wgmma) return refuse("it is written for compute capability 9.0");
  if (q.epilogue != ConvEpilogue::kStats) return refuse("only statistics come from a Gram matrix");
  if (q.transposed || q.groups != 1) return refuse("a transposed or grouped convolution");
  if (q.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  if (q.c_in > 8) return refuse("more than 8 input channels");
  if (q.in[2] % 4 != 0) return refuse("rows that are not a multiple of four positions");
  if (q.in[0] * q.in[1] * q.in[2] >= int64_t(1) << 31 || q.n > int64_t(1) << 30)
    return refuse("2^31 or more positions");
  for (int i = 0; i < 3; ++i) {
    if (q.stride[i] != 1) return refuse("a stride other than 1");
    if (q.kernel[i] > kGramLags || q.dilation[i] > 64 || q.padding[i] > 4096) {
      return refuse("a kernel, padding or dilation is too large");
    }
    p.pad[i] = static_cast<int>(q.padding[i]);
    p.kernel[i] = static_cast<int>(q.kernel[i]);
  }
  p.accurate = q.dtype == Dtype::kFloat32 && !q.allow_tf32;
  p.outer = q.in[0] == 1 && q.out[0] == 1 && q.kernel[0] == 1 ? 1 : 0;
  p.lags = p.kernel[p.outer];
  p.lag_step = static_cast<int>(q.dilation[p.outer]);
  p.kernel[p.outer] = 1;
  p.row_step = p.outer == 0 ? static_cast<int>(q.dilation[1]) : 1;
  p.channels = q.c_in <= 4 ? 4 : 8;
  p.taps = p.lags * p.kernel[1] * p.kernel[2] * static_cast<int>(q.c_in);
  p.column_bits = q.c_out <= 32 ? 5 : 6;
  p.teams = kGramComputing / p.lags;
  const int rows = p.outer == 0 ? static_cast<int>(q.out[1]) : 1, offsets = p.channels == 8 ? 2 : 4;

  double best = -1;
  GramPlan chosen;
  for (int pair : {2, 1}) {
    if (pair == 2 && (q.dilation[2] != 1 || q.out[2] % 2 != 0)) continue;
    p.pair = pair;
    p.unit = static_cast<int>(q.dilation[2]);
    p.per_row = (p.kernel[2] + pair - 1 + offsets - 1) / offsets;
    p.blocks = p.per_row * p.kernel[1];
    if (p.blocks > kGramBlocks) continue;
    int last_columns = 0;
    for (int64_t columns : {q.out[2], int64_t(512), int64_t(256), int64_t(128), int64_t(64), int64_t(32)}) {
      columns = std::min(columns, q.out[2]);
      if (columns == last_columns || columns > 4096 || (columns < q.out[2] && columns % 4 != 0)) continue;
      last_columns = static_cast<int>(columns);
      int last_rows = 0;
      for (int parts : {1, 2, 3, 4, 6, 8, 12, 16, 32, 64}) {
        const int tile_rows = (rows + parts - 1) / parts;
        if (tile_rows == last_rows) continue;
        last_rows = tile_rows;
        for (int slabs : {1, 2, 4, 8, 16}) {
          for (int stages = kGramStages; stages >= 2; --stages) {
            if (!plan_detail::gram_tile(&p, q, limits, tile_rows, last_columns, slabs, stages)) continue;
            // A stage keeps all loading threads busy, and they are two stages ahead.
            const int vectors = slabs * p.halo[0] * p.vectors, threads = 32 * gram_loading(p.accurate);
            const double waste = double((vectors + threads - 1) / threads * threads) / vectors;
            const int ahead = stages - p.ahead - 1;
            const double cost = plan_detail::gram_cost(p, q, static_cast<int>(q.out[p.outer])) *
                                (1 + 0.2 * (waste - 1) + (ahead < 2 ? 0.1 : 0.0));
            if (best < 0 || cost < best) best = cost, chosen = p;
            break;
          }
        }
      }
    }
  }
  if (best < 0) return refuse("its Gram matrix or a tile of its input does not fit");
  p = chosen;

  const int64_t outputs = q.out[p.outer];
  best = -1;
  for (int64_t slices = 1; slices <= std::min<int64_t>(outputs, 2 * limits.sm_count); ++slices) {
    const int slice = static_cast<int>((outputs + slices - 1) / slices);
    if ((outputs + slice - 1) / slice != slices) continue;
    const double waves = double((q.n * slices + limits.sm_count - 1) / limits.sm_count);
    const double cost = std::max(waves, 1.0) * plan_detail::gram_cost(p, q, slice);
    if (best < 0 || cost < best) best = cost, p.slices = slices, p.slice = slice;
  }
  if (q.n * p.slices > (int64_t(1) << 31) - 1) return refuse("more than 2^31 blocks");
  return p;
}

}  // namespace kgopt
