// A copy of x with its outermost positions repeated around it.
#include <type_traits>

#include "common/device/dtype.cuh"
#include "common/host/launch.h"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPart = 4 * 32;  // words of a row that a warp copies

// All of it in words: as many bytes as a position's channels divide into, at most 16.
template <typename Word>
struct PadArgs {
  const Word* x;
  Word* y;
  int64_t rows;       // of y
  int parts;          // of a row
  int c;              // words of a position
  int in[3], out[3];  // depth, height, width
  int before[3];
};

// A warp copies a part of a row of y; which row of x that is, is found once for all of it.
template <typename Word>
__global__ void __launch_bounds__(kThreads) pad_replicate_kernel(const __grid_constant__ PadArgs<Word> a) {
  const int64_t part = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t row = part / a.parts;
  if (row >= a.rows) return;
  const int64_t plane = row / a.out[1];
  const int64_t sample = plane / a.out[0];
  const int height = min(max(static_cast<int>(row - plane * a.out[1]) - a.before[1], 0), a.in[1] - 1);
  const int depth = min(max(static_cast<int>(plane - sample * a.out[0]) - a.before[0], 0), a.in[0] - 1);
  const Word* const from = a.x + ((sample * a.in[0] + depth) * a.in[1] + height) * (int64_t(a.in[2]) * a.c);
  Word* const to = a.y + row * (int64_t(a.out[2]) * a.c);
  const int inside = a.in[2] * a.c, left = a.before[2] * a.c, total = a.out[2] * a.c;
  const int first = static_cast<int>(part - row * a.parts) * kPart + threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kPart; k += 32) {
    const int i = first + k;
    if (i >= total) break;
    int at = i - left;
    if (at < 0) {
      at = i % a.c;
    } else if (at >= inside) {
      at = inside - a.c + (at - inside) % a.c;
    }
    to[i] = __ldg(from + at);
  }
}

template <typename Word>
Status launch(const PadReplicateParams& p, int64_t words, cudaStream_t stream) {
  const char* const name = "pad_replicate_kernel";
  PadArgs<Word> a{};
  a.x = static_cast<const Word*>(p.x);
  a.y = static_cast<Word*>(p.y);
  a.c = static_cast<int>(words);
  for (int i = 0; i < 3; ++i) {
    if (p.out[i] * words >= int64_t(1) << 30) return Status::Unsupported(name, "a size of the result is too large");
    a.in[i] = static_cast<int>(p.in[i]);
    a.out[i] = static_cast<int>(p.out[i]);
    a.before[i] = static_cast<int>(p.before[i]);
  }
  a.rows = p.n * p.out[0] * p.out[1];
  a.parts = (a.out[2] * a.c + kPart - 1) / kPart;
  const int64_t blocks = (a.rows * a.parts + kWarps - 1) / kWarps;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "the result has too many elements for one launch");
  return launch_kernel<&pad_replicate_kernel<Word>>(name, a, static_cast<unsigned>(blocks), kThreads, 0, stream);
}

}  // namespace

Status run_pad_replicate(const PadReplicateParams& p, cudaStream_t stream) {
  if (p.n * p.c * p.out[0] * p.out[1] * p.out[2] == 0) return Status::Ok();
  const int64_t bytes = p.c * static_cast<int64_t>(dtype_size(p.dtype));
  const uint64_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.y);
  const auto fits = [&](int size) { return bytes % size == 0 && addresses % size == 0; };
  if (fits(16)) return launch<uint4>(p, bytes / 16, stream);
  if (fits(8)) return launch<uint2>(p, bytes / 8, stream);
  if (fits(4)) return launch<uint32_t>(p, bytes / 4, stream);
  return launch<uint16_t>(p, bytes / 2, stream);
}

}  // namespace kgopt
