// GroupNorm on the CPU. Work is cut into pieces of fixed size, whatever the number of threads, and merged in order:
// batch 1 uses every core, and the result does not depend on how many there are.
#include "groupnorm/api/group_norm_cpu.h"

#include "common/cpu_block.h"
#include "groupnorm/api/checks.h"

namespace kgopt {
namespace {

using namespace cpu;

MemoryFormat format_of(const Tensor& x, const GroupNormDims& d) {
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

// y = act((pre(x) - mean) * scale + bias), a piece.
template <typename T>
void apply_piece(const Tiles& t, const Table<acc_t<T>>& table, const T* x, T* y, const ActChain& act,
                 const ActChain& pre, int64_t unit, int64_t p) {
  using Acc = acc_t<T>;
  const Buffers<Acc, 1> buffers(t);
  t.each_block(t.range(p), [&](int64_t at, int64_t n) {
    const int64_t first = unit * t.length + at;
    const Acc* const u = activate_chain(pre, view_block(x + first, buffers[0], n), buffers[0], n);
    Acc* const to = target_block(y + first, buffers[0]);
    normalize_block(t, table, unit, at, n, u, to);
    activate_chain(act, static_cast<const Acc*>(to), to, n);
    store_block(to, y + first, n);
  });
}

// Moments of the rows of a unit: of a contiguous tensor as one, of a channels_last one by channel.
template <typename T>
class RowMoments {
  using Acc = acc_t<T>;

 public:
  RowMoments(const Tiles& t, const T* x, const ActChain& pre)
      : t_(t), x_(x), pre_(pre), width_(t.channels_last ? t.channels : 1), parts_(t.units * t.pieces * width_) {}

  void piece(int64_t unit, int64_t p) {
    if (t_.channels_last) {
      columns(unit, p);
    } else {
      row(unit, p);
    }
  }

  // The pieces of a unit in order: `width` moments.
  std::vector<Moments> merged(int64_t unit) const {
    const Moments* part = parts_.data() + unit * t_.pieces * width_;
    std::vector<Moments> m(part, part + width_);
    for (int64_t p = 1; p < t_.pieces; ++p) {
      part += width_;
      // All columns of a piece have the same count.
      const double count = m[0].count, total = count + part[0].count, fraction = part[0].count / total;
      for (int64_t c = 0; c < width_; ++c) {
        const double delta = part[c].mean - m[c].mean;
        m[c] = {m[c].mean + delta * fraction, m[c].m2 + part[c].m2 + delta * delta * (count * fraction), total};
      }
    }
    return m;
  }

 private:
  // The shift is near the mean, not just any value: the farther it is, the more digits the difference of sums loses.
  void row(int64_t unit, int64_t p) {
    const Tiles::Range r = t_.range(p);
    const T* const from = x_ + unit * t_.length;
    const Buffers<Acc, 1> buffers(t_);
    const int64_t samples = shift_samples(r.size());
    for (int64_t k = 0; k < samples; ++k) load_block(from + r.begin + k * r.size() / samples, buffers[0] + k, 1);
    activate_chain(pre_, static_cast<const Acc*>(buffers[0]), buffers[0], samples);
    const Acc shift = shift_of(buffers[0], samples, 1);
    double sum = 0, sum_sq = 0;
    t_.each_block(r, [&](int64_t at, int64_t n) {
      const Acc* const u = activate_chain(pre_, view_block(from + at, buffers[0], n), buffers[0], n);
      const Sums<Acc> s = Loops<Acc>::shifted_sums(u, n, shift);
      sum += s.first;
      sum_sq += s.second;
    });
    parts_[unit * t_.pieces + p] = shifted_moments(shift, sum, sum_sq, double(r.size()));
  }

  void columns(int64_t unit, int64_t p) {
    const Tiles::Range r = t_.range(p);
    const T* const from = x_ + unit * t_.length;
    const Buffers<Acc, 1> buffers(t_);
    const int64_t width = t_.width, channels = t_.channels, positions = r.size() / channels;
    const int64_t samples = shift_samples(positions);
    std::vector<Acc> all(3 * width + samples * channels);
    Acc *const shift = all.data(), *const sum = shift + width, *const sum_sq = sum + width;
    Acc* const sampled = sum_sq + width;
    for (int64_t k = 0; k < samples; ++k) {
      Acc* const to = sampled + k * channels;
      load_block(from + r.begin + k * positions / samples * channels, to, channels);
      activate_chain(pre_, static_cast<const Acc*>(to), to, channels);
    }
    if (samples == 8) {  // a number that the compiler knows, so that it takes vectors
      for (int64_t c = 0; c < channels; ++c) shift[c] = shift_of(sampled + c, 8, channels);
    } else {
      for (int64_t c = 0; c < channels; ++c) shift[c] = shift_of(sampled + c, samples, channels);
    }
    for (int64_t i = channels; i < width; ++i) shift[i] = shift[i - channels];
    t_.each_block(r, [&](int64_t at, int64_t n) {
      const Acc* const u = activate_chain(pre_, view_block(from + at, buffers[0], n), buffers[0], n);
      Loops<Acc>::shifted_column_sums(u, n, width, shift, sum, sum_sq);
    });
    Moments* const part = parts_.data() + (unit * t_.pieces + p) * channels;
    for (int64_t c = 0; c < channels; ++c) {
      double s = 0, sq = 0;
      for (int64_t i = c; i < width; i += channels) {
        s += sum[i];
        sq += sum_sq[i];
      }
      part[c] = shifted_moments(shift[c], s, sq, double(positions));
    }
  }

  const Tiles& t_;
  const T* const x_;
  const ActChain& pre_;
  const int64_t width_;
  std::vector<Moments> parts_;
};

struct Statistics {
  std::vector<double> mean, rstd;    // [N * G]
  std::vector<double> channel_mean;  // [N * C], where asked for

  explicit Statistics(const GroupNormDims& d) : mean(d.n * d.g), rstd(d.n * d.g, std::nan("")) {}

  void set(int64_t group, const Moments& m, double eps) {
    mean[group] = m.mean;
    rstd[group] = 1.0 / std::sqrt(m.m2 / m.count + eps);
  }
  // The groups of one sample from the moments of its channels.
  void set_sample(const GroupNormDims& d, int64_t n, const Moments* channels, double eps) {
    for (int64_t g = 0; g < d.g; ++g) {
      Moments m;
      for (int64_t k = 0; k < d.channels_per_group(); ++k) m.merge(channels[g * d.channels_per_group() + k]);
      set(n * d.g + g, m, eps);
    }
  }
};

// Of nothing there is no variance: rstd stays NaN.
Statistics compute_statistics(const Tensor& x, const GroupNormDims& d, double eps, bool with_channel_mean) {
  Statistics s(d);
  if (with_channel_mean) s.channel_mean.assign(d.n * d.c, std::nan(""));
  if (d.numel() == 0) return s;
  const Tensor dense = dense_in(x, format_of(x, d));
  dispatch_dtype(d.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool by_channel = d.channels_last || with_channel_mean;
    const Tiles t(d, by_channel ? 1 : d.channels_per_group());
    const ActChain none;
    RowMoments<T> moments(t, static_cast<const T*>(dense.const_data_ptr()), none);
    parallel(t.units * t.pieces, t.piece, [&](int64_t i) { moments.piece(i / t.pieces, i % t.pieces); });
    for (int64_t n = 0; n < d.n; ++n) {
      const int64_t units = t.units / d.n;
      std::vector<Moments> all;
      for (int64_t u = n * units; u < (n + 1) * units; ++u) {
        const std::vector<Moments> m = moments.merged(u);
        all.insert(all.end(), m.begin(), m.end());
      }
      if (by_channel) {
        s.set_sample(d, n, all.data(), eps);
      } else {
        for (int64_t g = 0; g < d.g; ++g) s.set(n * d.g + g, all[g], eps);
      }
      for (size_t c = 0; with_channel_mean && c < all.size(); ++c) s.channel_mean[n * d.c + c] = all[c].mean;
    }
  });
  return s;
}

Tensor to_tensor(const Tensor& like, const std::vector<double>& values, const IntArray& sizes) {
  Tensor t = empty_like_shape(like, sizes, stats_type(like));
  write_all(t, values);
  return t;
}

// y = act(GroupNorm(pre(x))); y may be x. Both dense, in the layout that d says.
Statistics normalize_into(const Tensor& x, const Tensor& y, const GroupNormDims& d, const OptTensor& weight,
                          const OptTensor& bias, double eps, const ActChain& act, const ActChain& pre) {
  Statistics s(d);
  if (d.numel() == 0) return s;
  const std::vector<double> w = read_all(weight, d.c, 1.0), b = read_all(bias, d.c, 0.0);
  dispatch_dtype(d.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(x.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    const Tiles t(d, d.channels_per_group());
    RowMoments<T> moments(t, from, pre);
    Table<Acc> table(t, d.n);
    const auto merge = [&](int64_t unit) {
      const std::vector<Moments> m = moments.merged(unit);
      if (d.channels_last) {
        s.set_sample(d, unit, m.data(), eps);
      } else {
        s.set(unit, m[0], eps);
      }
      for (int64_t row = 0; row < t.rows; ++row) {
        const int64_t c = (d.channels_last ? 0 : unit % d.g * t.rows) + row;
        const int64_t group = d.channels_last ? unit * d.g + c / d.channels_per_group() : unit;
        const int64_t at = t.table_row(unit) + row;
        table.mean[at] = static_cast<Acc>(s.mean[group]);
        table.scale[at] = static_cast<Acc>(s.rstd[group] * w[c]);
        table.bias[at] = static_cast<Acc>(b[c]);
      }
      table.repeat(t, unit);
    };
    two_passes(
        t, sizeof(T), [&](int64_t u, int64_t p) { moments.piece(u, p); }, merge,
        [&](int64_t u, int64_t p) { apply_piece(t, table, from, to, act, pre, u, p); });
  });
  return s;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm_fwd_cpu(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias,
                                                      double eps, std::string act, std::string pre_act) {
  const char* const op = "group_norm";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act, "pre_act");
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  const Statistics s = normalize_into(dense_in(x, format), y, d, weight, bias, eps, act_chain, pre_chain);
  return {y, to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

std::tuple<Tensor, Tensor> group_norm_inplace_cpu(const char* op, const Tensor& x, int64_t num_groups,
                                                  const OptTensor& weight, const OptTensor& bias, double eps,
                                                  const std::string& act, const std::string& pre_act) {
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act, "pre_act");
  const Statistics s = normalize_into(x, x, d, weight, bias, eps, act_chain, pre_chain);
  return {to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_mean_fwd_cpu(Tensor x, int64_t num_groups, OptTensor weight,
                                                                   OptTensor bias, double eps) {
  const char* const op = "group_norm_mean";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const Statistics s = compute_statistics(x, d, eps, true);
  const std::vector<double> w = read_all(weight, d.c, 1.0), b = read_all(bias, d.c, 0.0);
  std::vector<double> out(d.n);
  for (int64_t n = 0; n < d.n; ++n) {
    double sum = 0;
    for (int64_t c = 0; c < d.c; ++c) {
      const int64_t g = n * d.g + c / d.channels_per_group();
      sum += (s.channel_mean[n * d.c + c] - s.mean[g]) * s.rstd[g] * w[c] + b[c];
    }
    out[n] = sum / double(d.c);
  }
  return {to_tensor(x, out, {d.n}), to_tensor(x, s.channel_mean, {d.n, d.c}), to_tensor(x, s.mean, {d.n, d.g}),
          to_tensor(x, s.rstd, {d.n, d.g})};
}

std::tuple<Tensor, Tensor> group_stats_cpu(Tensor x, int64_t num_groups, double eps) {
  const GroupNormDims d = check_group_norm("group_stats", x, num_groups);
  const Statistics s = compute_statistics(x, d, eps, false);
  return {to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

namespace {

// dx = (x - mean) * slope + offset with the coefficients of each (sample, channel): coefficients(n, c) = {mean, slope,
// offset}. The gradients that come through statistics alone.
template <typename F>
Tensor affine_gradient(const Tensor& x, const GroupNormDims& d, const F& coefficients) {
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() == 0) return dx;
  dispatch_dtype(d.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Tiles t(d, d.channels_per_group());
    Table<acc_t<T>> table(t, d.n);
    for (int64_t u = 0; u < t.units; ++u) {
      for (int64_t row = 0; row < t.rows; ++row) {
        const int64_t channel = u * t.rows + row, at = t.table_row(u) + row;
        const std::array<double, 3> k = coefficients(channel / d.c, channel % d.c);
        table.mean[at] = static_cast<acc_t<T>>(k[0]);
        table.scale[at] = static_cast<acc_t<T>>(k[1]);
        table.bias[at] = static_cast<acc_t<T>>(k[2]);
      }
      table.repeat(t, u);
    }
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    parallel(t.units * t.pieces, t.piece,
             [&](int64_t i) { apply_piece(t, table, from, to, ActChain(), ActChain(), i / t.pieces, i % t.pieces); });
  });
  return dx;
}

Tensor group_stats_backward(Tensor dmean, Tensor drstd, Tensor x, Tensor mean, Tensor rstd, int64_t num_groups) {
  const char* const op = "group_stats_backward";
  const GroupNormDims d = check_group_stats_backward(op, dmean, drstd, x, mean, rstd, num_groups);
  const int64_t groups = d.n * d.g;
  const std::vector<double> dm = read_all(dmean, groups), dr = read_all(drstd, groups), r = read_all(rstd, groups);
  const std::vector<double> mu = read_all(mean, groups);
  const double m = double(d.channels_per_group()) * double(d.s);
  return affine_gradient(x, d, [&](int64_t n, int64_t c) -> std::array<double, 3> {
    const int64_t g = n * d.g + c / d.channels_per_group();
    return {mu[g], -dr[g] * r[g] * r[g] * r[g] / m, dm[g] / m};
  });
}

// Backward of act(GroupNorm(pre(x))), a unit at a time: the sums of dz and of dz * xhat over each channel, from them
// the two terms of a group, then dx. dz = dy * act'(z) is computed in both passes, which costs less than storing it.
template <typename T>
void backward(const T* x, const T* dy, T* dx, const GroupNormDims& d, const std::vector<double>& mean,
              const std::vector<double>& rstd, const std::vector<double>& weight, const std::vector<double>& bias,
              const ActChain& act, const ActChain& pre, std::vector<double>* sums_dz,
              std::vector<double>* sums_dz_xhat) {
  using Acc = acc_t<T>;
  const Tiles t(d, d.channels_per_group());
  const int64_t per_group = d.channels_per_group();
  const double m = double(per_group) * double(d.s);
  Table<Acc> forward(t, d.n), table(t, d.n, true);
  for (int64_t u = 0; u < t.units; ++u) {
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t channel = u * t.rows + row, c = channel % d.c, g = channel / per_group, at = t.table_row(u) + row;
      forward.mean[at] = static_cast<Acc>(mean[g]);
      forward.scale[at] = static_cast<Acc>(rstd[g] * weight[c]);
      forward.bias[at] = static_cast<Acc>(bias[c]);
    }
    forward.repeat(t, u);
  }
  // Sums of (dz, dz * (u - mean)): by piece, and by channel within it.
  const int64_t slots = d.channels_last ? d.c * t.pieces : t.rows * t.pieces_per_row;
  std::vector<std::array<double, 2>> parts(t.units * slots);

  const bool few_values = d.channels_per_group() * d.s <= 64;
  const auto sum = [&](int64_t unit, int64_t p) {
    const Buffers<Acc, 5> b(t);
    const Acc* const mu = forward.mean.data() + t.table_row(unit);
    std::vector<Acc> sums(2 * t.width);
    t.each_block(t.range(p), [&](int64_t at, int64_t n) {
      const int64_t first = unit * t.length + at;
      const Acc* const u = activate_chain(pre, view_block(x + first, b[0], n), b[1], n);
      const Acc* dz = view_block(dy + first, b[2], n);
      if (!act.empty()) {
        normalize_block(t, forward, unit, at, n, u, b[3]);
        dz = chain_gradient(act, static_cast<const Acc*>(b[3]), b[4], dz, target_block(dx + first, b[2]), n);
      }
      // Kept for the second step, and of a half type rounded for it. The gradient of a group of a few values cancels,
      // and there the sums are those of what the second step reads, or it would be left with the rounding.
      if (!act.empty()) {
        store_block(dz, dx + first, n);
        if constexpr (!std::is_same_v<T, Acc>) {
          if (few_values) {
            load_block(dx + first, b[2], n);
            dz = b[2];
          }
        }
      }
      if (d.channels_last) {
        Loops<Acc>::gradient_column_sums(u, dz, n, t.width, mu, sums.data(), sums.data() + t.width);
      } else {
        t.each_row(at, n, [&](int64_t row, int64_t offset, int64_t count) {
          const Sums<Acc> s = Loops<Acc>::gradient_sums(u + offset, dz + offset, count, mu[row]);
          std::array<double, 2>& part = parts[unit * slots + row * t.pieces_per_row + p % t.pieces_per_row];
          part[0] += s.first;
          part[1] += s.second;
        });
      }
    });
    std::array<double, 2>* const part = parts.data() + unit * slots + p * d.c;
    for (int64_t i = 0; i < t.width; ++i) {
      part[i % d.c][0] += sums[i];
      part[i % d.c][1] += sums[t.width + i];
    }
  };

  const auto merge = [&](int64_t unit) {
    const int64_t groups = t.rows / per_group;  // of the unit
    for (int64_t k = 0; k < groups; ++k) {
      const int64_t g = unit * groups + k;
      double term = 0, term_xhat = 0;
      for (int64_t i = 0; i < per_group; ++i) {
        const int64_t row = k * per_group + i, channel = unit * t.rows + row;
        double dz = 0, dz_xhat = 0;
        const int64_t count = d.channels_last ? t.pieces : t.pieces_per_row;
        for (int64_t p = 0; p < count; ++p) {
          const auto& part = parts[unit * slots + (d.channels_last ? p * d.c + row : row * count + p)];
          dz += part[0];
          dz_xhat += part[1] * rstd[g];
        }
        (*sums_dz)[channel] = dz;
        (*sums_dz_xhat)[channel] = dz_xhat;
        term += weight[channel % d.c] * dz / m;
        term_xhat += weight[channel % d.c] * dz_xhat / m;
      }
      // dx = rstd * (weight * dz - (term + xhat * term_xhat))
      for (int64_t i = 0; i < per_group; ++i) {
        const int64_t at = t.table_row(unit) + k * per_group + i;
        table.mean[at] = forward.mean[at];
        table.scale[at] = forward.scale[at];
        table.slope[at] = static_cast<Acc>(-rstd[g] * rstd[g] * term_xhat);
        table.bias[at] = static_cast<Acc>(-rstd[g] * term);
      }
    }
    table.repeat(t, unit);
  };

  const T* const kept_dz = act.empty() ? dy : dx;
  const auto finish = [&](int64_t unit, int64_t p) {
    const Buffers<Acc, 4> b(t);
    const int64_t row = t.table_row(unit);
    const Acc *const mu = table.mean.data() + row, *const scale = table.scale.data() + row;
    const Acc *const slope = table.slope.data() + row, *const offset = table.bias.data() + row;
    t.each_block(t.range(p), [&](int64_t at, int64_t n) {
      const int64_t first = unit * t.length + at;
      const Acc* const from = view_block(x + first, b[0], n);
      const Acc* const u = activate_chain(pre, from, b[1], n);
      const Acc* const dz = view_block(kept_dz + first, b[2], n);
      Acc* const to = target_block(dx + first, b[2]);
      if (d.channels_last) {
        Loops<Acc>::gradient_columns(u, dz, to, n, t.width, mu, scale, slope, offset);
      } else {
        t.each_row(at, n, [&](int64_t r, int64_t o, int64_t count) {
          Loops<Acc>::gradient_row(u + o, dz + o, to + o, count, mu[r], scale[r], slope[r], offset[r]);
        });
      }
      store_block(chain_gradient(pre, from, b[3], static_cast<const Acc*>(to), to, n), dx + first, n);
    });
  };
  two_passes(t, 2 * sizeof(T), sum, merge, finish);
}

// dweight and dbias from the sums over each (sample, channel).
std::tuple<Tensor, Tensor> affine_gradients(const Tensor& x, const GroupNormDims& d, ScalarType type,
                                            const std::vector<double>& sums_dz_xhat,
                                            const std::vector<double>& sums_dz) {
  std::vector<double> dweight(d.c, 0.0), dbias(d.c, 0.0);
  for (int64_t n = 0; n < d.n; ++n) {
    for (int64_t c = 0; c < d.c; ++c) {
      dweight[c] += sums_dz_xhat[n * d.c + c];
      dbias[c] += sums_dz[n * d.c + c];
    }
  }
  Tensor dweight_out = empty_like_shape(x, {d.c}, type), dbias_out = empty_like_shape(x, {d.c}, type);
  write_all(dweight_out, dweight);
  write_all(dbias_out, dbias);
  return {dweight_out, dbias_out};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                                       int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       std::string act, std::string pre_act) {
  const char* const op = "group_norm_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act, "pre_act");
  check_gradient(op, "dy", dy, x);
  check_group_statistics(op, mean, rstd, x, d);
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  std::vector<double> sums_dz(d.n * d.c), sums_dz_xhat(d.n * d.c);
  if (d.numel() > 0) {
    dispatch_dtype(d.dtype, [&](auto zero) {
      using T = decltype(zero);
      backward(static_cast<const T*>(dense.const_data_ptr()), static_cast<const T*>(dense_dy.const_data_ptr()),
               static_cast<T*>(dx.mutable_data_ptr()), d, read_all(mean, d.n * d.g), read_all(rstd, d.n * d.g),
               read_all(weight, d.c, 1.0), read_all(bias, d.c, 0.0), act_chain, pre_chain, &sums_dz, &sums_dz_xhat);
    });
  }
  auto [dweight, dbias] = affine_gradients(x, d, affine_type(x, weight, bias), sums_dz_xhat, sums_dz);
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_mean_backward(Tensor dout, Tensor x, Tensor channel_mean, Tensor mean,
                                                            Tensor rstd, int64_t num_groups, OptTensor weight) {
  const char* const op = "group_norm_mean_backward";
  const GroupNormDims d = check_group_norm_mean_backward(op, dout, x, channel_mean, mean, rstd, num_groups, weight);
  const std::vector<double> g_out = read_all(dout, d.n), cm = read_all(channel_mean, d.n * d.c);
  const std::vector<double> mu = read_all(mean, d.n * d.g), r = read_all(rstd, d.n * d.g);
  const std::vector<double> w = read_all(weight, d.c, 1.0);
  // dz = dout / (C * S) everywhere in a sample, so that its sums come from the means of the channels.
  const int64_t per_group = d.channels_per_group();
  std::vector<double> sums_dz(d.n * d.c), sums_dz_xhat(d.n * d.c), term(d.n * d.g), term_xhat(d.n * d.g);
  for (int64_t i = 0; i < d.n * d.c; ++i) {
    const int64_t g = i / per_group;
    sums_dz[i] = g_out[i / d.c] / double(d.c);
    sums_dz_xhat[i] = sums_dz[i] * (cm[i] - mu[g]) * r[g];
    term[g] += w[i % d.c] * sums_dz[i] / (double(per_group) * double(d.s));
    term_xhat[g] += w[i % d.c] * sums_dz_xhat[i] / (double(per_group) * double(d.s));
  }
  const Tensor dx = affine_gradient(x, d, [&](int64_t n, int64_t c) -> std::array<double, 3> {
    const int64_t g = n * d.g + c / per_group;
    const double dz = g_out[n] / (double(d.c) * double(d.s));
    return {mu[g], -r[g] * r[g] * term_xhat[g], r[g] * (w[c] * dz - term[g])};
  });
  auto [dweight, dbias] = affine_gradients(x, d, affine_type(x, weight, std::nullopt), sums_dz_xhat, sums_dz);
  return {dx, dweight, dbias};
}

Tensor group_norm(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps, std::string act) {
  return std::get<0>(group_norm_fwd_cpu(x, num_groups, weight, bias, eps, act, "none"));
}

std::string explain_group_norm(Tensor x, int64_t num_groups, std::string act, std::string pre_act, bool,
                               std::optional<bool>, bool) {
  const char* const op = "explain_group_norm";
  check_group_norm(op, x, num_groups);
  check_act(op, act);
  check_act(op, pre_act, "pre_act");
  return "threads and vectors of the CPU";
}

// Reads x for its statistics all the same: caches make that cheap here.
Tensor group_norm_moments(Tensor x, Tensor moments, int64_t num_groups, OptTensor weight, OptTensor bias, double eps,
                          std::string act) {
  check_statistics("group_norm_moments", "moments", moments, x, {x.size(0), x.dim() > 1 ? x.size(1) : 0, 2});
  return std::get<0>(group_norm_fwd_cpu(x, num_groups, weight, bias, eps, act, "none"));
}

Tensor group_norm_mean(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps) {
  const Tensor out = std::get<0>(group_norm_mean_fwd_cpu(x, num_groups, weight, bias, eps));
  return out.scalar_type() == x.scalar_type() ? out : torch::stable::to(out, x.scalar_type());
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("group_stats", TORCH_BOX(&kgopt::group_stats_cpu));
  m.impl("group_stats_backward", TORCH_BOX(&kgopt::group_stats_backward));
  m.impl("group_norm", TORCH_BOX(&kgopt::group_norm));
  m.impl("group_norm_moments", TORCH_BOX(&kgopt::group_norm_moments));
  m.impl("group_norm_fwd", TORCH_BOX(&kgopt::group_norm_fwd_cpu));
  m.impl("group_norm_backward", TORCH_BOX(&kgopt::group_norm_backward));
  m.impl("explain_group_norm", TORCH_BOX(&kgopt::explain_group_norm));
  m.impl("group_norm_mean", TORCH_BOX(&kgopt::group_norm_mean));
  m.impl("group_norm_mean_fwd", TORCH_BOX(&kgopt::group_norm_mean_fwd_cpu));
  m.impl("group_norm_mean_backward", TORCH_BOX(&kgopt::group_norm_mean_backward));
}
