// The two ways through a tensor that the GroupNorm kernels and the activations take: element by element, and reduced
// along the rows. A row is a (sample, channel) pair; what happens at an element is a functor's business, how the memory
// is walked is settled here once, for both layouts:
//   contiguous     [rows][S]: rows lie one after the other, vectors run along a row
//   channels_last  [N][S][C]: a thread owns a vector of neighbouring channels and walks over positions
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "common/status.h"
#include "common/traverse_plan.h"

namespace kgopt {

// What a functor is told of the elements of a vector: one for all, or one each.
template <typename V>
struct SameForAll {
  V& value;
  __device__ __forceinline__ V& operator()(int) const { return value; }
};
template <typename V>
__device__ __forceinline__ SameForAll<V> same(V& value) {
  return {value};
}
template <typename V>
struct OneForEach {
  V* values;
  __device__ __forceinline__ V& operator()(int j) const { return values[j]; }
};
template <typename V, int kSize>
__device__ __forceinline__ OneForEach<V> each(V (&values)[kSize]) {
  return {values};
}

// The first ones have one value, the others another.
template <typename V>
struct OneOfTwo {
  const V &first, &second;
  int firsts;
  __device__ __forceinline__ V operator()(int j) const { return j < firsts ? first : second; }
};

// Elements of a vector of a walk.
template <typename T>
inline constexpr int kWalkSize = walk_size(sizeof(T));

// With fewer blocks, multiprocessors are idle: threads then have fewer vectors each.
inline constexpr int64_t kTraverseFewBlocks = 128;
// Blocks of a reduction along rows of which each waits for itself, more or less.
inline constexpr unsigned kTraverseFewRows = 1024;

// ---------------------------------------------------------------------------------------------------------------------
// Element by element. A functor has: Element, kInputs (1 or 2), Coef, `Coef load(int64_t row)` and
// `void apply(coef, const Acc (&x)[kSize], const Acc (&second)[kSize], Acc (&y)[kSize])`, where coef(j) is the Coef of
// element j. Where no vectors fit, only the functors with kHasScalars are compiled: those that take any chain. A
// functor may have an Input or an Output, types of x or y that are narrower than Element, by which vectors are
// measured.

template <typename F, typename = void>
struct InputOf {
  using Type = typename F::Element;
};
template <typename F>
struct InputOf<F, std::void_t<typename F::Input>> {
  using Type = typename F::Input;
};
template <typename F, typename = void>
struct OutputOf {
  using Type = typename F::Element;
};
template <typename F>
struct OutputOf<F, std::void_t<typename F::Output>> {
  using Type = typename F::Output;
};

// The values of both inputs; of one input, those of x twice.
template <int kInputs, typename X, typename Second, int kSize, typename Acc>
__device__ __forceinline__ void unpack_inputs(const Vec<X, kSize>& x, const Vec<Second, kSize>& second,
                                              Acc (&xs)[kSize], Acc (&seconds)[kSize]) {
  unpack(x, xs);
  if constexpr (kInputs == 2) {
    unpack(second, seconds);
  } else {
    unpack(x, seconds);
  }
}

template <typename F>
struct ElementwiseArgs {
  const typename InputOf<F>::Type* x;
  const typename F::Element* second;  // of x's layout; null with one input
  typename OutputOf<F>::Type* y;
  int64_t n, c, s;
  F f;
  int64_t channels = 0;          // channels_last: c, or where rows of `channels` go several at a time, a divisor of it
  int64_t length = 0;            // channels_last: elements of a sample, where they are no whole rows of c; else 0
  int unroll = kTraverseUnroll;  // rows: vectors of a thread
};

// Blocks run from the tensor's end to its start: the pass before went the other way and left the end in L2.
// A multiprocessor has three of them, or two where chains are walked: fewer have too few loads under way.
template <typename F, int kSize>
__global__ void __launch_bounds__(kTraverseThreads, F::kWalks ? 2 : 3)
    elementwise_rows_kernel(const __grid_constant__ ElementwiseArgs<F> a) {
  using T = typename F::Element;
  using In = typename InputOf<F>::Type;
  using Out = typename OutputOf<F>::Type;
  const int64_t per_block = int64_t(kTraverseThreads) * a.unroll * kSize;
  const int64_t total = a.n * a.c * a.s;
  const int64_t start = int64_t(gridDim.x - 1 - blockIdx.x) * per_block, end = min(start + per_block, total);
  const int64_t row0 = start / a.s;
  const int64_t column0 = start - row0 * a.s;
  const bool narrow = a.s + per_block < (int64_t(1) << 31);

  Vec<In, kSize> x[kTraverseUnroll];
  Vec<T, kSize> second[kTraverseUnroll];
#pragma unroll
  for (int u = 0; u < kTraverseUnroll; ++u) {
    const int64_t at = start + (int64_t(u) * kTraverseThreads + threadIdx.x) * kSize;
    if (at + kSize <= end) {
      x[u] = load_vec<In, kSize>(a.x + at);
      if (F::kInputs == 2) second[u] = load_vec<T, kSize>(a.second + at);
    }
  }
  wait_for_prerequisites();
  const auto row_of = [&](int64_t at, int64_t* column) {
    *column = column0 + (at - start);
    const int64_t rows = narrow ? static_cast<uint32_t>(*column) / static_cast<uint32_t>(a.s) : *column / a.s;
    *column -= rows * a.s;
    return row0 + rows;
  };
  uint32_t split = 0;  // vectors that lie across the ends of rows, or of the tensor
#pragma unroll
  for (int u = 0; u < kTraverseUnroll; ++u) {
    const int64_t at = start + (int64_t(u) * kTraverseThreads + threadIdx.x) * kSize;
    if (at >= end) break;
    int64_t column;
    const int64_t row = row_of(at, &column);
    if (kSize > 1 && (column + kSize > a.s || at + kSize > total)) {
      split |= 1u << u;
      continue;
    }
    auto coef = a.f.load(row);
    acc_t<T> xs[kSize], seconds[kSize], y[kSize];
    unpack_inputs<F::kInputs>(x[u], second[u], xs, seconds);
    a.f.apply(same(coef), xs, seconds, y);
    store_result<Out, kSize>(a.y + at, pack<Out, kSize>(y));
  }
  if constexpr (kSize > 1) {
    // Apart and not unrolled: instructions that are not needed need not be fetched either.
#pragma unroll 1
    for (; split != 0; split &= split - 1) {
      const int u = __ffs(split) - 1;
      const int64_t at = start + (int64_t(u) * kTraverseThreads + threadIdx.x) * kSize;
      const int present = static_cast<int>(min(total - at, int64_t(kSize)));
      int64_t column;
      int64_t row = row_of(at, &column);
      Vec<In, kSize> own;
      Vec<T, kSize> own_second;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        own.v[j] = a.x[min(at + j, total - 1)];
        if (F::kInputs == 2) own_second.v[j] = a.second[min(at + j, total - 1)];
      }
      if (a.s >= kSize) {  // two rows: the coefficients of both are asked for at once
        const auto coef = a.f.load(row), next = a.f.load(min(row + 1, a.n * a.c - 1));
        acc_t<T> xs[kSize], seconds[kSize], y[kSize];
        unpack_inputs<F::kInputs>(own, own_second, xs, seconds);
        a.f.apply(OneOfTwo<const decltype(coef)>{coef, next, static_cast<int>(a.s - column)}, xs, seconds, y);
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (j < present) a.y[at + j] = from_acc<Out>(y[j]);
        }
        continue;
      }
      // A turn for each of the rows: all of the vector is computed with the row's coefficients, and of that the row's
      // part stored.
#pragma unroll 1
      for (int first = 0; first < present; ++row, column = 0) {
        auto coef = a.f.load(row);
        acc_t<T> xs[kSize], seconds[kSize], y[kSize];
        unpack_inputs<F::kInputs>(own, own_second, xs, seconds);
        a.f.apply(same(coef), xs, seconds, y);
        const int last = static_cast<int>(min(int64_t(present), first + a.s - column));
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (j >= first && j < last) a.y[at + j] = from_acc<Out>(y[j]);
        }
        first = last;
      }
    }
  }
}

