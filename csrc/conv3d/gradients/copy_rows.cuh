// Copies rows of contiguous tensors into shared memory, those outside of the tensor as zeros: the loading side of the
// gradients for few channels.
#pragma once

#include <cuda_runtime.h>

#include "common/device/mma.cuh"
#include "conv3d/gradients/few_channels.h"

namespace kgopt {

// A row of the tensor that each tile has in shared memory. One load of 16 bytes.
struct alignas(16) CopiedRow {
  uint32_t words;  // of 4 bytes, from the tile's origin
  int place;       // bytes, in a stage
  int d, h;        // from the tile's origin
};

// Where a tile lies in its tensor, and what of it there is.
struct CopyOrigin {
  int d, h, w;
  int extent[2];   // planes and rows of the tile
  int size[3];     // of the tensor
  int valid_rows;  // the others are zeros
};

// Fills the table that the copies walk over; at(i) is row i < copy.rows. Threads read whole batches of it.
template <typename At>
__device__ __forceinline__ void list_few_rows(const FewCopy& copy, CopiedRow* rows, int threads, At at) {
#pragma unroll 1
  for (int i = threadIdx.x; i < copy.slots; i += threads) {
    rows[i] = i < copy.rows ? at(i) : CopiedRow{0, 0, 1 << 29, 0};
  }
}

// kInside: all rows lie in the tensor.
template <int kPiece, int kThreads, bool kInside, typename Element>
__device__ __forceinline__ void copy_few_pieces(const FewCopy& copy, char* stage, const Element* from,
                                                const CopiedRow* rows, const CopyOrigin& origin) {
  constexpr int kElements = kPiece / static_cast<int>(sizeof(Element));
  const int step = kThreads >> copy.across_log2, first = threadIdx.x >> copy.across_log2;
  const unsigned depth = origin.size[0], height = origin.size[1];
  for (int piece = threadIdx.x & ((1 << copy.across_log2) - 1); piece < copy.pieces; piece += 1 << copy.across_log2) {
    const bool inside_w = unsigned(origin.w + piece * kElements) < unsigned(origin.size[2]);
    const char* source = reinterpret_cast<const char*>(from + piece * kElements);
    asm("" : "+l"(source));  // as one address: else its parts are added for every row
    char* const to = stage + piece * kPiece;
    const int valid_rows = inside_w ? origin.valid_rows : 0;
    const CopiedRow* at = rows + first;
    for (int i = first; i < copy.slots; i += step * kFewCopyBatch) {
      CopiedRow row[kFewCopyBatch];
#pragma unroll
      for (int j = 0; j < kFewCopyBatch; ++j, at += step) row[j] = *at;
#pragma unroll
      for (int j = 0; j < kFewCopyBatch; ++j) {
        bool inside = inside_w;
        if constexpr (!kInside) {
          inside = (i + j * step < valid_rows) & (unsigned(origin.d + row[j].d) < depth) &
                   (unsigned(origin.h + row[j].h) < height);
        }
        if (i + j * step < copy.rows) {
          cp_async<kPiece>(to + row[j].place, source + uint64_t(row[j].words) * 4, inside);
        }
      }
    }
  }
}
template <int kPiece, int kThreads, typename Element>
__device__ __forceinline__ void copy_few_pieces(const FewCopy& copy, char* stage, const Element* from,
                                                const CopiedRow* rows, const CopyOrigin& origin) {
  const bool inside = origin.d >= 0 && origin.h >= 0 && origin.d + origin.extent[0] <= origin.size[0] &&
                      origin.h + origin.extent[1] <= origin.size[1] && origin.valid_rows >= copy.rows;
  if (inside) {
    copy_few_pieces<kPiece, kThreads, true>(copy, stage, from, rows, origin);
  } else {
    copy_few_pieces<kPiece, kThreads, false>(copy, stage, from, rows, origin);
  }
}

// By all threads of the block.
template <int kThreads, typename Element>
__device__ __forceinline__ void copy_few_rows(const FewCopy& copy, char* stage, const Element* from,
                                              const CopiedRow* rows, const CopyOrigin& origin) {
  if (copy.piece == 16) {
    copy_few_pieces<16, kThreads>(copy, stage, from, rows, origin);
  } else if (copy.piece == 8) {
    copy_few_pieces<8, kThreads>(copy, stage, from, rows, origin);
  } else {
    copy_few_pieces<4, kThreads>(copy, stage, from, rows, origin);
  }
}

// The other way: the rows of a tile that the tensor has. By all threads of the block.
template <int kThreads, typename Piece>
__device__ __forceinline__ void store_few_pieces(const FewCopy& copy, const char* tile, char* to, const CopiedRow* rows,
                                                 const CopyOrigin& origin, int size) {
  const int step = kThreads >> copy.across_log2, first = threadIdx.x >> copy.across_log2;
  const int last = min(copy.rows, origin.valid_rows), row_bytes = (origin.size[2] - origin.w) * size;
  for (int piece = threadIdx.x & ((1 << copy.across_log2) - 1); piece < copy.pieces; piece += 1 << copy.across_log2) {
    if (piece * int(sizeof(Piece)) >= row_bytes) break;
#pragma unroll 4
    for (int i = first; i < last; i += step) {
      const CopiedRow row = rows[i];
      if (origin.d + row.d >= origin.size[0] || origin.h + row.h >= origin.size[1]) continue;
      *reinterpret_cast<Piece*>(to + uint64_t(row.words) * 4 + piece * sizeof(Piece)) =
          *reinterpret_cast<const Piece*>(tile + row.place + piece * sizeof(Piece));
    }
  }
}
template <int kThreads, typename Element>
__device__ __forceinline__ void store_few_rows(const FewCopy& copy, const char* tile, Element* to,
                                               const CopiedRow* rows, const CopyOrigin& origin) {
  char* const bytes = reinterpret_cast<char*>(to);
  if (copy.piece == 16) {
    store_few_pieces<kThreads, uint4>(copy, tile, bytes, rows, origin, sizeof(Element));
  } else if (copy.piece == 8) {
    store_few_pieces<kThreads, uint2>(copy, tile, bytes, rows, origin, sizeof(Element));
  } else {
    store_few_pieces<kThreads, uint32_t>(copy, tile, bytes, rows, origin, sizeof(Element));
  }
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kgopt
