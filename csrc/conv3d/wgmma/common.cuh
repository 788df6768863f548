// What the kernels of conv3d/wgmma/tap_columns/kernel.cuh, conv3d/wgmma/position_rows/kernel.cuh and
// conv3d/wgmma/transposed_norm/kernel.cuh share: implicit GEMMs on wgmma whose operands come through rings of stages in
// shared memory.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

inline constexpr int kWgmmaThreads = (kWgmmaConsumers + 1) * 128;

template <ConvMath kMath>
struct WgmmaTypes {
  using Element = float;
  static constexpr WgmmaType kWgmma = WgmmaType::kTf32;
};
template <>
struct WgmmaTypes<ConvMath::kBf16> {
  using Element = __nv_bfloat16;
  static constexpr WgmmaType kWgmma = WgmmaType::kBf16;
};
template <>
struct WgmmaTypes<ConvMath::kFp16> {
  using Element = __half;
  static constexpr WgmmaType kWgmma = WgmmaType::kFp16;
};

// Index of a stage in a ring and the parity of its barriers.
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A weight image into its stage, as soon as that is free.
__device__ __forceinline__ void load_image(char* stages, const char* image, int bytes, uint64_t* full, uint64_t* empty,
                                           const StageCursor& s, uint64_t policy) {
  barrier_wait(empty + s.stage, s.parity ^ 1);
  barrier_expect_bytes(full + s.stage, bytes);
  bulk_load(stages + s.stage * bytes, image, bytes, full + s.stage, policy);
}
#endif

}  // namespace kgopt
