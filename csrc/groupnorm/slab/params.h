// What the kernels for narrow channels_last groups are told.
#pragma once

#include "groupnorm/small/params.h"

namespace kgopt {

inline constexpr int kSlabThreads = 512;

// channels_last with groups so narrow that a team would fetch whole sectors for a few bytes: a block takes some groups
// of a sample side by side. Thread t has column t % columns of rows t / columns + k * walkers.
struct SlabShares {
  uint32_t columns = 32;  // 16 or 32, of which groups * channels are used
  uint32_t groups = 1;    // of a slab; a sample's last slab may have fewer
  uint32_t channels = 1;  // of a group
  uint32_t per_sample = 1;
  uint32_t walkers = 1;
  uint32_t c = 1, g = 1, s = 1;
  SmallDivisor by_per_sample, by_channels;
};

struct GroupNormSlabFwdParams : GroupNormFwdArgs {
  SlabShares shares;
};

struct GroupNormSlabBwdParams : GroupNormBwdArgs {
  SlabShares shares;
  float* channel_sums = nullptr;  // [N, C, 2]
};

}  // namespace kgopt
