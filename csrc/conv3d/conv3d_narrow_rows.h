// How blocks of the gradients for few channels copy rows into shared memory. Plain numbers, computed on the host.
#pragma once

#include <cstdint>

#include "conv3d_params.h"

namespace kgopt {

inline constexpr int kNarrowCopyBatch = 4;  // rows that a thread has under way together

struct NarrowCopy {
  int piece = 4;        // bytes of a copy: 4, 8 or 16
  int pieces = 1;       // of a row
  int across_log2 = 0;  // threads side by side along a row
  int rows = 1;         // of a tile
  int slots = 1;        // the same in whole batches of all threads
};

// Of rows of memory of `row_bytes` each, `bytes` in a tile's row.
inline NarrowCopy narrow_copy(int64_t row_bytes, int bytes, int rows, int threads) {
  NarrowCopy c;
  c.piece = 16;
  while (row_bytes % c.piece != 0) c.piece /= 2;
  c.pieces = bytes / c.piece;
  while ((1 << c.across_log2) < c.pieces && (1 << c.across_log2) < threads) ++c.across_log2;
  const int batch = (threads >> c.across_log2) * kNarrowCopyBatch;
  c.rows = rows;
  c.slots = (rows + batch - 1) / batch * batch;
  return c;
}

}  // namespace kgopt
