// Host-side planning of the kernels for few channels: tile shape, shared memory layout, grid. Plain
// arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/few_channels/params.h"
#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

// Shared memory, in 32-bit words, in the order in which the kernel lays it out.
struct FewChannelsSmemLayout {
  int barriers;  // full and empty of each stage
  int weights;   // in the blocks of wgmma.cuh: the high parts, for each turn of the window; then the low parts. Where
                 // channels are rows and weights live in registers: an int2 of each K entry, where they lie
  int offsets;   // K offset table: an int2 per (k step, lane % 4); chunked: an int per (lane / 16, k step)
  int strips;    // per strip its offset in the halo and its position in the tile, an int2; for logsumexp with channels
                 // as rows an int4
  int columns;   // per output channel a float4 of the epilogue
  int scratch;   // moments of each warp
  int halo;
  int raw;
  int total;
};

KGOPT_HD int few_channels_planes(const FewChannelsPlan& p) { return p.chunked ? p.words / 4 : p.words; }
KGOPT_HD int few_channels_stage_words(const FewChannelsPlan& p) {
  return (few_channels_planes(p) + p.zero_plane) * p.plane * (p.math == ConvMath::kFp16x3 ? 2 : 1);
}

KGOPT_HD FewChannelsSmemLayout few_channels_smem_layout(const FewChannelsPlan& p) {
  const int split = conv_split_factor(p.math);
  auto align = [](int words) { return (words + 31) / 32 * 32; };
  FewChannelsSmemLayout s{};
  s.barriers = 0;
  s.weights = 32;
  const int weight_words = p.by_channels ? 2 : p.window * p.window * p.columns * split;
  s.offsets = s.weights + align(p.k_steps * 8 * weight_words);
  s.strips = s.offsets + align(p.k_steps * 8);
  s.columns = s.strips + align(p.strips * (p.by_channels ? 4 : 2));
  s.scratch = s.columns + align(p.columns * 4);
  s.halo = s.scratch + align(p.columns * 3 * p.consumers * 4);
  s.raw = s.halo + few_channels_stage_words(p) * p.stages;
  s.total = s.raw + p.raw_words;
  return s;
}

// The same of conv_window_kernel.
struct WindowSmemLayout {
  int full, empty;  // barriers of the stages
  int scales;       // what undoes each stage's scale
  int maxima;       // of the loading warps
  int zeros;        // a chunk of them
  int tiles;        // where each stage's tile lies: window_tile_at
  int weights;      // in the blocks of wgmma.cuh: the high terms, for each turn of the window; then the low ones
  int entries;      // of each type of chunk, see WindowEntry
  int weight_at;    // of each chunk of K, where the weights of its eight values lie; -1: padding
  int chunks;       // of each chunk of K, an int2: its type's plane, in bytes, and its shift along the width
  int affine;       // of each column, the convolution's bias and the norm's weight and bias
  int strips, columns, scratch, halo, total;
};

KGOPT_HD int window_terms(const FewChannelsPlan& p) { return p.math == ConvMath::kFp16x3 ? 2 : 1; }
// With one strip at a time, warps read a row too many: behind each stage there is room for it.
KGOPT_HD int window_stage_words(const FewChannelsPlan& p) {
  return p.types * p.plane * window_terms(p) + (window_chains(p.math, p.columns, p.blocks) == 1 ? p.pitch * 4 : 0);
}
// Of K, those that are not padding.
KGOPT_HD int window_chunks(const FewChannelsPlan& p) {
  return p.shifted_types * p.kernel[2] + p.types - p.shifted_types;
}

