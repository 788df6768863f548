// What the gradients for few channels share on the host: which convolutions they take, and how their blocks copy rows
// into shared memory. Plain numbers.
#pragma once

#include <cstdint>

#include "conv3d/implicit_gemm/plan.h"

namespace kgopt {

// Why neither gradient's kernel can run it; null where both may.
inline const char* few_gradient_refusal(const ConvProblem& q, const DeviceLimits& limits) {
  if (q.is_empty()) return kEmptyProblem;
  if (q.transposed) return "a transposed convolution";
  if (q.groups != 1) return "a grouped convolution";
  if (!limits.has_wgmma) return "its code is built for Hopper, where it was measured";
  if (q.dtype == Dtype::kFloat64) return "float64 has no tensor-core path here";
  for (int i = 0; i < 3; ++i) {
    const int64_t limit = int64_t(1) << 30;
    if (q.in[i] > limit || q.out[i] > limit || q.kernel[i] > 64 || q.padding[i] > limit || q.dilation[i] > 1024 ||
        q.stride[i] > 64) {
      return "a size, kernel, stride, padding or dilation is too large";
    }
  }
  return nullptr;
}

// Elements of a row of a gradient that one kernel makes for the other: zeros fill up what 16 bytes do not divide, so
// that rows are copied in whole pieces.
inline int64_t made_row_elements(int64_t width, int size) { return (width * size + 15) / 16 * 16 / size; }

inline constexpr int kFewCopyBatch = 4;  // rows that a thread has under way together

struct FewCopy {
  int piece = 4;        // bytes of a copy: 4, 8 or 16
  int pieces = 1;       // of a row
  int across_log2 = 0;  // threads side by side along a row
  int rows = 1;         // of a tile
  int slots = 1;        // the same in whole batches of all threads
};

// Of rows of memory of `row_bytes` each, `bytes` in a tile's row.
inline FewCopy few_copy(int64_t row_bytes, int bytes, int rows, int threads) {
  FewCopy c;
  c.piece = 16;
  while (row_bytes % c.piece != 0) c.piece /= 2;
  c.pieces = bytes / c.piece;
  while ((1 << c.across_log2) < c.pieces && (1 << c.across_log2) < threads) ++c.across_log2;
  const int batch = (threads >> c.across_log2) * kFewCopyBatch;
  c.rows = rows;
  c.slots = (rows + batch - 1) / batch * batch;
  return c;
}

}  // namespace kgopt
