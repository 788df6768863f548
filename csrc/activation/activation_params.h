#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

// y = act(x), or with dy: dx = dy * act'(x). All of one layout, dense.
struct ActivationParams {
  const void* x = nullptr;
  const void* dy = nullptr;  // null in forward
  void* y = nullptr;         // y or dx; may be x
  int64_t numel = 0;
  ActChain act;
  Dtype dtype = Dtype::kFloat32;
};

}  // namespace kgopt
