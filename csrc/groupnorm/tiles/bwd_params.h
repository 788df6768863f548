// What the GroupNorm backward that reads x and dy once is told (groupnorm/tiles/tiles.h). A tile is a part of x and the
// same part of dy.
#pragma once

#include "groupnorm/tiles/tiles.h"

namespace kgopt {

struct GroupNormTilesBwdParams : GroupNormBwdArgs {
  GroupTiles shares;
  uint64_t* words =
      nullptr;  // (groupnorm/shared/words.cuh) [groups][parts] the group's two sums; zero at launch or cleared
  float* tile_sums = nullptr;  // [tiles][2 channels][2]: sum of dz and of dz * (u - mean)
  void* dweight = nullptr;     // [C]
  void* dbias = nullptr;       // [C]
  Dtype gradient_dtype = Dtype::kFloat32;
};

}  // namespace kgopt