// channels_last rows of `channels` elements that fill no vector are walked several at a time, as one of `c` channels.
__device__ __forceinline__ int64_t wrapped(int64_t channel, int64_t c, int64_t channels) {
  return c == channels ? channel : static_cast<uint32_t>(channel) % static_cast<uint32_t>(channels);
}
// Where a thread's vectors lie whose rows may be those of several samples (`length` > 0, ElementwiseArgs::length).
struct ColumnEdges {
  int64_t origin;  // where the sample's first row starts
  int offset;      // elements before the sample in it
  int64_t full;    // positions from here on have less than a vector of the sample

  __device__ __forceinline__ ColumnEdges(int64_t n, int64_t s, int64_t c, int64_t length, int64_t channel, int size)
      : origin(n * s * c), offset(0), full(s) {
    if (length == 0) return;
    offset = static_cast<int>(n * length % size);
    origin = n * length - offset;
    const int64_t last = length + offset - size - channel;
    full = last < 0 ? 0 : static_cast<uint32_t>(last) / static_cast<uint32_t>(c) + 1;
  }
  // Whether position 0 has a part of a vector alone.
  __device__ __forceinline__ bool cuts_first(int64_t channel) const { return channel < offset; }
  // What is added to a row's element, modulo `channels`, for its channel.
  __device__ __forceinline__ int64_t before(int64_t channels) const {
    return offset == 0 ? 0 : kMost * channels - offset;
  }
  // The thread's parts of vectors among positions begin to end: calls part(is_own, from, xs, seconds) with the values
  // of a vector at element `from`, those that are the sample's where is_own(j), and zeros.
  template <int kInputs, int kSize, typename X, typename T, typename Part>
  __device__ __forceinline__ void for_parts(const X* x, const T* second, int64_t begin, int64_t end, int walkers,
                                            int walker, int64_t c, int64_t channel, int64_t length, Part part) const {
#pragma unroll 1
    for (int64_t position = cuts_first(channel) ? 0 : full; position <= full; position += max(full, int64_t(1))) {
      const int64_t i = position * c + channel - offset, from = origin + offset + i;  // i may be negative
      if (position < begin || position >= end || static_cast<uint32_t>(position - begin) % walkers != walker ||
          i >= length)
        continue;
      const auto is_own = [&](int j) { return i + j >= 0 && i + j < length; };
      Vec<X, kSize> own{};
      Vec<T, kSize> own_second{};
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (is_own(j)) {
          own.v[j] = x[from + j];
          if (kInputs == 2) own_second.v[j] = second[from + j];
        }
      }
      acc_t<T> xs[kSize], seconds[kSize];
      unpack_inputs<kInputs>(own, own_second, xs, seconds);
      part(is_own, from, xs, seconds);
    }
  }
  static constexpr int kMost = 8;  // elements of a vector
};

