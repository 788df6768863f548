// Copies rows of contiguous tensors into shared memory, those outside of the tensor as zeros: the loading side of the
// gradients for few channels, sm_80 and later.
#pragma once

#include <cuda_runtime.h>

#include "../common/mma.cuh"

namespace kgopt {

// A row of the tensor that each tile has in shared memory.
struct alignas(16) NarrowRow {
  int64_t offset;  // elements, from the tile's origin
  int place;       // bytes, in a stage
  int position;    // depth << 16 | height, from the tile's origin
};

// Where a tile lies in its tensor, and what of it there is.
struct NarrowOrigin {
  int d, h, w;
  int size[3];     // of the tensor
  int valid_rows;  // the others are zeros
};

// Every row as pieces of kPiece bytes, by all threads of the block; the tensor has a whole number of them.
template <int kPiece, int kThreads, typename Element>
__device__ __forceinline__ void copy_narrow_rows(char* stage, const Element* from, const Element* anywhere,
                                                 const NarrowRow* rows, int row_count, int pieces,
                                                 const NarrowOrigin& origin) {
  constexpr int kElements = kPiece / static_cast<int>(sizeof(Element));
  const int tid = threadIdx.x;
  const int across = min(pieces, kThreads);
  const int rows_at_once = kThreads / across;
  const int first_row = tid / across;
  if (first_row >= rows_at_once) return;
  for (int piece = tid - first_row * across; piece < pieces; piece += across) {
    const bool inside_w = unsigned(origin.w + piece * kElements) < unsigned(origin.size[2]);
    const Element* const source = from + piece * kElements;
    char* const to = stage + piece * kPiece;
#pragma unroll 4
    for (int i = first_row; i < row_count; i += rows_at_once) {
      const NarrowRow row = rows[i];
      const int d = origin.d + (row.position >> 16), h = origin.h + (row.position & 0xffff);
      const bool inside = inside_w && i < origin.valid_rows && unsigned(d) < unsigned(origin.size[0]) &&
                          unsigned(h) < unsigned(origin.size[1]);
      cp_async<kPiece>(to + row.place, inside ? source + row.offset : anywhere, inside);
    }
  }
}
template <int kThreads, typename Element>
__device__ __forceinline__ void copy_narrow_rows(int piece, char* stage, const Element* from, const Element* anywhere,
                                                 const NarrowRow* rows, int row_count, int bytes,
                                                 const NarrowOrigin& origin) {
  if (piece == 16) {
    copy_narrow_rows<16, kThreads>(stage, from, anywhere, rows, row_count, bytes / 16, origin);
  } else if (piece == 8) {
    copy_narrow_rows<8, kThreads>(stage, from, anywhere, rows, row_count, bytes / 8, origin);
  } else {
    copy_narrow_rows<4, kThreads>(stage, from, anywhere, rows, row_count, bytes / 4, origin);
  }
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kgopt
