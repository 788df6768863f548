// How the CPU's GroupNorm cuts a tensor into units and pieces, and what it does to a piece.
#pragma once

#include <array>
#include <vector>

#include "common/cpu/block.h"
#include "groupnorm/api/checks.h"

namespace kgopt {
namespace cpu {

inline MemoryFormat format_of(const Tensor& x, const GroupNormDims& d) {
  return d.channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
}

// A unit is what its own elements alone normalize, and lies in one piece in memory: in a contiguous tensor a group
// (rows of S elements, one a channel), in a channels_last one a sample (positions of C elements). It is cut into
// pieces: parts of a row or whole rows; positions.
struct Tiles {
  static constexpr int64_t kPiece = 32768;         // elements of a piece, about
  static constexpr int64_t kCached = 4096 * 1024;  // bytes that mostly stay in L2 and L3 from one pass to the next

  bool channels_last;
  int64_t channels;             // of the tensor
  int64_t units, rows, length;  // rows: channels of a unit; length: elements of a unit
  int64_t row_length;           // contiguous: S
  int64_t width = 0;            // channels_last: elements of a row of parameters, a multiple of the channels
  int64_t block = kBlock;       // elements that are worked on at a time
  int64_t piece, pieces;        // elements of a piece, pieces of a unit
  int64_t pieces_per_row = 1;   // contiguous, where rows are longer than a piece

  // rows_per_unit: of a contiguous tensor; 1 gives the statistics of channels.
  Tiles(const GroupNormDims& d, int64_t rows_per_unit)
      : channels_last(d.channels_last),
        channels(d.c),
        units(d.channels_last ? d.n : d.n * d.c / rows_per_unit),
        rows(d.channels_last ? d.c : rows_per_unit),
        length(rows * d.s),
        row_length(d.s) {
    if (channels_last) {
      // A few vectors wide, however few channels there are. At least 64 positions, so that merging sums costs little.
      width = d.c * std::max<int64_t>(1, 256 / d.c);
      block = width * std::max<int64_t>(1, kBlock / width);
      piece = (std::max(kPiece, 64 * d.c) + width - 1) / width * width;
    } else {
      const int64_t rows_per_piece = std::max<int64_t>(1, kPiece / row_length);
      pieces_per_row = (row_length + kPiece - 1) / kPiece;
      piece = rows_per_piece * std::min(row_length, kPiece);
    }
    pieces = channels_last || pieces_per_row == 1 ? (length + piece - 1) / piece : rows * pieces_per_row;
  }

  struct Range {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
  };
  // Elements of a unit that piece p holds.
  Range range(int64_t p) const {
    if (pieces_per_row == 1) return {p * piece, std::min(length, (p + 1) * piece)};
    const int64_t row = p / pieces_per_row * row_length, at = p % pieces_per_row * kPiece;
    return {row + at, row + std::min(row_length, at + kPiece)};
  }
  // f(at, n) for the blocks of a range.
  template <typename F>
  void each_block(Range r, const F& f) const {
    for (int64_t at = r.begin; at < r.end; at += block) f(at, std::min(block, r.end - at));
  }
  // f(row, offset, n) for the parts of rows that make up a block of a contiguous tensor.
  template <typename F>
  void each_row(int64_t at, int64_t n, const F& f) const {
    for (int64_t offset = 0, count; offset < n; offset += count) {
      const int64_t row = (at + offset) / row_length;
      count = std::min(n - offset, (row + 1) * row_length - at - offset);
      f(row, offset, count);
    }
  }
  // What the parameters of a unit's row are found under, in a table of `width` (contiguous: C) columns a sample.
  int64_t table_row(int64_t unit) const { return channels_last ? unit * width : unit * rows; }
  int64_t table_size(int64_t n) const { return n * (channels_last ? width : channels); }
};

// first(unit, piece) for all pieces of a unit, then merge(unit), then second(unit, piece). Unit by unit where one stays
// in the cache and the threads get about equally many, else pass by pass; with the same result.
template <typename First, typename Merge, typename Second>
void two_passes(const Tiles& t, int64_t bytes_per_element, const First& first, const Merge& merge,
                const Second& second) {
  const int64_t threads = torch::stable::get_num_threads();
  const bool balanced = t.units % threads == 0 || t.units >= 4 * threads;
  if (t.pieces == 1 || (balanced && t.length * bytes_per_element <= Tiles::kCached)) {
    parallel(t.units, t.length, [&](int64_t u) {
      for (int64_t p = 0; p < t.pieces; ++p) first(u, p);
      merge(u);
      for (int64_t p = 0; p < t.pieces; ++p) second(u, p);
    });
    return;
  }
  parallel(t.units * t.pieces, t.piece, [&](int64_t i) { first(i / t.pieces, i % t.pieces); });
  parallel(t.units, t.pieces * t.rows, merge);
  parallel(t.units * t.pieces, t.piece, [&](int64_t i) { second(i / t.pieces, i % t.pieces); });
}

// The slope of each channel, of one or one a channel.
inline std::vector<double> read_slopes(const Tensor& slope, int64_t channels) {
  std::vector<double> slopes = read_all(slope, slope.numel());
  slopes.resize(channels, slopes.front());
  return slopes;
}

// Parameters of each (sample, channel), as the loops want them: for channels_last repeated over `width`.
template <typename Acc>
struct Table {
  std::vector<Acc> mean, scale, bias, slope;