KGOPT_HD WindowSmemLayout window_smem_layout(const FewChannelsPlan& p) {
  auto align = [](int words) { return (words + 31) / 32 * 32; };
  WindowSmemLayout s{};
  s.full = 0;
  s.empty = s.full + 2 * kWindowStages;
  s.scales = s.empty + 2 * kWindowStages;
  s.maxima = s.scales + kWindowStages;
  s.zeros = s.maxima + 4 * kWindowProducers;
  s.tiles = 64;
  s.weights = 96;
  s.entries =
      s.weights + window_turns(p.math, p.columns, p.blocks) * kWindowRows * p.columns * p.blocks * 16 * window_terms(p);
  s.weight_at = s.entries + p.types * 8 * 4;
  s.chunks = s.weight_at + p.blocks * 4 * 8;
  s.strips = s.chunks + align(p.blocks * 4 * 2);
  s.columns = s.strips + align(p.strips * 2);
  s.affine = s.columns + align(p.columns * 2);
  s.scratch = s.affine + align(p.columns * 3);
  s.halo = s.scratch + align(p.columns * 3 * p.consumers * 4);
  s.total = s.halo + window_stage_words(p) * p.stages;
  return s;
}

// The same of conv_positions_kernel.
struct PositionSmemLayout {
  int full, empty;  // barriers of the stages
  int scales;       // what undoes each stage's scale
  int maxima;       // of the loading warps
  int chunks;       // of each chunk of K, its place in the halo, in bytes
  int turns;        // barriers of logsumexp's warps, two of each
  int weights;      // in the blocks of wgmma.cuh
  int unscale;      // of each column, what undoes the scale of its weights
  int pivots;       // of each column, what is subtracted from its values
  int columns;      // for logsumexp a float4 of each column, the block's and each warp's; else moments of each warp
  int strips, halo, total;
};

// Of a stage: its planes, and what the last strip of a row reads behind the last of them for positions beyond the row,
// whose results nobody takes. It must not be the next stage, which is being filled.
inline int position_stage_words(const FewChannelsPlan& p) {
  const int end = p.lead + (p.tile[2] - 1) * p.step[2] + (p.kernel[2] - 1) * p.dilation[2] + 1;  // of a tile's row
  return p.types * p.plane + 4 * std::max(0, end - p.pitch);
}

KGOPT_HD PositionSmemLayout position_smem_layout(const FewChannelsPlan& p) {
  PositionSmemLayout s{};
  s.full = 0;
  s.empty = s.full + 2 * kPositionStages;
  s.scales = s.empty + 2 * kPositionStages;
  s.maxima = s.scales + kPositionStages;
  s.chunks = s.maxima + 8;
  s.turns = 64;
  s.weights = s.turns + 2 * 2 * 4 * position_consumers(true);
  s.unscale = s.weights + p.k_steps * p.columns * 8;
  s.pivots = s.unscale + p.columns;
  s.columns = s.pivots + p.columns;
  s.strips = s.columns + p.columns * 4 * (p.consumers * 4 + 1);
  s.halo = (s.strips + p.strips + kPositionNoStrips + 31) / 32 * 32;
  s.total = s.halo + p.stage_words * p.stages;
  return s;
}