// Chains that are walked take registers for two blocks of a multiprocessor, and are faster with three.
template <typename F, int kSize>
__global__ void __launch_bounds__(kTraverseThreads, F::kWalks&& kSize == 8 ? 3 : 0)
    elementwise_columns_kernel(const __grid_constant__ ElementwiseArgs<F> a, ColumnGeometry geometry, int64_t slices,
                               int64_t slice_length) {
  using T = typename F::Element;
  using In = typename InputOf<F>::Type;
  using Out = typename OutputOf<F>::Type;
  const int lane = threadIdx.x % geometry.lanes;
  const int walker = threadIdx.x / geometry.lanes;
  const int64_t block = int64_t(gridDim.x) - 1 - blockIdx.x;
  const int64_t channel = ((block % geometry.channel_blocks) * geometry.lanes + lane) * kSize;
  const int64_t slice = block / geometry.channel_blocks % slices;
  const int64_t n = block / (geometry.channel_blocks * slices);
  if (walker >= geometry.walkers || channel >= a.c) return;
  const ColumnEdges edges(n, a.s, a.c, a.length, channel, kSize);
  const int64_t begin = slice * slice_length, end = min(begin + slice_length, edges.full);
  const int64_t step = int64_t(geometry.walkers) * a.c;
  int64_t position = begin + walker;
  if (position == 0 && edges.cuts_first(channel)) position = geometry.walkers;
  int64_t at = edges.origin + position * a.c + channel;
  Vec<In, kSize> x[kTraverseUnroll];
  Vec<T, kSize> second[kTraverseUnroll];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < kTraverseUnroll; ++u) {
      if (position + u * geometry.walkers < end) {
        x[u] = load_vec<In, kSize>(a.x + at + u * step);
        if (F::kInputs == 2) second[u] = load_vec<T, kSize>(a.second + at + u * step);
      }
    }
  };
  // Single elements of many rows took longer so (H200).
  constexpr bool kAhead = kSize > 1;
  if (kAhead) load();
  wait_for_prerequisites();
  typename F::Coef coef[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    coef[j] = a.f.load(n * a.channels + wrapped(channel + j + edges.before(a.channels), a.c, a.channels));
  }
  while (position < end) {
    if (!kAhead) load();
#pragma unroll
    for (int u = 0; u < kTraverseUnroll; ++u) {
      if (position + u * geometry.walkers < end) {
        acc_t<T> xs[kSize], seconds[kSize], y[kSize];
        unpack_inputs<F::kInputs>(x[u], second[u], xs, seconds);
        a.f.apply(each(coef), xs, seconds, y);
        store_result<Out, kSize>(a.y + at + u * step, pack<Out, kSize>(y));
      }
    }
    position += int64_t(kTraverseUnroll) * geometry.walkers;
    at += kTraverseUnroll * step;
    if (kAhead) load();
  }
  if (a.length == 0) return;
  const auto apply_part = [&](auto is_own, int64_t from, auto& xs, auto& seconds) {
    acc_t<T> y[kSize];
    a.f.apply(each(coef), xs, seconds, y);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (is_own(j)) a.y[from + j] = from_acc<Out>(y[j]);
    }
  };
  edges.for_parts<F::kInputs, kSize>(a.x, a.second, begin, min(begin + slice_length, a.s), geometry.walkers, walker,
                                     a.c, channel, a.length, apply_part);
}

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// The most channels of a thread of a channels_last walk. With two inputs, chains that are walked have half as many, and
// so twice the warps: more of them wait for what they compute.
template <typename F>
inline constexpr int kColumnSize =
    F::kWalks && F::kInputs > 1 && kWalkSize<typename F::Element> == 8 ? 4 : kWalkSize<typename F::Element>;

