// What the kernels of the weight gradient are told. Sizes, strides and offsets are in elements; dims are ordered depth,
// height, width. The gradient is dw[a][b][tap] = sum over positions p of still[p][a] * moved[p * stride + tap -
// padding][b]: of a regular convolution `still` is dy and `moved` is x, of a transposed one they change places.
#pragma once

#include <cstdint>

#include "conv3d/implicit_gemm/params.h"

namespace kgopt {

inline constexpr int kWgradChannels = 32;  // of either tensor in a block
inline constexpr int kWgradGroups = 3;     // groups of computing warps
inline constexpr int kWgradWarps = 4;      // of a group: 8 channels of `moved` each
inline constexpr int kWgradMaxStages = 8;
inline constexpr int kWgradFewColumns = 16;  // taps of the width times channels of `moved` that are columns together

// The launch plan: plain numbers, computed on the host.
struct WgradPlan {
  const char* refusal = nullptr;  // why the kernel cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  int taps[3] = {1, 1, 1};
  int padding[3] = {0, 0, 0};
  int stride = 1, depth_stride = 1;  // of height and width; of depth
  int few = 0;                 // channels of `moved` where they are few: its rows are read as one run of numbers each
  int rows = 8;                // positions of a tile along the height
  int width = 16;              // and along the width
  int row_numbers = 0;         // elements of a row of `moved` that are loaded, with few channels
  int row_skip = 0;            // of them before the tile's first: copies must begin at multiples of 16 bytes
  int pitch = 0;               // bytes from one row of `moved` to the next in shared memory
  int back = 0;                // planes of `still` that are kept behind the newest
  bool alternate = false;      // one tap along the depth: groups take planes in turn, else a tap each
  int b_blocks = kWgradWarps;  // of 8 channels of `moved` that warps of a group have; fewer where it has 16 or 8
  int turns = 1;   // warps that take planes in turn: those of a group that share channels, with `alternate` groups
  int stages = 2;  // planes of `moved` in shared memory; of `still`, stages + back
  int tiles[2] = {1, 1};         // of a plane along height and width
  int a_tiles = 1, b_tiles = 1;  // of kWgradChannels
  int depth_tiles = 1;           // of kWgradGroups taps
  int sm_count = 1;
  int splits = 1;          // blocks that share the positions of a tile of dw
  int slots = 1;           // partial sums of an element of dw: one for each split and turn
  int64_t steps = 0;       // planes of all tiles and samples
  int64_t first_step = 0;  // of those, where only some are walked through
  int smem_bytes = 0;
  int64_t partial_floats = 0;
};

struct alignas(64) WgradParams {
  // Tensor maps [N][D][H][W][C]. At stride 2 the maps of `moved` (a box for each run) have pairs of columns as
  // positions.
  uint64_t still_map[16], moved_map[16], second_map[16];
  float* partials;  // [depth tile][a tile][b tile][slot][tap][a][b]; few: [...][tap of depth, height][a][column]
  int still[3], moved[3];
  int moved_stride_w;
  WgradPlan plan;
};

// fp32 accuracy from fp16 operands: each tensor is a sum of two terms (layout/layout.h), and the products of the large
// terms with all others are added. Tensor cores cut sums off instead of rounding them, so the largest product leaves
// many partial sums, each of few positions, which are added in fp32. A few samples are split at a time, for the memory
// of their terms.
struct SplitWgradPlan {
  const char* refusal = nullptr;
  int64_t samples = 1;  // at a time
};

struct WgradSumParams {
  const float* partials;
  void* dw;
  int64_t stride_a, stride_b, stride_k[3];
  int a, b;  // channels
  Dtype dtype;
  WgradPlan plan;
  bool adds = false;                                // to what is there, which is float32
  const uint32_t* largest[2] = {nullptr, nullptr};  // by which run_split_half scaled the operands; null: not at all
  int shift = 0;                                    // and by this power of two more
  const double* inverse[2] = {nullptr, nullptr};    // by which to multiply a and b, of float32; null: not at all
};

}  // namespace kgopt