namespace plan_detail {

// Fills everything that depends on the tile shape. False when it does not fit in shared memory.
inline bool position_tile(FewChannelsPlan* p, const ConvProblem& q, const DeviceLimits& limits, int d, int h, int w,
                          int stages) {
  p->stages = stages;
  p->rows = 1, p->segments = h;
  p->tile[0] = d, p->tile[1] = h, p->tile[2] = w;
  for (int i = 0; i < 3; ++i) {
    const int64_t extent = i == 2 ? std::min<int64_t>(w, q.out[2]) : p->tile[i];
    const int64_t halo = (extent - 1) * p->step[i] + (p->kernel[i] - 1) * int64_t(p->dilation[i]) + 1;
    if (halo > 4096) return false;
    p->halo[i] = static_cast<int>(halo);
    p->tiles[i] = (q.out[i] + p->tile[i] - 1) / p->tile[i];
  }
  p->lead = ((p->origin[2] % 4) + 4) % 4;
  p->vectors = (p->lead + p->halo[2] + 3) / 4;
  p->pitch = p->vectors * 4;
  const int64_t positions = int64_t(p->halo[0]) * p->halo[1] * p->pitch;
  if (positions * p->types > 16 * 1024) return false;
  p->plane = static_cast<int>(positions) * 4;
  p->stage_words = position_stage_words(*p);
  p->strips = d * h * (w / kFewChannelsStrip);
  p->tiles_per_sample = p->tiles[0] * p->tiles[1] * p->tiles[2];
  p->smem_bytes = position_smem_layout(*p).total * 4;
  return p->smem_bytes <= limits.smem_per_block;
}

// Fills everything that depends on the tile shape. False when it does not fit in shared memory.
inline bool few_channels_tile(FewChannelsPlan* p, const ConvProblem& q, const DeviceLimits& limits, int d, int rows,
                              int segments, int w) {
  p->rows = rows;
  p->segments = segments;
  p->tile[0] = d, p->tile[1] = rows * segments, p->tile[2] = w;
  for (int i = 0; i < 3; ++i) {
    p->halo[i] = (p->tile[i] - 1) * p->step[i] + (p->kernel[i] - 1) * p->dilation[i] + 1;
    p->tiles[i] = (q.out[i] + p->tile[i] - 1) / p->tile[i];
    if (p->halo[i] > 4096) return false;
  }
  p->lead = ((p->origin[2] % 4) + 4) % 4;
  p->vectors = (p->lead + p->halo[2] + 3) / 4;
  p->pitch = p->vectors * 4;
  // Fragment loads read 8 neighbouring words for each of 4 K entries. With taps innermost those four may sit in two
  // rows: keep neighbouring rows out of each other's banks. With channels innermost they sit in four planes, which
  // must start 8 banks apart. In chunks, 8 neighbouring positions fill the 32 banks.
  if (p->taps_fast) {
    while (p->pitch % 32 < 10 || p->pitch % 32 > 22) p->pitch += 4;
  }
  const int64_t rows_in = int64_t(p->halo[0]) * p->halo[1];
  const int64_t positions = rows_in * p->pitch;
  if (positions * p->words > 64 * 1024) return false;
  p->plane = static_cast<int>(positions) * (p->chunked ? 4 : 1);
  while (!p->chunked && p->plane % 32 != 8) p->plane += 4;
  const bool is_half = conv_channels_per_word(p->math) == 2;
  p->raw_words = is_half || p->chunked ? static_cast<int>(rows_in * p->vectors * 4 * p->words) : 0;
  if (conv_is_scaled(p->math)) p->raw_words *= 2;  // x comes as fp32
  p->strips = d * segments * (w / p->strip);
  p->tiles_per_sample = p->tiles[0] * p->tiles[1] * p->tiles[2];
  p->smem_bytes = few_channels_smem_layout(*p).total * 4;
  return p->smem_bytes <= limits.smem_per_block;
}

// The chunks of a window on gathered chunks. What eight does not divide goes into chunks of all kernel columns where
// that makes fewer. False where K is longer than the fragments that a thread can hold.
inline bool window_take_chunks(FewChannelsPlan* p, int64_t c_in) {
  const int64_t values = c_in * p->kernel[0];
  const int full = static_cast<int>(values / 8), rest = static_cast<int>(values % 8), width = p->kernel[2];
  const int together = (rest * width + 7) / 8;
  const bool shift_all = together >= width;
  p->shifted_types = full + (rest > 0 && shift_all);
  p->types = p->shifted_types + (rest > 0 && !shift_all ? together : 0);
  p->blocks = (window_chunks(*p) + 3) / 4;
  return p->blocks <= kWindowBlocks;
}

// Fills everything that depends on the tile shape. False when it does not fit in shared memory.
inline bool window_tile(FewChannelsPlan* p, const ConvProblem& q, const DeviceLimits& limits, int d, int rows,
                        int segments, int w, int stages) {
  p->rows = rows, p->segments = segments, p->stages = stages;
  p->tile[0] = d, p->tile[1] = rows * segments, p->tile[2] = w;
  p->halo[0] = d, p->halo[1] = p->tile[1] + kWindowRows - 1;
  const int64_t valid_w = std::min<int64_t>(w, q.out[2]), reach = (p->kernel[2] - 1) * int64_t(p->dilation[2]);
  if (valid_w + reach > 4096 || p->halo[1] > 1024 || p->tile[1] > 1023) return false;
  p->halo[2] = static_cast<int>(valid_w + reach);
  for (int i = 0; i < 3; ++i) p->tiles[i] = (q.out[i] + p->tile[i] - 1) / p->tile[i];
  p->lead = ((p->origin[2] % 4) + 4) % 4;
  p->vectors = (p->lead + p->halo[2] + 3) / 4;
  p->pitch = (p->vectors * 4 + 7) / 8 * 8;
  const int64_t positions = int64_t(d) * p->halo[1] * p->pitch;
  if (positions * 4 * p->types > 64 * 1024) return false;
  // Lanes that read different types at once start half of the banks apart.
  p->plane = static_cast<int>(positions + 4) * 4;
  p->march_lanes = 0;
  const bool cube = p->kernel[0] == 3 && p->kernel[2] == 3 && p->dilation[0] == 1 && p->dilation[2] == 1;
  if (cube && p->step[0] == 1 && d == 1 && q.c_in / q.groups <= window_march_channels(p->math) && p->vectors <= 32) {
    int lanes = 1;  // a power of two: a thread's neighbour is in its warp
    while (lanes < p->vectors) lanes *= 2;
    if (lanes * p->halo[1] <= 128 * kWindowProducers) p->march_lanes = lanes;
  }
  p->strips = d * segments * (w / p->strip);
  // Warps of two strips work by pairs of units, a unit being a strip for each warp, of one tile or of several.
  const bool pairs = window_chains(p->math, p->columns, p->blocks) == 2;
  p->tiles_together = pairs && p->strips < 3 ? 4 / p->strips : 1;
  // A barrier's parity says which of two rounds is over: nobody may wait for a stage's second round before its first.
  const int units = (p->strips + 3) / 4, units_ahead = pairs ? 4 : p->consumers;
  if ((units_ahead + units - 1) / units * p->tiles_together > stages) return false;
  p->tiles_per_sample = p->tiles[0] * p->tiles[1] * p->tiles[2];
  p->smem_bytes = window_smem_layout(*p).total * 4;
  return p->smem_bytes <= limits.smem_per_block;
}

// Estimated cycles of a multiprocessor for all tiles of a sample. Tensor cores and instruction issue take turns: a
// product holds the registers' ports. Chains of a warpgroup, and the loading threads, count where they are longer.
inline double window_cost(const FewChannelsPlan& p) {
  const int steps = p.rows + kWindowRows - 1;
  const int chains = window_chains(p.math, p.columns, p.blocks);
  const double units = p.tiles_together > 1 ? 1.0 / p.tiles_together : (p.strips + 3) / 4;  // of a tile
  const double mma = p.blocks * p.columns * kWindowRows * (p.math == ConvMath::kFp16x3 ? 3.0 : 1.0);
  const double issue = 2.0 * p.columns + 6.0 * p.blocks * window_terms(p) + 16;
  const int at_once = std::min(p.consumers * chains, std::max(1, static_cast<int>((p.stages - 1) * units)));
  const double step = std::max(mma + issue, (mma + 2.0 * issue + 60) / at_once) + (chains == 1 ? 25 : -15);
  // The loading threads' chain of instructions, and what it takes of their issue.
  const double rounds = std::ceil(double(p.halo[0]) * p.halo[1] * p.vectors / (128 * kWindowProducers));
  const double chain =
      p.march_lanes ? (chains == 2 ? 1500.0 : 1000.0 * window_terms(p)) : rounds * p.types * 3400 * window_terms(p);
  const double compute = units * (steps * step + 60) + (chains == 1 ? 0 : 250);
  return double(p.tiles_per_sample) * std::max(compute, chain);
}

// The chunks of four words that each K step multiplies, first all taps of the first chunk of channels. They are in the
// order in which they lie in the halo: the descriptor holds no negative distance.
inline void few_channels_chunk_pairs(FewChannelsPlan* p) {
  const int taps = p->kernel[0] * p->kernel[1] * p->kernel[2];
  auto at = [&](int chunk) {  // in chunks; padding repeats the last one
    // Nothing is lost where a weight of zero meets an infinite input: the statistics are NaN already.
    chunk = std::min(chunk, p->words / 4 * taps - 1);
    const int plane = chunk / taps, tap = chunk % taps;
    const int w = tap % p->kernel[2], h = tap / p->kernel[2] % p->kernel[1], d = tap / (p->kernel[2] * p->kernel[1]);
    return plane * (p->plane / 4) + (d * p->dilation[0] * p->halo[1] + h * p->dilation[1]) * p->pitch +
           w * p->dilation[2];
  };
  for (int i = 0; i < p->k_steps; ++i) p->chunk_pairs[i] = at(2 * i) | uint32_t(at(2 * i + 1) - at(2 * i)) << 16;
}

// Estimated cycles of a multiprocessor for all tiles of a sample: the slowest of tensor cores, instruction issue and
// special functions for the rows of all strips, of one warpgroup's chain of loads, products and epilogue, or the halo.
inline double few_channels_cost(const FewChannelsPlan& p, bool lse) {
  const double halo_cost = double(p.halo[0]) * p.halo[1] * p.vectors * 4 * p.words * 4 / 20.0 + 1000;
  if (p.by_channels) {
    const double issue = ((lse ? 3.5 : 1.5) * p.strip + 2 * p.k_steps + 120) / 0.75;
    const bool split = p.math == ConvMath::kFp16x3;
    const double mma = p.k_steps * p.strip / 2.0 * (split ? 3 : 1),
                 special = lse ? (split ? 12.0 : 8.0) * p.strip : 0.0;
    const int rounds = (p.strips + p.consumers - 1) / p.consumers * p.consumers;
    const double compute = rounds * std::max(mma, std::max(issue, special)) + mma + 300;
    return double(p.tiles_per_sample) * (std::max(compute, halo_cost) + (p.stages > 2 ? 0.1 : 0.2) * halo_cost + 300);
  }
  const double split = p.math == ConvMath::kTf32x3 ? 3.0 : 1.0;
  const double mma = p.k_steps * p.window * p.columns / 2.0 * split;
  const double epilogue = lse ? 6.5 * p.columns + 40 : 1.5 * p.columns + 40;
  const double load = p.k_steps * ((p.chunked ? 3.0 : 8.0) + 4.0 * split + (split > 1 ? 12 : 0));
  const double issue = (load + epilogue) / 0.75;
  const double special = lse ? 8.0 * p.columns : 0.0;
  const double chain = mma + 2.0 * load + (p.window > 1 ? 2.0 : 1.0) * epilogue + 150;
  const int jobs = (p.strips + 3) / 4;
  const int rounds = (jobs + p.consumers - 1) / p.consumers;
  const double compute =
      (p.rows + p.window - 1) * std::max(jobs * std::max(mma, std::max(issue, special)), rounds * chain) + rounds * 150;
  return double(p.tiles_per_sample) * (std::max(compute, halo_cost) + (p.stages > 2 ? 0.1 : 0.2) * halo_cost + 300);
}

// How a sample's tiles are shared among thread blocks, and what that costs. False when there are too many.
inline bool few_channels_slices(FewChannelsPlan* p, const ConvProblem& q, const DeviceLimits& limits,
                                double sample_cycles) {
  p->tiles_per_slice = tiles_per_block(p->tiles_per_sample, q.n * p->n_tiles * q.groups, limits.sm_count, 1.0, 512);
  p->slices = (p->tiles_per_sample + p->tiles_per_slice - 1) / p->tiles_per_slice;
  const double blocks = double(q.n) * p->slices * p->n_tiles * q.groups;
  // Until the first tile is there, and at the end; a window on gathered chunks waits for weights and the first tile
  // once.
  const double once = p->by_window ? 7000 : 0, each = p->by_window ? 2000 : 9000;
  p->cycles = once + std::ceil(blocks / limits.sm_count) *
                         (sample_cycles / double(p->tiles_per_sample) * double(p->tiles_per_slice) + each);
  return q.n * p->slices <= (int64_t(1) << 31) - 1;
}

// The best of the tiles that were offered, by the time of the launch, which wants all multiprocessors busy to the end.
struct BestTile {
  const ConvProblem& q;
  const DeviceLimits& limits;
  FewChannelsPlan plan = {};
  bool is_there = false, fits = false;  // fits: the grid

