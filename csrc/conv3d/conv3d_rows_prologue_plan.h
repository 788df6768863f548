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

inline bool rows_prologue_pays(const ConvProblem&, const RowsProloguePlan&, Chain) { return true; }

}  // namespace kgopt
