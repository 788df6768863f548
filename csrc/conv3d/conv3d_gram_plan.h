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
inline bool gram_tile(GramPlan* p, const ConvProblem& q, const DeviceLimits& limits, int rows, int pairs, int slab_rows,
                      int stages) {
  p->tile_rows = rows, p->tile_pairs = pairs;
  p->tiles[0] = (slab_rows + rows - 1) / rows;
  p->tiles[1] = static_cast<int>((q.out[2] / 2 + pairs - 1) / pairs);
  p->rows = rows + 2 + (p->channels == 4 ? kGramBorders : 0);
  const int size = q.dtype == Dtype::kFloat32 ? 4 : 2, piece = 16 / size;  // copies are of pieces of 16 bytes
  p->lead = (piece - p->pad[2] % piece) % piece;
  const int columns = p->lead + 2 * static_cast<int>(std::min<int64_t>(pairs, q.out[2] / 2)) + 2;
  p->vectors = (columns + piece - 1) / piece * piece / 4;
  p->strip_bytes = pairs * 16;
  if (int64_t(p->rows) * p->strips * p->strip_bytes > limits.smem_per_block) return false;
  p->stage_bytes = p->rows * p->strips * p->strip_bytes;
  p->stages = stages;
  auto align = [](int64_t bytes) { return static_cast<int>((bytes + 127) / 128 * 128); };
  p->at_taps = 1024;
  p->at_sums = align(p->at_taps + p->taps * 8);
  p->at_filters = align(p->at_sums + (gram_sum_floats(*p) + gram_border_sum_floats(*p)) * 4);
  p->at_gram = align(p->at_filters + (p->taps << p->column_bits) * 4);
  p->at_ring = align(p->at_gram + gram_floats(*p) * 4);
  // What comes after the products lies where the ring was: C, shares of sums, means, and the borders' products.
  const int64_t ring = int64_t(stages) * p->stage_bytes;
  const int64_t finish =
      int64_t(p->taps) * ((p->taps + 7) / 8 * 8 + 4) * 4 + kGramThreads * 16 + 128 * 12 + p->taps * 12 + 128;
  p->at_border = align(p->at_ring + finish);
  const int64_t after = p->at_border + gram_border_floats(*p) * 4;
  const int main_rows = p->rows - (p->channels == 4 ? kGramBorders : 0);
  const int rows_in = p->tiles[0] == 1 ? std::min(slab_rows, main_rows) : main_rows;
  p->raw_rows = rows_in;
  p->raw_bytes = static_cast<int>(int64_t(rows_in) * p->vectors * 4 * size * q.c_in);
  p->raw_stride = align(p->raw_bytes);
  if (p->vectors * 4 > 256 || rows_in > 256) return false;  // what a tensor copy brings
  p->at_raw = align(p->at_ring + ring);
  const int64_t total = align(std::max(p->at_raw + int64_t(p->raw_slots) * p->raw_stride, after));
  if (total > limits.smem_per_block) return false;
  p->smem_bytes = static_cast<int>(total);
  return true;
}

// Estimated cycles of a block for `outputs` rows, from times on an H200: what comes once, what a stage costs whatever
// it holds, and 12 cycles for a vector of four positions and eight channels.
inline double gram_cost(const GramPlan& p, const ConvProblem& q, int outputs) {
  const int rows = outputs + p.kernel[1] - 1;
  const double stages = double((rows + p.tile_rows - 1) / p.tile_rows) * p.tiles[1] * double(q.out[0]);
  return stages * (1.5 * p.channels * p.raw_rows * p.vectors + 950) + 23000;
}

}  // namespace plan_detail

