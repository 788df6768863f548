// Depthwise convolutions: each output channel reads one input channel. What the kernels are told; sizes, strides and
// offsets are in elements, dims are ordered depth, height, width.
//
// A kernel computes cells. Where outputs are gathered (a convolution, the gradient of a transposed one) a cell is an
// output, and reads kernel neighbours from cell * stride - lead on. Where inputs are scattered (a transposed
// convolution, the gradient of x) at stride 2, a cell is two outputs a dim, which read the same (kernel + 1) / 2
// neighbours by taps of alternate parity. At stride 1 scattering is gathering with flipped taps.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"

namespace kgopt {

inline constexpr int kDepthwiseThreads = 256;  // at most
inline constexpr int kDepthwiseLanes = 16;     // channels of a block, channels_last: one sector of half values

enum class DepthwiseMode : int { kGather1, kGather2, kScatter2 };  // with the stride

// A division by a number that is known ahead: exact while dividend and divisor are below 2^16.
struct DepthwiseDivisor {
  uint32_t divisor = 1, factor = 0;
};

// How a part of some planes lies in shared memory, in floats: [plane][slot of a row][column][lane]. Rows that
// neighbouring threads read at the same time are neighbours, at an odd pitch: they meet different banks.
struct DepthwiseTile {
  int rows = 1, span = 1;  // of a plane
  int slack = 0;           // columns in front of the first one, and behind the last one: pieces of 16 bytes reach there
  int step = 1;            // row r has slot r % alternate * step + r / alternate, `alternate` being the kernel's
  int pitch = 1;           // columns from one slot to the next
  int plane = 1;           // floats of a plane
  int planes = 1;          // channels, where they are planes
  int all_rows = 1;        // of all planes and channels
  DepthwiseDivisor by_rows, by_all_rows, by_span, by_planes;
};

struct DepthwisePlan {
  const char* refusal = nullptr;  // why not, or null
  int phases[3] = {1, 1, 1};      // of a dilated pass: as many passes of each dim, see depthwise_phase
  DepthwiseMode mode = DepthwiseMode::kGather1;
  int kernel = 3;       // height and width; depth, too, in a volume
  bool volume = false;  // the kernel marches along the depth; else each plane is for itself
  int lanes = 1;        // kDepthwiseLanes: channels_last
  bool direct = false;  // threads store to y, whose rows are whole pieces of 16 bytes, all of them aligned
  int threads = 0;
  int rows = 1;           // threads of a tile along the height
  int groups = 1;         // and along the width
  int segments = 1;       // of the depth's cells
  int segment = 1;        // cells of one
  int tiles[2] = {1, 1};  // along height and width
  int channel_blocks = 1;
  int64_t blocks = 0;
  DepthwiseTile in, out;                               // out: contiguous tensors, on the way to memory
  int weight_plane = 0;                                // floats from one channel's weights to the next
  int smem_weights = 0, smem_out = 0, smem_bytes = 0;  // where weights and `out` begin, in floats; of all, in bytes
  double microseconds = 0;                             // predicted
};

struct DepthwiseParams {
  const void* x = nullptr;  // of the outputs' channel 0; of dy where it is a gradient
  int64_t x_stride_n = 0, x_stride_c = 0, x_stride[3] = {};
  void* y = nullptr;
  int64_t y_stride_n = 0, y_stride_c = 0, y_stride[3] = {};
  const void* weight = nullptr;  // of tap 0, or of the last tap with negative strides
  int64_t w_stride_c = 0, w_stride_k[3] = {};
  const void* bias = nullptr;  // dense, of the weight's type, or null
  Dtype dtype = Dtype::kFloat32, weight_dtype = Dtype::kFloat32;
  int x_log2 = 0, y_log2 = 0;  // of the elements that are accessed at once, from every multiple of it on
  int64_t n = 0;
  int channels = 0;  // of y
  int in[3] = {1, 1, 1}, out[3] = {1, 1, 1};
  int cells[3] = {1, 1, 1}, lead[3] = {}, skew[3] = {};  // cell i has outputs i - skew, or 2 i - skew and the next one
  bool early = false;                                    // a phase behind another one, which it may run beside
  DepthwisePlan plan;
};

// dweight[channel][tap] = sum over positions of still[position] * moved[position * stride - padding + tap]: still is dy
// and moved x, or, of a transposed convolution, the other way round.
struct DepthwiseWgradPlan {
  const char* refusal = nullptr;
  int phases[3] = {1, 1, 1};   // each leaves `splits` partial sums
  int kernel = 3, stride = 1;  // height and width
  int lanes = 1;
  int threads = 0;
  int rows = 1, groups = 1;
  int tiles[2] = {1, 1};
  int channel_blocks = 1;
  int taps = 1;                   // along the depth that a block has, each `stride` further; more than one: it marches
  int depth = 1;                  // blocks for all taps of the depth
  int segments = 1, segment = 1;  // parts of the depth of `still`, and planes of one
  int64_t items = 0;              // tiles of all segments and samples
  int splits = 1;                 // blocks that share them
  DepthwiseTile moved, still;
  int smem_still = 0, smem_bytes = 0;
  int64_t weights = 0;         // elements of dweight
  int64_t partial_floats = 0;  // [phases][splits][weights]
  double microseconds = 0;
};

struct DepthwiseWgradParams {
  const void* still = nullptr;
  int64_t still_stride_n = 0, still_stride_c = 0, still_stride[3] = {};
  const void* moved = nullptr;
  int64_t moved_stride_n = 0, moved_stride_c = 0, moved_stride[3] = {};
  void* dw = nullptr;
  int64_t dw_stride_c = 0, dw_stride_k[3] = {};
  float* partials = nullptr;
  Dtype dtype = Dtype::kFloat32, dw_dtype = Dtype::kFloat32;
  int still_log2 = 0, moved_log2 = 0;
  int64_t n = 0;
  int channels = 0;
  int size[3] = {1, 1, 1}, moved_size[3] = {1, 1, 1};  // of still, of moved
  int kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, padding[3] = {};
  bool early = false;
  DepthwiseWgradPlan plan;
};

// Of the elements of 16 bytes.
KGOPT_HD constexpr int depthwise_whole_log2(Dtype dtype) { return dtype == Dtype::kFloat32 ? 2 : 3; }

// Constants of the instances, which plans and kernels share.

// Cells of a thread along the height and the width.
KGOPT_HD constexpr int depthwise_cell_rows(DepthwiseMode mode, bool volume) {
  return volume || mode == DepthwiseMode::kScatter2 ? 1 : mode == DepthwiseMode::kGather1 ? 4 : 2;
}
KGOPT_HD constexpr int depthwise_cell_columns(DepthwiseMode mode, int kernel, bool volume) {
  return mode == DepthwiseMode::kGather1 ? 8 : mode == DepthwiseMode::kScatter2 && volume && kernel > 3 ? 2 : 4;
}
KGOPT_HD constexpr int depthwise_up(DepthwiseMode mode) { return mode == DepthwiseMode::kScatter2 ? 2 : 1; }
KGOPT_HD constexpr int depthwise_stride(DepthwiseMode mode) { return mode == DepthwiseMode::kGather2 ? 2 : 1; }
// Inputs that a cell reads along a dim.
KGOPT_HD constexpr int depthwise_taps(DepthwiseMode mode, int kernel) {
  return mode == DepthwiseMode::kScatter2 ? (kernel + 1) / 2 : kernel;
}
// The tap by which the cell's output `up` reads its input `at`; `kernel` or more where it does not.
KGOPT_HD constexpr int depthwise_tap(DepthwiseMode mode, int kernel, int at, int up) {
  return mode == DepthwiseMode::kScatter2 ? up + 2 * ((kernel - 1) / 2 - at) : at;
}
// Cells of a depth that are not complete at a time.
KGOPT_HD constexpr int depthwise_open_cells(DepthwiseMode mode, int kernel) {
  return (depthwise_taps(mode, kernel) - 1) / depthwise_stride(mode) + 1;
}
// Taps of the depth of a block of volumes' gradients of the weight: as many as its registers have room for.
KGOPT_HD constexpr int depthwise_wgrad_taps(int kernel, int stride) {
  return kernel == 7 ? 1 : kernel == 3 && stride == 2 ? 2 : 3;
}
KGOPT_HD constexpr int depthwise_wgrad_columns(int kernel, int stride, int taps) {
  return stride == 1 && (kernel != 5 || taps == 1) ? 8 : 4;
}
// The first tap of the depth of a block of volumes, whose others are `stride` apart, and how many blocks there are.
KGOPT_HD constexpr int depthwise_wgrad_first_tap(int block, int stride, int taps) {
  return block % stride + block / stride * stride * taps;
}
KGOPT_HD constexpr int depthwise_wgrad_blocks(int kernel, int stride, int taps) {
  return stride * (((kernel - 1) / stride + taps) / taps);
}

}  // namespace kgopt