  Table(const Tiles& t, int64_t n, bool with_slope = false)
      : mean(t.table_size(n)), scale(mean.size()), bias(mean.size()), slope(with_slope ? mean.size() : 0) {}
  // After the first C columns of a unit were set.
  void repeat(const Tiles& t, int64_t unit) {
    if (!t.channels_last) return;
    for (std::vector<Acc>* v : {&mean, &scale, &bias, &slope}) {
      if (v->empty()) continue;
      Acc* const row = v->data() + t.table_row(unit);
      for (int64_t i = t.channels; i < t.width; ++i) row[i] = row[i - t.channels];
    }
  }
};

// to = (x - mean) * scale + bias over a block at `at` of a unit.
template <typename Acc>
void normalize_block(const Tiles& t, const Table<Acc>& table, int64_t unit, int64_t at, int64_t n, const Acc* x,
                     Acc* to) {
  const Acc* const mean = table.mean.data() + t.table_row(unit);
  const Acc* const scale = table.scale.data() + t.table_row(unit);
  const Acc* const bias = table.bias.data() + t.table_row(unit);
  if (t.channels_last) return Loops<Acc>::normalize_columns(x, to, n, t.width, mean, scale, bias);
  t.each_row(at, n, [&](int64_t row, int64_t offset, int64_t count) {
    Loops<Acc>::normalize_row(x + offset, to + offset, count, mean[row], scale[row], bias[row]);
  });
}

// Buffers of one block each. On the stack where their size is known.
template <typename Acc, int kCount>
struct Buffers {
  alignas(64) Acc fixed[kCount][kBlock];
  std::vector<Acc> variable;
  Acc* at[kCount];

  explicit Buffers(const Tiles& t) {
    if (t.block > kBlock) variable.resize(kCount * t.block);
    for (int i = 0; i < kCount; ++i) at[i] = t.block > kBlock ? variable.data() + i * t.block : fixed[i];
  }
  Acc* operator[](int i) const { return at[i]; }
};

// PReLU of a block at `at` of a unit, in place.
template <typename Acc>
void prelu_block(const Tiles& t, const Table<Acc>& table, int64_t unit, int64_t at, int64_t n, Acc* x) {
  const Acc* const slope = table.slope.data() + t.table_row(unit);
  if (t.channels_last) return Loops<Acc>::prelu_columns(x, x, n, t.width, slope);
  t.each_row(at, n, [&](int64_t row, int64_t offset, int64_t count) {
    Loops<Acc>::prelu_row(x + offset, x + offset, count, slope[row]);
  });
}

// y = act(PReLU((pre(x) - mean) * scale + bias + residual)), a piece. A table with slopes has a PReLU.
template <typename T>
void apply_piece(const Tiles& t, const Table<acc_t<T>>& table, const T* x, const T* residual, T* y, const ActChain& act,
                 const ActChain& pre, int64_t unit, int64_t p) {
  using Acc = acc_t<T>;
  const Buffers<Acc, 2> buffers(t);
  t.each_block(t.range(p), [&](int64_t at, int64_t n) {
    const int64_t first = unit * t.length + at;
    const Acc* const u = activate_chain(pre, view_block(x + first, buffers[0], n), buffers[0], n);
    Acc* const to = target_block(y + first, buffers[0]);
    normalize_block(t, table, unit, at, n, u, to);
    if (residual) {
      const Acc* const r = view_block(residual + first, buffers[1], n);
      for (int64_t i = 0; i < n; ++i) to[i] += r[i];
    }
    if (!table.slope.empty()) prelu_block(t, table, unit, at, n, to);
    activate_chain(act, static_cast<const Acc*>(to), to, n);
    store_block(to, y + first, n);
  });
}

}  // namespace cpu
}  // namespace kgopt