inline GramPlan plan_gram(const ConvProblem& q, const DeviceLimits& limits) {
  GramPlan p;
  auto refuse = [&](const char* why) {
    p.refusal = why;
    return p;
  };
  if (!limits.has_wgmma) return refuse("wgmma needs compute capability 9.0 and code built for sm_90a");
  if (q.epilogue != ConvEpilogue::kStats) return refuse("only statistics come from a Gram matrix");
  if (q.transposed || q.groups != 1) return refuse("a transposed or grouped convolution");
  if (q.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  if (q.c_in > 8) return refuse("more than 8 input channels");
  if (q.in[2] % (q.dtype == Dtype::kFloat32 ? 4 : 8) != 0) return refuse("rows that are not a multiple of 16 bytes");
  if (q.out[2] % 2 != 0) return refuse("an odd number of outputs in a row");
  if (q.in[0] * q.in[1] * q.in[2] >= int64_t(1) << 31 || q.n > int64_t(1) << 30)
    return refuse("2^31 or more positions");
  for (int i = 0; i < 3; ++i) {
    if (q.stride[i] != 1 || (q.dilation[i] != 1 && q.kernel[i] > 1)) return refuse("a stride or dilation other than 1");
    if (q.kernel[i] > kGramTaps || q.padding[i] > 4096) return refuse("a kernel or padding is too large");
    p.pad[i] = static_cast<int>(q.padding[i]);
    p.kernel[i] = static_cast<int>(q.kernel[i]);
  }
  // In two fp16 terms it took 107 us where the convolution takes 119, and filters of differences cancel too much.
  if (q.dtype == Dtype::kFloat32 && !q.allow_tf32) return refuse("fp32 accuracy");
  // The sums of slabs that some taps do not see are taken apart in shared memory, which is slower than the convolution.
  if (q.kernel[0] > 1 || q.padding[0] > 0) return refuse("taps or padding along the depth");
  p.channels = q.c_in <= 4 ? 4 : 8;
  p.strips = p.channels == 4 ? 2 : 4;
  p.group_rows = 8 / p.strips;
  p.taps = p.kernel[1] * p.kernel[2] * static_cast<int>(q.c_in);
  p.column_bits = q.c_out <= 32 ? 5 : 6;

  const int64_t outputs = q.out[1];
  double best = -1;
  GramPlan chosen;
  const int64_t all_pairs = (q.out[2] / 2 + kGramColumns - 1) / kGramColumns * kGramColumns;
  const int64_t most = std::min<int64_t>(2 * limits.sm_count, 4 * limits.sm_count / std::max<int64_t>(q.n, 1) + 1);
  for (int64_t slices = 1; slices <= std::min(outputs, most); ++slices) {
    const int slice = static_cast<int>((outputs + slices - 1) / slices);
    if ((outputs + slice - 1) / slice != slices) continue;
    const double waves = std::max(1.0, double((q.n * slices + limits.sm_count - 1) / limits.sm_count));
    const int slab_rows = slice + p.kernel[1] - 1;
    int64_t last_pairs = 0;
    for (int64_t pairs : {all_pairs, int64_t(128), int64_t(64), int64_t(32), int64_t(16)}) {
      if (pairs > all_pairs || pairs > 1024 || pairs == last_pairs) continue;
      last_pairs = pairs;
      int last_rows = 0;
      for (int parts : {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 21, 32, 43, 64}) {
        const int rows = ((slab_rows + parts - 1) / parts + p.group_rows - 1) / p.group_rows * p.group_rows;
        if (rows == last_rows) continue;
        last_rows = rows;
        bool fits = false;
        for (int stages = 4; stages > 1 && !fits; --stages) {
          fits = plan_detail::gram_tile(&p, q, limits, rows, static_cast<int>(pairs), slab_rows, stages);
          if (!fits) continue;
          const double cost = waves * plan_detail::gram_cost(p, q, slice);
          if (best < 0 || cost < best) best = cost, p.cycles = cost, p.slices = slices, p.slice = slice, chosen = p;
        }
      }
    }
  }
  if (best < 0) return refuse("its Gram matrix or a tile of its input does not fit");
  p = chosen;
  if (q.n * p.slices > (int64_t(1) << 31) - 1) return refuse("more than 2^31 blocks");
  return refuse("compute-sanitizer's racecheck still reports its last part");
}

}  // namespace kgopt