  void offer(FewChannelsPlan p, double sample_cycles) {
    const bool p_fits = few_channels_slices(&p, q, limits, sample_cycles);
    if (!is_there || p.cycles < plan.cycles) is_there = true, fits = p_fits, plan = p;
  }
};

// Widths, multiples of a strip up to full_w, and rows of tiles that are worth a look.
template <typename Look>
void for_each_tile(int full_w, int strip, int64_t out_h, const Look& look) {
  int last_w = 0;
  for (int w : {full_w, 256, 128, 64, 32, 16}) {
    if (w > full_w || w == last_w || w % strip != 0) continue;
    last_w = w;
    int last_rows = 0;
    for (int parts : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 21, 26, 32, 42, 64, 1 << 20}) {
      const int rows = static_cast<int>(std::min<int64_t>((out_h + parts - 1) / parts, 64));
      if (rows != last_rows) look(w, rows);
      last_rows = rows;
    }
  }
}

inline int whole_strips(int64_t width, int strip, int64_t most) {
  return static_cast<int>(std::min<int64_t>((width + strip - 1) / strip * strip, most));
}

// A window on gathered chunks. False where K is too long or no tile fits.
inline bool plan_window(FewChannelsPlan* p, const ConvProblem& q, const DeviceLimits& limits, int64_t c_in) {
  p->by_window = p->chunked = true;
  p->window = kWindowRows;
  if (p->math == ConvMath::kTf32x3) p->math = ConvMath::kFp16x3;
  if (!window_take_chunks(p, c_in)) return false;
  p->producers = kWindowProducers, p->consumers = window_consumers(p->math, p->columns, p->blocks);
  p->words = p->types * 4;
  BestTile best{q, limits};
  for_each_tile(whole_strips(q.out[2], kFewChannelsStrip, 512), kFewChannelsStrip, q.out[1], [&](int w, int rows) {
    for (int segments : {1, 2, 3, 4, 6, 8}) {
      // The warps of a warpgroup count rows together.
      if (segments > 1 && ((segments - 1) * rows >= q.out[1] || q.out[1] % rows != 0)) break;
      for (int d : {1, 2, 4}) {
        if (d > q.out[0]) break;
        for (int stages : {8, 6, 5, 4, 3, 2}) {
          if (window_tile(p, q, limits, d, rows, segments, w, stages)) best.offer(*p, window_cost(*p));
        }
      }
    }
  });
  if (!best.is_there) return false;
  *p = best.plan;
  p->at_once = std::max<int64_t>(1, limits.sm_count / (int64_t(p->n_tiles) * q.groups));
  return best.fits;
}

