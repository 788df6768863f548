// What the GroupNorm forward that reads x once is told (group_norm_tiles.h).
#pragma once

#include "group_norm_tiles.h"

namespace kgopt {

struct GroupNormFwdParams : GroupNormFwdArgs {
  GroupTiles shares;
  uint64_t* words =
      nullptr;  // (words.cuh) [groups][parts] mean and sum of squared deviations; zero at launch or cleared
};

}  // namespace kgopt