// Elements of a vector of the walk; 1 where none fits.
template <typename F>
int elementwise_size(const ElementwiseArgs<F>& a, bool channels_last) {
  constexpr int kSize = kWalkSize<typename F::Element>;
  if (!is_aligned(a.x) || !is_aligned(a.y) || (F::kInputs == 2 && !is_aligned(a.second))) return 1;
  if (!channels_last || a.s == 1 || has_turns(a.n, a.s, a.c, turns_of(a.c, kSize), kSize)) return kSize;
  if constexpr (kSize > 1) {
    if (has_turns(a.n, a.s, a.c, turns_of(a.c, kSize / 2), kSize / 2)) return kSize / 2;
  }
  return 1;
}

// Rows one after the other. With `early`, beside the end of the kernel ahead in the stream, which must write neither x
// nor second, and let others start after it has waited itself: they are read before it ends.
template <typename F>
Status launch_elementwise_rows(const char* name, const ElementwiseArgs<F>& a, cudaStream_t stream, bool early = false) {
  constexpr int kSize = kWalkSize<typename F::Element>;
  const int size = elementwise_size(a, false);
  const int64_t total = a.n * a.c * a.s;
  if (total == 0) return Status::Ok();
  ElementwiseArgs<F> b = a;
  const auto blocks_of = [&](int unroll) {
    const int64_t per_block = int64_t(kTraverseThreads) * unroll * size;
    return (total + per_block - 1) / per_block;
  };
  while (b.unroll > 1 && blocks_of(b.unroll) < kTraverseFewBlocks) b.unroll /= 2;
  const int64_t blocks = blocks_of(b.unroll);
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many elements for one launch");
  const unsigned grid = static_cast<unsigned>(blocks);
  if constexpr (F::kHasScalars) {
    if (size == 1) return launch_after<elementwise_rows_kernel<F, 1>>(early, name, grid, kTraverseThreads, stream, b);
  }
  if (size == 1) return Status::Unsupported(name, "no vector fits");
  return launch_after<elementwise_rows_kernel<F, kSize>>(early, name, grid, kTraverseThreads, stream, b);
}

