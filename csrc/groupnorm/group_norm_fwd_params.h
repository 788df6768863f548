// What the GroupNorm forward that reads x once is told (group_norm_tiles.h).
#pragma once

#include "group_norm_tiles.h"

namespace kgopt {

struct GroupNormFwdParams : GroupTiles {
  const void* x = nullptr;
  void* y = nullptr;             // may be x
  const void* weight = nullptr;  // [C] or null (ones)
  const void* bias = nullptr;    // [C] or null (zeros)
  Dtype affine_dtype = Dtype::kFloat32;
  ActChain pre_act, act;
  bool add_input = false;
  float eps = 1e-5f;
  float* mean = nullptr;      // [N, G]
  float* rstd = nullptr;      // [N, G]
  uint64_t* words = nullptr;  // (words.cuh) [groups][parts] mean and sum of squared deviations; zero at launch
};

}  // namespace kgopt