// Estimated cycles of a multiprocessor for all tiles of a sample: tensor cores and instruction issue take turns,
// special functions beside them, and the loading threads wait for memory once for each of their pieces.
inline double position_cost(const FewChannelsPlan& p, bool lse) {
  const double mma = 32.0 * p.k_steps, issue = (lse ? 330 : 120) + 4.0 * p.k_steps, special = lse ? 520 : 0;
  const double compute = (p.strips + 3) / 4 * std::max(mma + issue, special);
  const double rounds = std::ceil(double(p.halo[0]) * p.halo[1] * p.vectors / (128 * p.producers)) * p.types;
  const double load = rounds * 1500;
  // The first tile's load is waited for as a whole.
  return double(p.tiles_per_sample) * (std::max(compute, load + 500) + (p.stages > 2 ? 0.1 : 0.2) * load + 300) + load;
}

// Positions as rows. False where K is too long or no tile fits.
inline bool plan_positions(FewChannelsPlan* p, const ConvProblem& q, const DeviceLimits& limits, int64_t c_in,
                           bool lse) {
  const int64_t types = (c_in + 7) / 8, taps = int64_t(p->kernel[0]) * p->kernel[1] * p->kernel[2];
  const int64_t chunks = types * taps + (lse ? 0 : 1);  // statistics: the last is a constant
  if (chunks > 2 * kPositionMoreSteps) return false;
  p->by_positions = p->chunked = true;
  p->k_steps = chunks <= 2 * kPositionSteps ? kPositionSteps : kPositionMoreSteps;
  p->types = static_cast<int>(types);
  p->words = p->types * 4;
  p->k_words = static_cast<int>(types * taps) * 4;
  p->producers = position_producers(lse), p->consumers = position_consumers(lse);
  BestTile best{q, limits};
  for_each_tile(whole_strips(q.out[2], kFewChannelsStrip, 1024), kFewChannelsStrip, q.out[1], [&](int w, int rows) {
    for (int d : {1, 2, 4}) {
      if (d > q.out[0]) break;
      for (int stages : {3, 4, 2}) {
        if (position_tile(p, q, limits, d, rows, w, stages)) best.offer(*p, position_cost(*p, lse));
      }
    }
  });
  if (!best.is_there) return false;
  *p = best.plan;
  return best.fits;
}

}  // namespace plan_detail