template <typename F>
Status launch_elementwise(const char* name, const ElementwiseArgs<F>& a, bool channels_last, cudaStream_t stream,
                          bool early = false) {
  constexpr int kSize = kWalkSize<typename F::Element>;
  if (!channels_last || a.s == 1) return launch_elementwise_rows(name, a, stream, early);
  if (a.n * a.c * a.s == 0) return Status::Ok();
  const int size = std::min(elementwise_size(a, true), kColumnSize<F>);
  ElementwiseArgs<F> b = a;
  const int64_t turns = turns_of(a.c, size);
  b.channels = a.c;
  b.c *= turns;
  b.s = rows_of_turns(a.s, a.c, turns, size);
  b.length = a.s % turns == 0 ? 0 : a.s * a.c;
  const ColumnGeometry geometry = column_geometry(b.c, size);
  const int64_t slice_length = int64_t(geometry.walkers) * kTraverseUnroll * 4;
  const int64_t slices = (b.s + slice_length - 1) / slice_length;
  const int64_t blocks = b.n * slices * geometry.channel_blocks;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many elements for one launch");
  const auto launch = [&](auto kernel_size) {
    return launch_after<elementwise_columns_kernel<F, decltype(kernel_size)::value>>(
        early, name, static_cast<unsigned>(blocks), kTraverseThreads, stream, b, geometry, slices, slice_length);
  };
  if constexpr (kColumnSize<F> == kSize) {
    if (size == kSize) return launch(std::integral_constant<int, kSize>());
  }
  if constexpr (F::kHasScalars) {
    if (size == 1) return launch(std::integral_constant<int, 1>());
  }
  if constexpr (kSize > 1) {
    if (size > 1) return launch(std::integral_constant<int, kSize / 2>());
  }
  return Status::Unsupported(name, "no vector fits");
}

// ---------------------------------------------------------------------------------------------------------------------
// Reduced along rows. A reducer has: Element, kInputs, Coef, `Coef load(int64_t row)`, a State that starts at the first
// element it will see (`State start(const Coef&, Acc x)`), `void add(state, coef, Acc (&x)[kSize], Acc
// (&second)[kSize])`, where state(j) and coef(j) are those of element j and x and second may change, a Partial of
// kValues accumulation-type numbers, `Partial finish(const State&, const Coef&, Acc count)` and `static void
// merge(Partial&, const Partial&)`. Partials go to [n][slices][rows][kValues]. A reducer with a member kWrites may
// write beside it, and has three inputs, of which the last may be absent and is zeros then: its `add` also gets that,
// the index of x's first element and is_own(j), whether the thread has element j at all.

template <typename R, typename = void>
inline constexpr bool kReducerWrites = false;
template <typename R>
inline constexpr bool kReducerWrites<R, std::void_t<decltype(R::kWrites)>> = true;

struct OwnsAll {
  __device__ __forceinline__ constexpr bool operator()(int) const { return true; }
};
// A vector of each input.
template <typename R, int kSize>
struct ReduceInputs {
  using T = typename R::Element;
  Vec<T, kSize> x, second, third;

  template <typename Args>
  __device__ __forceinline__ void load(const Args& a, int64_t at) {
    x = load_vec<T, kSize>(a.x + at);
    if constexpr (R::kInputs > 1) second = load_vec<T, kSize>(a.second + at);
    if constexpr (R::kInputs > 2) {
      third = Vec<T, kSize>{};
      if (a.third) third = load_vec<T, kSize>(a.third + at);
    }
  }
  template <typename StateOf, typename CoefOf>
  __device__ __forceinline__ void add_to(const R& r, StateOf state, CoefOf coef, int64_t at) const {
    acc_t<T> xs[kSize], seconds[kSize];
    unpack(x, xs);
    if constexpr (R::kInputs > 1) {
      unpack(second, seconds);
    } else {
      unpack(x, seconds);
    }
    if constexpr (kReducerWrites<R>) {
      acc_t<T> thirds[kSize];
      unpack(third, thirds);
      r.add(state, coef, xs, seconds, thirds, at, OwnsAll());
    } else {
      r.add(state, coef, xs, seconds);
    }
  }
};
// The same of a vector of which the thread has a part.
template <typename R, int kSize, typename Args, typename StateOf, typename CoefOf, typename Acc, typename IsOwn>
__device__ __forceinline__ void add_part_to(const Args& a, StateOf state, CoefOf coef, Acc (&x)[kSize],
                                            Acc (&second)[kSize], int64_t at, IsOwn is_own) {
  if constexpr (kReducerWrites<R>) {
    Acc third[kSize] = {};
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (a.third && is_own(j)) third[j] = to_acc(a.third[at + j]);
    }
    a.r.add(state, coef, x, second, third, at, is_own);
  } else {
    a.r.add(state, coef, x, second);
  }
}

