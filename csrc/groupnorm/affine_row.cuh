// What run_affine_table and the merges of statistics leave of each (sample, channel) for the passes that follow.
#pragma once

namespace kgopt {

template <typename Acc>
struct alignas(16) AffineRow {
  Acc mean, rstd, weight, bias;
};

}  // namespace kgopt