inline FewChannelsPlan plan_few_channels(const ConvProblem& q, const DeviceLimits& limits) {
  FewChannelsPlan p;
  const auto refuse = refuser(p);
  if (q.is_empty()) return refuse(kEmptyProblem);
  if (!limits.has_wgmma) return refuse("wgmma needs compute capability 9.0 and code built for sm_90a");
  if (q.transposed) return refuse("a transposed convolution");
  if (q.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  p.math = conv_math(q);
  const bool lse = q.epilogue == ConvEpilogue::kResidualLse;
  const bool store = q.epilogue == ConvEpilogue::kStore;
  if (!lse && !store && q.epilogue != ConvEpilogue::kStats) return refuse("this epilogue stores and reduces");
  if (store && !q.planar && q.c_in > 8) return refuse("stores channels_last from at most 8 channels");
  if (store && p.math == ConvMath::kTf32x3) return refuse("wgmma's sums are not exact enough without TF32");
  int64_t taps = 1;
  for (int i = 0; i < 3; ++i) {
    const int64_t limit = int64_t(1) << 30;
    if (q.in[i] > limit || q.out[i] > limit || q.kernel[i] > 64 || q.padding[i] > limit || q.dilation[i] > 1024 ||
        q.stride[i] > 64) {
      return refuse("a size, kernel, stride, padding or dilation is too large");
    }
    p.kernel[i] = static_cast<int>(q.kernel[i]);
    p.step[i] = static_cast<int>(q.stride[i]);
    p.dilation[i] = static_cast<int>(q.dilation[i]);
    p.origin[i] = -static_cast<int>(q.padding[i]);
    taps *= q.kernel[i];
  }
  const int64_t c_in = q.c_in / q.groups, c_out = q.c_out / q.groups;
  if (lse && q.groups != 1) return refuse("logsumexp over channels needs groups = 1");
  if (lse && c_out > 128) return refuse("logsumexp over channels needs at most 128 output channels");
  // Statistics take three registers for every four channels on top of the products: 64 channels are the most.
  p.columns = c_out <= 24 ? 24 : c_out <= 32 ? 32 : c_out <= 64 || !lse ? 64 : 128;
  if ((c_out + p.columns - 1) / p.columns > 65535 || q.groups > 65535) {
    return refuse("output channels or conv groups exceed the launch grid");
  }
  p.n_tiles = static_cast<int>((c_out + p.columns - 1) / p.columns);

  // Two fp16 terms of each operand have the digits of two of TF32, and half the products.
  const bool columns64 = !store && c_out > 32 && !(lse && c_out > 64);
  const bool split_rows =
      columns64 && p.math == ConvMath::kTf32x3 && p.step[2] == 1 && (c_in + 7) / 8 * taps <= 2 * kChannelsSteps;
  if (split_rows) p.math = ConvMath::kFp16x3;
  // wgmma truncates where it adds to its accumulator. Statistics bear the products of a batch of K steps; gradients of
  // logsumexp, which are exponentials of what comes out, showed twenty times PyTorch's error with those of 3xTF32.
  if (lse && p.math == ConvMath::kTf32x3) return refuse("wgmma's sums are not exact enough for logsumexp without TF32");

  if (columns64 && p.math != ConvMath::kFp16x3 && p.math != ConvMath::kTf32x3) {
    FewChannelsPlan positions = p;
    if (plan_detail::plan_positions(&positions, q, limits, c_in, lse)) return positions;
  }
  const int per_word = conv_channels_per_word(p.math);
  const int64_t words = (c_in + per_word - 1) / per_word;
  if (words * taps > 4096) return refuse("the weights do not fit in shared memory");
  p.words = static_cast<int>(words);
  // With many columns, 64 channels as rows need neither fragments of the input nor its statistics in registers.
  const int64_t chunks = (words + 3) / 4;
  p.by_channels = split_rows;
  // With few columns, loading A costs more than multiplying: three kernel rows then share one load, each adding to the
  // accumulators of its own output row. The weights lie there three times, once for each turn of the accumulators.
  if (p.by_channels) p.words = static_cast<int>(chunks * 4);
  const bool window = p.columns <= 32 && !lse && !store && p.step[2] == 1 && p.kernel[1] == kWindowRows &&
                      p.step[1] == 1 && p.dilation[1] == 1;
  FewChannelsPlan gathered = p;
  const bool can_gather = window && plan_detail::plan_window(&gathered, q, limits, c_in);
  p.window = window && words * taps <= 256 / conv_split_factor(p.math) ? kWindowRows : 1;
  p.chunked = p.window == 1 && p.words % 4 == 0;
  p.k_words = static_cast<int>(p.words * taps / p.window);
  p.k_steps = (p.k_words + 7) / 8;
  const auto padded = [&](int batch) { return (p.k_steps + batch - 1) / batch * batch; };
  p.large_batch =
      few_channels_has_large_batch(p.math, p.columns) &&
      padded(few_channels_batch(p.math, p.window, true)) <= padded(few_channels_batch(p.math, p.window, false));
  p.batch = few_channels_batch(p.math, p.window, p.large_batch);
  p.k_steps = padded(p.batch);
  p.producers = few_channels_producers(p.math, lse);
  p.consumers = p.by_channels ? kChannelsConsumers : few_channels_consumers(p.math, p.columns, p.window, lse);
  p.zero_plane = p.k_words != p.k_steps * 8 && p.math != ConvMath::kFp16x3;
  p.taps_fast = p.words < 4;
  const auto full_width = [&](int strip) { return plan_detail::whole_strips(q.out[2], strip, 4096); };
  if (p.by_channels) p.strip = full_width(32) * 10 < full_width(64) * 9 ? 32 : 64;
  plan_detail::BestTile best{q, limits};
  plan_detail::for_each_tile(full_width(p.strip), p.strip, q.out[1], [&](int w, int rows) {
    for (int segments : {1, 2, 3, 6}) {
      if (segments > 1 && (p.by_channels || (segments - 1) * rows >= q.out[1])) break;
      for (int d : {1, 2, 3, 4, 6}) {
        if (d > q.out[0]) break;
        for (p.stages = kFewChannelsStages; p.stages >= 2; --p.stages) {
          // A product takes one row where channels are rows.
          const int strip_rows = p.by_channels ? 1 : rows, parts = p.by_channels ? rows : segments;
          if (!plan_detail::few_channels_tile(&p, q, limits, d, strip_rows, parts, w)) continue;
          best.offer(p, plan_detail::few_channels_cost(p, lse));
        }
      }
    }
  });
  if (!best.is_there && can_gather) return gathered;
  if (!best.is_there) return refuse("a tile with its halo and weights does not fit in shared memory");
  p = best.plan;
  if (p.by_channels) plan_detail::few_channels_chunk_pairs(&p);

  // Measured on an H200: the estimate for gathered chunks was 0.85 of what it took, the other one two thirds; where x
  // is channels_last and read value by value, gathering took a third more, if products are not what takes the time.
  const bool read_slowly = !q.planar && gathered.math != ConvMath::kFp16x3;
  if (can_gather && (!best.fits || gathered.cycles <= (read_slowly ? 1.0 : 1.35) * p.cycles)) return gathered;
  return best.fits ? p : refuse("more than 2^31 tiles");
}

}  // namespace kgopt