// Into L2.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

template <typename R>
struct ReduceArgs {
  const typename R::Element* x;
  const typename R::Element *second, *third;
  int64_t n, rows, row_length;  // channels_last: rows are channels, row_length the positions
  int64_t slices, slice_length;
  acc_t<typename R::Element>* partials;
  R r;
  int64_t channels = 0;  // as ElementwiseArgs::channels, of `rows`; 0: `rows`
  int64_t length = 0;    // as ElementwiseArgs::length
};

template <typename R>
__device__ __forceinline__ typename R::Partial shuffle_partial(const typename R::Partial& p, int mask) {
  typename R::Partial q;
  const auto* from = reinterpret_cast<const acc_t<typename R::Element>*>(&p);
  auto* to = reinterpret_cast<acc_t<typename R::Element>*>(&q);
#pragma unroll
  for (int i = 0; i < R::kValues; ++i) to[i] = __shfl_xor_sync(0xffffffffu, from[i], mask);
  return q;
}

// Blocks of a multiprocessor, or 0 as the compiler likes: of two inputs it would make three.
template <typename R, int kSize>
inline constexpr int kReduceBlocks = R::kInputs > 1 && kSize > 1 && !R::kWalks ? 4 : 0;

// One block (or, with kWarpRows, one warp) per (row, slice) of a contiguous tensor.
template <typename R, int kSize, bool kWarpRows>
__global__ void __launch_bounds__(kTraverseThreads, kReduceBlocks<R, kSize>)
    reduce_rows_kernel(const __grid_constant__ ReduceArgs<R> a) {
  using T = typename R::Element;
  using Acc = acc_t<T>;
  constexpr int kWarps = kTraverseThreads / 32;
  constexpr int kThreads = kWarpRows ? 32 : kTraverseThreads;
  wait_for_prerequisites();
  let_dependents_start();
  const int thread = threadIdx.x % kThreads;
  const int64_t unit = int64_t(blockIdx.x) * (kTraverseThreads / kThreads) + threadIdx.x / kThreads;
  if (unit >= a.n * a.rows * a.slices) return;  // whole warps leave: kWarpRows only
  const int64_t slice = unit % a.slices;
  const int64_t row = unit / a.slices;  // n * rows + r
  const int64_t begin = row * a.row_length + slice * a.slice_length;
  const int64_t end = row * a.row_length + min((slice + 1) * a.slice_length, a.row_length);

  // Elements before the first aligned vector and after the last one go to the first threads.
  const int64_t head = min((begin + kSize - 1) / kSize * kSize, end);
  const int64_t body = head + (end - head) / kSize * kSize;
  if (R::kInputs > 1 && kSize > 1 && gridDim.x <= kTraverseFewRows) {
    // Coefficients are a trip to memory of their own, and few blocks have nothing else to do meanwhile. Into L2:
    // registers for them would leave room for fewer blocks where there are many.
#pragma unroll
    for (int u = 0; u < kTraverseUnroll; ++u) {
      const int64_t i = head + int64_t(thread + u * kThreads) * kSize;
      if (i >= body) break;
      prefetch(a.x + i);
      prefetch(a.second + i);
    }
  }
  const auto coef = a.r.load(row);
  auto state = a.r.start(coef, to_acc(a.x[begin]));
  int64_t seen = 0;
  auto add_one = [&](int64_t at) {
    ReduceInputs<R, 1> one;
    one.load(a, at);
    one.add_to(a.r, same(state), same(coef), at);
    ++seen;
  };
  if (begin + thread < head) add_one(begin + thread);
  if (body + thread < end) add_one(body + thread);
  for (int64_t at = head + int64_t(thread) * kSize; at < body; at += int64_t(kTraverseUnroll) * kThreads * kSize) {
    ReduceInputs<R, kSize> inputs[kTraverseUnroll];
#pragma unroll
    for (int u = 0; u < kTraverseUnroll; ++u) {
      const int64_t i = at + int64_t(u) * kThreads * kSize;
      if (i < body) inputs[u].load(a, i);
    }
#pragma unroll
    for (int u = 0; u < kTraverseUnroll; ++u) {
      const int64_t i = at + int64_t(u) * kThreads * kSize;
      if (i < body) {
        seen += kSize;
        inputs[u].add_to(a.r, same(state), same(coef), i);
      }
    }
  }
  auto partial = a.r.finish(state, coef, static_cast<Acc>(seen));
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int mask = 1; mask <= 16; mask *= 2) {
    auto other = shuffle_partial<R>(partial, mask);
    if (lane & mask) {
      R::merge(other, partial);
      partial = other;
    } else {
      R::merge(partial, other);
    }
  }
  if constexpr (!kWarpRows) {
    __shared__ typename R::Partial shared[kWarps];
    if (lane == 0) shared[threadIdx.x / 32] = partial;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) R::merge(partial, shared[w]);
    }
  }
  if (thread == 0) {
    const int64_t n = row / a.rows, r = row % a.rows;
    Acc* const out = a.partials + ((n * a.slices + slice) * a.rows + r) * R::kValues;
    const Acc* const values = reinterpret_cast<const Acc*>(&partial);
#pragma unroll
    for (int i = 0; i < R::kValues; ++i) out[i] = values[i];
  }
}

