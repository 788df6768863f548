// Host-side planning of the convolution by rows with a norm in front. Plain arithmetic.
#pragma once

#include "conv3d_rows_plan.h"

namespace kgopt {

inline constexpr int kRowsPrologueThreads = 384;
inline constexpr int kRowsNormalizers = 3;      // warps
inline constexpr int kRowsPrologueStages = 4;   // of x, at most
inline constexpr int kRowsProloguePieces = 12;  // of a stage, at most

struct RowsProloguePlan {
  RowsPlan rows;
  int piece_rows = 1;  // rows of a piece of a stage of x, which has a barrier of its own
};

// The plan of the plain convolution, with room for the pieces' barriers.
inline RowsProloguePlan plan_rows_prologue(const ConvProblem& problem, const DeviceLimits& limits) {
  constexpr int kBarriers = kRowsPrologueStages * kRowsProloguePieces * 8;
  DeviceLimits less = limits;
  less.smem_per_block -= kBarriers;
  RowsProloguePlan p;
  p.rows = plan_rows(problem, less);
  if (!p.rows.refusal && p.rows.parts == 2) p.rows.refusal = "fp32 accuracy reads a copy of x";
  if (p.rows.refusal) return p;
  p.rows.smem_bytes += kBarriers;
  p.piece_rows = (p.rows.stage_rows + kRowsProloguePieces - 1) / kRowsProloguePieces;
  return p;
}

// Whether it is expected to be faster than a pass that normalizes x and the plain convolution. Three warps normalize
// a stage beside the products of the one before; what takes them longer than the products, the products wait for. An
// instruction takes such a warp some 7 cycles, since the products hold the registers. Cycles fitted on an H200, in bf16
// and TF32; where the normalization takes half as long again, as with SiLU, or channel tiles repeat it, the pass wins.
inline bool rows_prologue_pays(const ConvProblem& problem, const RowsProloguePlan& plan, Chain act) {
  const RowsPlan& p = plan.rows;
  const bool half = dtype_size(problem.dtype) == 2;
  const double vector = act == Chain::kSilu ? 155 : (half ? 112 : 96) * (p.row_bytes == 64 ? 0.76 : 1);
  const int64_t part = (problem.in[2] + 31) / 32 * 16;            // positions of half a row
  const double vectors = double(part) * (p.row_bytes / 16) / 32;  // of a lane
  const double stage = p.stage_rows * 2.0 / kRowsNormalizers * (400 + vectors * vector);
  const double products = double(p.taps[1]) * p.taps[2] * (p.row_bytes / 32) * p.columns;
  const double rounds = double((p.tiles + p.blocks - 1) / std::max(p.blocks, 1));
  // The plain kernel's epilogue takes a tile that much less than the one here, which asks at every store.
  const double epilogue = half ? 3200 : 700;
  const double exposed = rounds * (p.taps[0] * p.chunks * std::max(stage - products, 300.0) + epilogue) / 1755;
  const double x_bytes = double(problem.n) * problem.c_in * problem.in[0] * problem.in[1] * problem.in[2] *
                         static_cast<double>(dtype_size(problem.dtype));
  return exposed < 0.85 * (5 + 2 * x_bytes / 3.8e6);
}

}  // namespace kgopt
