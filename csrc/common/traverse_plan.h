// How the walks of traverse.cuh cut a tensor. Plain arithmetic, free of CUDA, so that it can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace kgopt {

inline constexpr int kTraverseThreads = 256;
// Elements of `bytes` each that a thread loads at once. float64 is for reference: no vectors of it.
constexpr int walk_size(int bytes) { return bytes == 8 ? 1 : 16 / bytes; }
inline constexpr int kTraverseUnroll = 4;  // independent 16-byte loads of a thread in flight

// How many rows of c elements fill vectors of `size`.
inline int64_t turns_of(int64_t c, int size) { return size / std::gcd<int64_t>(c, size); }
// n samples of s rows, walked `turns` at a time by vectors of `size`. Where these do not come out even, a sample starts
// inside its first vector and ends inside any, for which small tensors take longer than for elements one by one (H200).
inline constexpr int64_t kUnevenVectors = 32 << 20;  // the fewest elements, times those of a vector
inline bool has_turns(int64_t n, int64_t s, int64_t c, int64_t turns, int size) {
  if (s % turns == 0) return true;
  return n * s * c >= kUnevenVectors / size && s * c < (int64_t(1) << 30) && s >= 4 * turns;
}
inline int64_t rows_of_turns(int64_t s, int64_t c, int64_t turns, int size) {
  return s % turns == 0 ? s / turns : (s * c + size - 1 + c * turns - 1) / (c * turns);
}

// Geometry of a channels_last walk: `lanes` threads along the channel vectors, `walkers` groups of them along
// positions.
struct ColumnGeometry {
  int lanes = 1, walkers = kTraverseThreads;
  int64_t channel_blocks = 1;
};
// Of c channels in vectors of `vec`, which must divide c: of fewer channels than a vector has there is no walk, and the
// geometry is one that nobody may launch.
inline ColumnGeometry column_geometry(int64_t c, int vec) {
  ColumnGeometry g;
  const int64_t vectors = std::max<int64_t>(1, c / vec);
  g.lanes = static_cast<int>(std::min<int64_t>(vectors, kTraverseThreads));
  g.walkers = kTraverseThreads / g.lanes;
  g.channel_blocks = (vectors + g.lanes - 1) / g.lanes;
  return g;
}

// Slices so that about four blocks a multiprocessor run, but none with less than a few loads a thread.
inline void plan_slices(int64_t units, int64_t length, int64_t least, int64_t multiple, int sm_count, int64_t* slices,
                        int64_t* slice_length) {
  const int64_t wanted = (int64_t(sm_count) * 8 + units - 1) / std::max<int64_t>(1, units);
  const int64_t most = std::max<int64_t>(1, length / std::max<int64_t>(1, least));
  const int64_t count = std::max<int64_t>(1, std::min(wanted, most));
  *slice_length = std::max<int64_t>(1, ((length + count - 1) / count + multiple - 1) / multiple * multiple);
  *slices = std::max<int64_t>(1, (length + *slice_length - 1) / *slice_length);
}

// The same along the positions of a channels_last tensor, several of which are walked as one where that fills vectors.
// The sums of a turn lie where those of a slice would.
inline void plan_column_slices(int64_t n, int64_t c, int64_t s, int vec, bool aligned, int sm_count, int64_t* turns,
                               int64_t* slices, int64_t* slice_length) {
  *turns = aligned && has_turns(n, s, c, turns_of(c, vec), vec) ? turns_of(c, vec) : 1;
  const int64_t channels = c * *turns;
  const ColumnGeometry g = column_geometry(channels, channels % vec == 0 ? vec : 1);
  plan_slices(n * g.channel_blocks, rows_of_turns(s, c, *turns, vec), int64_t(g.walkers) * kTraverseUnroll * 2, 1,
              sm_count, slices, slice_length);
  *slices *= *turns;
}

}  // namespace kgopt