// channels_last: a block takes a slice of the positions of some channels.
template <typename R, int kSize>
__global__ void __launch_bounds__(kTraverseThreads)
    reduce_columns_kernel(const __grid_constant__ ReduceArgs<R> a, ColumnGeometry geometry) {
  using T = typename R::Element;
  using Acc = acc_t<T>;
  __shared__ typename R::Partial shared[kTraverseThreads * kSize];
  wait_for_prerequisites();
  let_dependents_start();
  const int lane = threadIdx.x % geometry.lanes;
  const int walker = threadIdx.x / geometry.lanes;
  const int64_t channel_block = blockIdx.x % geometry.channel_blocks;
  const int64_t channel = (channel_block * geometry.lanes + lane) * kSize;
  const int64_t slice = blockIdx.x / geometry.channel_blocks % a.slices;
  const int64_t n = blockIdx.x / (geometry.channel_blocks * a.slices);
  const int64_t begin = slice * a.slice_length;
  const int64_t end = min(begin + a.slice_length, a.row_length);
  const ColumnEdges edges(n, a.row_length, a.rows, a.length, channel, kSize);
  if (walker < geometry.walkers && channel < a.rows) {
    typename R::Coef coef[kSize];
    typename R::State state[kSize];
    const int64_t first = edges.origin + begin * a.rows + channel;
    Vec<T, kSize> x0{};
    if (a.length == 0) {
      x0 = load_vec<T, kSize>(a.x + first);
    } else {
      // Of the sample's own: of an element before it, the one a row on, and behind its end, the last.
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        int64_t i = begin * a.rows + channel + j - edges.offset;
        if (i < 0) i += a.rows;
        x0.v[j] = a.x[n * a.length + min(i, a.length - 1)];
      }
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      coef[j] = a.r.load(n * a.channels + wrapped(channel + j + edges.before(a.channels), a.rows, a.channels));
      state[j] = a.r.start(coef[j], to_acc(x0.v[j]));
    }
    int64_t seen = 0;
    const int64_t step = int64_t(geometry.walkers) * a.rows;
    const int64_t full_end = min(end, edges.full);
    int64_t position = begin + walker;
    if (position == 0 && edges.cuts_first(channel)) position = geometry.walkers;
    int64_t at = first + (position - begin) * a.rows;
    for (; position < full_end; position += int64_t(kTraverseUnroll) * geometry.walkers) {
      ReduceInputs<R, kSize> inputs[kTraverseUnroll];
#pragma unroll
      for (int u = 0; u < kTraverseUnroll; ++u) {
        if (position + u * geometry.walkers < full_end) inputs[u].load(a, at + u * step);
      }
#pragma unroll
      for (int u = 0; u < kTraverseUnroll; ++u) {
        if (position + u * geometry.walkers < full_end) {
          ++seen;
          inputs[u].add_to(a.r, each(state), each(coef), at + u * step);
        }
      }
      at += kTraverseUnroll * step;
    }
    int more[kSize] = {};  // elements of parts of vectors
    const auto add_part = [&](auto is_own, int64_t from, auto& xs, auto& seconds) {
      typename R::State before[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) before[j] = state[j];
      add_part_to<R>(a, each(state), each(coef), xs, seconds, from, is_own);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        more[j] += is_own(j);
        if (!is_own(j)) state[j] = before[j];
      }
    };
    if (a.length > 0) {
      edges.for_parts<(R::kInputs > 1 ? 2 : 1), kSize>(a.x, a.second, begin, end, geometry.walkers, walker, a.rows,
                                                       channel, a.length, add_part);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      shared[(walker * geometry.lanes + lane) * kSize + j] =
          a.r.finish(state[j], coef[j], static_cast<Acc>(seen + more[j]));
    }
  }
  __syncthreads();
  const int columns = geometry.lanes * kSize;
  // Of few channels there are many walkers, which one thread a channel would take longer to merge than to read.
  for (int count = geometry.walkers; count > 1;) {
    const int half = (count + 1) / 2;
    for (int i = threadIdx.x; i < (count - half) * columns; i += kTraverseThreads) {
      R::merge(shared[i], shared[i + half * columns]);
    }
    __syncthreads();
    count = half;
  }
  for (int c = threadIdx.x; c < columns; c += kTraverseThreads) {
    const int64_t r = channel_block * columns + c;
    if (r >= a.rows) continue;
    const auto partial = shared[c];
    // The channels of each turn in their order.
    const uint32_t at = static_cast<uint32_t>(r), of = static_cast<uint32_t>(a.channels);
    const int64_t place =
        edges.offset == 0 ? r : at / of * of + (at + static_cast<uint32_t>(edges.before(a.channels))) % of;
    Acc* const out = a.partials + ((n * a.slices + slice) * a.rows + place) * R::kValues;
    const Acc* const values = reinterpret_cast<const Acc*>(&partial);
#pragma unroll
    for (int i = 0; i < R::kValues; ++i) out[i] = values[i];
  }
}

