// What the GroupNorm forward that reads x once is told (groupnorm/tiles/tiles.h).
#pragma once

#include "groupnorm/tiles/tiles.h"

namespace kgopt {

struct GroupNormTilesFwdParams : GroupNormFwdArgs {
  GroupTiles shares;
  uint64_t* words = nullptr;  // (groupnorm/shared/words.cuh) [groups][parts] mean and sum of squared deviations; zero
                              // at launch or cleared
};

}  // namespace kgopt