template <typename R>
void set_turns(int64_t s, int64_t c, int64_t turns, ReduceArgs<R>* a) {
  a->row_length = rows_of_turns(s, c, turns, kWalkSize<typename R::Element>);
  a->length = s % turns == 0 ? 0 : s * c;
}

template <typename R>
bool has_reduce_vectors(const ReduceArgs<R>& a, bool channels_last) {
  return is_aligned(a.x) && is_aligned(a.second) && is_aligned(a.third) &&
         (!channels_last || a.rows % kWalkSize<typename R::Element> == 0);
}

template <typename R>
Status launch_reduce(const char* name, const ReduceArgs<R>& a, bool channels_last, cudaStream_t stream,
                     bool early = false) {
  constexpr int kSize = kWalkSize<typename R::Element>;
  if (a.n * a.rows * a.row_length == 0) return Status::Ok();
  const bool vectors = has_reduce_vectors(a, channels_last);
  if (!vectors && !R::kHasScalars) return Status::Unsupported(name, "no vector fits");
  if (!channels_last) {
    const int64_t units = a.n * a.rows * a.slices;
    const bool warp_rows = a.slice_length <= 1024;
    const int64_t blocks = warp_rows ? (units + kTraverseThreads / 32 - 1) / (kTraverseThreads / 32) : units;
    if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many rows for one launch");
    const unsigned grid = static_cast<unsigned>(blocks);
    const auto launch = [&](auto size) {
      constexpr int kOwn = decltype(size)::value;
      return warp_rows
                 ? launch_after<reduce_rows_kernel<R, kOwn, true>>(early, name, grid, kTraverseThreads, stream, a)
                 : launch_after<reduce_rows_kernel<R, kOwn, false>>(early, name, grid, kTraverseThreads, stream, a);
    };
    if constexpr (R::kHasScalars) {
      if (!vectors) return launch(std::integral_constant<int, 1>());
    }
    return launch(std::integral_constant<int, kSize>());
  } else {
    ReduceArgs<R> b = a;
    if (b.channels == 0) b.channels = a.rows;
    const ColumnGeometry geometry = column_geometry(a.rows, vectors ? kColumnSize<R> : 1);
    const int64_t blocks = a.n * a.slices * geometry.channel_blocks;
    if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many elements for one launch");
    const unsigned grid = static_cast<unsigned>(blocks);
    if constexpr (R::kHasScalars) {
      if (!vectors) {
        return launch_after<reduce_columns_kernel<R, 1>>(early, name, grid, kTraverseThreads, stream, b, geometry);
      }
    }
    return launch_after<reduce_columns_kernel<R, kColumnSize<R>>>(early, name, grid, kTraverseThreads, stream, b,
                                                                  geometry);
  }
}

}  // namespace kgopt
