// GroupNorm on the CPU. Work is cut into pieces of fixed size, whatever the number of threads, and merged in order:
// batch 1 uses every core, and the result does not depend on how many there are.
#include "groupnorm_cpu.h"

#include "../common/cpu_block.h"
#include "groupnorm_checks.h"

namespace kgopt {
namespace {

using namespace cpu;

constexpr int64_t kPiece = 32 * kBlock;  // elements of one piece of work

MemoryFormat format_of(const Tensor& x, const GroupNormDims& d) {
  return d.channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
}

// Blocks that lie one after the other in memory, walked piece by piece. A contiguous tensor is rows (sample, channel)
// of S elements; a channels_last one is positions of C elements.
struct Pieces {
  int64_t rows, row_length, rows_per_piece, pieces_per_row, count;

  Pieces(int64_t all_rows, int64_t length) : rows(all_rows), row_length(length) {
    rows_per_piece = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, length));
    pieces_per_row = rows_per_piece > 1 ? 1 : (length + kPiece - 1) / kPiece;
    count = rows_per_piece > 1 ? (rows + rows_per_piece - 1) / rows_per_piece : rows * pieces_per_row;
  }
  // Calls f(row, begin, end) for the parts of rows that make up piece i.
  template <typename F>
  void each(int64_t i, const F& f) const {
    if (rows_per_piece > 1) {
      for (int64_t r = i * rows_per_piece; r < std::min(rows, (i + 1) * rows_per_piece); ++r) f(r, 0, row_length);
    } else {
      const int64_t r = i / pieces_per_row, begin = i % pieces_per_row * kPiece;
      f(r, begin, std::min(row_length, begin + kPiece));
    }
  }
};

// Moments of `rows` contiguous rows of pre(x).
template <typename T>
std::vector<Moments> row_moments(const T* x, int64_t rows, int64_t length, const ActChain& pre) {
  const Pieces pieces(rows, length);
  std::vector<Moments> parts(rows * pieces.pieces_per_row);
  parallel(pieces.count, [&](int64_t i) {
    acc_t<T> buffer[kBlock];
    pieces.each(i, [&](int64_t r, int64_t begin, int64_t end) {
      Moments m;
      for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        const T* const from = x + r * length + at;
        if constexpr (std::is_same_v<T, acc_t<T>>) {
          if (pre.empty()) {
            m.merge(block_moments(from, n));
            continue;
          }
        }
        load_block(from, buffer, n);
        activate_chain(pre, buffer, n);
        m.merge(block_moments(buffer, n));
      }
      parts[r * pieces.pieces_per_row + begin / kPiece] = m;
    });
  });
  std::vector<Moments> result(rows);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < pieces.pieces_per_row; ++k) result[r].merge(parts[r * pieces.pieces_per_row + k]);
  }
  return result;
}

// At most 128: that many fp32 terms are summed before the sums go on in double.
int64_t positions_per_piece(const GroupNormDims& d) {
  return std::max<int64_t>(1, std::min<int64_t>(128, kPiece / d.c));
}

// Moments of each (sample, channel) of a channels_last tensor.
template <typename T>
std::vector<Moments> column_moments(const T* x, const GroupNormDims& d, const ActChain& pre) {
  using Acc = acc_t<T>;
  const int64_t per_piece = positions_per_piece(d);
  const int64_t pieces = (d.s + per_piece - 1) / per_piece;
  std::vector<Moments> parts(d.n * pieces * d.c);
  parallel(d.n * pieces, [&](int64_t i) {
    const int64_t n = i / pieces, begin = i % pieces * per_piece, end = std::min(d.s, begin + per_piece);
    std::vector<Acc> buffer((end - begin) * d.c), shift(d.c), sum(d.c), sum_sq(d.c);
    load_block(x + (n * d.s + begin) * d.c, buffer.data(), (end - begin) * d.c);
    activate_chain(pre, buffer.data(), (end - begin) * d.c);
    const int64_t samples = shift_samples(end - begin);
    for (int64_t k = 0; k < samples; ++k) {
      const Acc* const row = buffer.data() + k * (end - begin) / samples * d.c;
      for (int64_t c = 0; c < d.c; ++c) shift[c] += row[c] / static_cast<Acc>(samples);
    }
    if constexpr (std::is_same_v<Acc, float>) {
      shifted_column_sums(buffer.data(), end - begin, d.c, shift.data(), sum.data(), sum_sq.data());
    } else {
      for (int64_t p = 0; p < end - begin; ++p) {
        for (int64_t c = 0; c < d.c; ++c) {
          const Acc v = buffer[p * d.c + c] - shift[c];
          sum[c] += v;
          sum_sq[c] += v * v;
        }
      }
    }
    const double count = double(end - begin);
    for (int64_t c = 0; c < d.c; ++c) {
      const double mean = double(sum[c]) / count;
      const double m2 = double(sum_sq[c]) - double(sum[c]) * mean;
      parts[i * d.c + c] = {double(shift[c]) + mean, m2 < 0 ? 0.0 : m2, count};
    }
  });
  std::vector<Moments> result(d.n * d.c);
  for (int64_t n = 0; n < d.n; ++n) {
    for (int64_t k = 0; k < pieces; ++k) {
      for (int64_t c = 0; c < d.c; ++c) result[n * d.c + c].merge(parts[(n * pieces + k) * d.c + c]);
    }
  }
  return result;
}

struct Statistics {
  std::vector<double> mean, rstd;    // [N * G]
  std::vector<double> channel_mean;  // [N * C], where asked for
};

Statistics compute_statistics(const Tensor& x, const GroupNormDims& d, const ActChain& pre, double eps,
                              bool with_channel_mean) {
  std::vector<Moments> rows;
  const bool per_channel = d.channels_last || with_channel_mean;
  dispatch_dtype(d.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* const data = static_cast<const T*>(x.const_data_ptr());
    if (d.channels_last) {
      rows = column_moments(data, d, pre);
    } else if (per_channel) {
      rows = row_moments(data, d.n * d.c, d.s, pre);
    } else {
      rows = row_moments(data, d.n * d.g, d.channels_per_group() * d.s, pre);
    }
  });
  Statistics s;
  const int64_t per_group = per_channel ? d.channels_per_group() : 1;
  for (int64_t i = 0; i < d.n * d.g; ++i) {
    Moments m;
    for (int64_t k = 0; k < per_group; ++k) m.merge(rows[i * per_group + k]);
    s.mean.push_back(m.mean);
    s.rstd.push_back(1.0 / std::sqrt(m.m2 / m.count + eps));
  }
  if (with_channel_mean) {
    for (const Moments& m : rows) s.channel_mean.push_back(m.mean);
  }
  return s;
}

Tensor to_tensor(const Tensor& like, const std::vector<double>& values, const IntArray& sizes) {
  Tensor t = empty_like_shape(like, sizes, stats_type(like));
  for (size_t i = 0; i < values.size(); ++i) write_double(t, static_cast<int64_t>(i), values[i]);
  return t;
}

// What a channel is multiplied with and added to, as arrays over C for one sample.
template <typename Acc>
struct Affine {
  std::vector<Acc> mean, scale, bias;

  Affine(const GroupNormDims& d, int64_t n, const std::vector<double>& all_mean, const std::vector<double>& all_rstd,
         const std::vector<double>& weight, const std::vector<double>& all_bias) {
    for (int64_t c = 0; c < d.c; ++c) {
      const int64_t g = n * d.g + c / d.channels_per_group();
      mean.push_back(static_cast<Acc>(all_mean[g]));
      scale.push_back(static_cast<Acc>(all_rstd[g] * weight[c]));
      bias.push_back(static_cast<Acc>(all_bias[c]));
    }
  }
};

template <typename T>
void normalize(const T* x, T* y, const GroupNormDims& d, const std::vector<double>& mean,
               const std::vector<double>& rstd, const std::vector<double>& weight, const std::vector<double>& bias,
               const ActChain& act, const ActChain& pre) {
  using Acc = acc_t<T>;
  std::vector<Affine<Acc>> affine;
  for (int64_t n = 0; n < d.n; ++n) affine.emplace_back(d, n, mean, rstd, weight, bias);
  if (!d.channels_last) {
    const Pieces pieces(d.n * d.c, d.s);
    parallel(pieces.count, [&](int64_t i) {
      Acc buffer[kBlock];
      pieces.each(i, [&](int64_t row, int64_t begin, int64_t end) {
        const Affine<Acc>& a = affine[row / d.c];
        const int64_t c = row % d.c;
        for (int64_t at = begin; at < end; at += kBlock) {
          const int64_t n = std::min(kBlock, end - at);
          load_block(x + row * d.s + at, buffer, n);
          activate_chain(pre, buffer, n);
          normalize_row(buffer, buffer, n, a.mean[c], a.scale[c], a.bias[c]);
          activate_chain(act, buffer, n);
          store_block(buffer, y + row * d.s + at, n);
        }
      });
    });
    return;
  }
  const int64_t per_piece = positions_per_piece(d);
  const int64_t pieces = (d.s + per_piece - 1) / per_piece;
  const int64_t per_block = std::max<int64_t>(1, kBlock / d.c);
  parallel(d.n * pieces, [&](int64_t i) {
    const int64_t n = i / pieces, begin = i % pieces * per_piece, end = std::min(d.s, begin + per_piece);
    const Affine<Acc>& a = affine[n];
    std::vector<Acc> buffer(per_block * d.c);
    for (int64_t p = begin; p < end; p += per_block) {
      const int64_t positions = std::min(per_block, end - p), count = positions * d.c, at = (n * d.s + p) * d.c;
      load_block(x + at, buffer.data(), count);
      activate_chain(pre, buffer.data(), count);
      normalize_columns(buffer.data(), buffer.data(), positions, d.c, a.mean.data(), a.scale.data(), a.bias.data());
      activate_chain(act, buffer.data(), count);
      store_block(buffer.data(), y + at, count);
    }
  });
}

Statistics normalize_into(const Tensor& x, const Tensor& y, const GroupNormDims& d, const OptTensor& weight,
                          const OptTensor& bias, double eps, const ActChain& act, const ActChain& pre) {
  Statistics s = compute_statistics(x, d, pre, eps, false);
  const std::vector<double> w = read_all(weight, d.c, 1.0), b = read_all(bias, d.c, 0.0);
  dispatch_dtype(d.dtype, [&](auto zero) {
    using T = decltype(zero);
    normalize(static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(y.mutable_data_ptr()), d, s.mean, s.rstd, w, b,
              act, pre);
  });
  return s;
}

// Nothing to reduce.
Statistics empty_statistics(const GroupNormDims& d) {
  const double nan = std::nan("");
  return {std::vector<double>(d.n * d.g, 0.0), std::vector<double>(d.n * d.g, nan),
          std::vector<double>(d.n * d.c, nan)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm_fwd_cpu(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias,
                                                      double eps, std::string act, std::string pre_act) {
  const char* const op = "group_norm";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias, eps);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act);
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  const Statistics s = d.numel() == 0
                           ? empty_statistics(d)
                           : normalize_into(dense_in(x, format), y, d, weight, bias, eps, act_chain, pre_chain);
  return {y, to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

std::tuple<Tensor, Tensor> group_norm_inplace_cpu(const char* op, const Tensor& x, int64_t num_groups,
                                                  const OptTensor& weight, const OptTensor& bias, double eps,
                                                  const std::string& act, const std::string& pre_act) {
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias, eps);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act);
  const Statistics s =
      d.numel() == 0 ? empty_statistics(d) : normalize_into(x, x, d, weight, bias, eps, act_chain, pre_chain);
  return {to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_mean_fwd_cpu(Tensor x, int64_t num_groups, OptTensor weight,
                                                                   OptTensor bias, double eps) {
  const char* const op = "group_norm_mean";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias, eps);
  const Statistics s =
      d.numel() == 0 ? empty_statistics(d) : compute_statistics(dense_in(x, format_of(x, d)), d, ActChain(), eps, true);
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
  const GroupNormDims d = check_group_norm("group_stats", x, num_groups, std::nullopt, std::nullopt, eps);
  const Statistics s = d.numel() == 0 ? empty_statistics(d)
                                      : compute_statistics(dense_in(x, format_of(x, d)), d, ActChain(), eps, false);
  return {to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

namespace {

Tensor group_stats_backward(Tensor dmean, Tensor drstd, Tensor x, Tensor mean, Tensor rstd, int64_t num_groups) {
  const char* const op = "group_stats_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups);
  const IntArray shape{d.n, d.g};
  check_statistics(op, "dmean", dmean, x, shape);
  check_statistics(op, "drstd", drstd, x, shape);
  check_statistics(op, "mean", mean, x, shape);
  check_statistics(op, "rstd", rstd, x, shape);
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() == 0) return dx;
  // dx = (x - mean) * slope + offset, both constant over a group: the normalize loop with other coefficients.
  const int64_t groups = d.n * d.g;
  const std::vector<double> dm = read_all(dmean, groups), dr = read_all(drstd, groups), r = read_all(rstd, groups);
  const std::vector<double> mu = read_all(mean, groups);
  const double m = double(d.channels_per_group()) * double(d.s);
  dispatch_dtype(d.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    parallel(d.n, [&](int64_t n) {
      for (int64_t i = 0; i < d.c * d.s; ++i) {
        const int64_t c = d.channels_last ? i % d.c : i / d.s;
        const int64_t g = n * d.g + c / d.channels_per_group(), at = n * d.c * d.s + i;
        const Acc centered = static_cast<Acc>(from[at]) - static_cast<Acc>(mu[g]);
        to[at] =
            static_cast<T>(centered * static_cast<Acc>(-dr[g] * r[g] * r[g] * r[g] / m) + static_cast<Acc>(dm[g] / m));
      }
    });
  });
  return dx;
}

// dy of one element, from a tensor or constant over a sample.
struct Gradient {
  const void* dy;                  // of x's type and layout, or null
  std::vector<double> per_sample;  // with dy == null: dout[n] / (C * S)
};

// Backward of act(GroupNorm(pre(x))): the sums of dz and dz * xhat per (sample, channel), the two terms of a group, dx.
template <typename T>
void backward(const T* x, const Gradient& gradient, T* dx, const GroupNormDims& d, const std::vector<double>& mean,
              const std::vector<double>& rstd, const std::vector<double>& weight, const std::vector<double>& bias,
              const ActChain& act, const ActChain& pre, std::vector<double>* dweight, std::vector<double>* dbias) {
  using Acc = acc_t<T>;
  const T* const dy = static_cast<const T*>(gradient.dy);
  // Units of work: parts of rows, or runs of positions; f(unit, n, c, at) visits each element of a unit.
  const int64_t per_piece = d.channels_last ? positions_per_piece(d) : kPiece;
  const int64_t length = d.s;
  const int64_t pieces = (length + per_piece - 1) / per_piece;
  const int64_t units = d.channels_last ? d.n * pieces : d.n * d.c * pieces;
  const auto visit = [&](int64_t unit, const auto& f) {
    const int64_t begin = unit % pieces * per_piece, end = std::min(length, begin + per_piece);
    if (d.channels_last) {
      const int64_t n = unit / pieces;
      for (int64_t p = begin; p < end; ++p) {
        for (int64_t c = 0; c < d.c; ++c) f(n, c, (n * d.s + p) * d.c + c);
      }
    } else {
      const int64_t row = unit / pieces;
      for (int64_t i = begin; i < end; ++i) f(row / d.c, row % d.c, row * d.s + i);
    }
  };
  const auto group_of = [&](int64_t n, int64_t c) { return n * d.g + c / d.channels_per_group(); };
  const auto derivative = [&](int64_t n, int64_t c, int64_t at, Acc* xhat, Acc* slope) {
    Acc u;
    *slope = chain_derivative(pre, static_cast<Acc>(x[at]), &u);
    const int64_t g = group_of(n, c);
    *xhat = (u - static_cast<Acc>(mean[g])) * static_cast<Acc>(rstd[g]);
    if (!dy) return static_cast<Acc>(gradient.per_sample[n]);
    Acc value;
    return static_cast<Acc>(dy[at]) *
           chain_derivative(act, *xhat * static_cast<Acc>(weight[c]) + static_cast<Acc>(bias[c]), &value);
  };

  const int64_t width = d.channels_last ? d.c : 1;  // channels that a unit sums
  std::vector<double> parts(units * width * 2, 0.0);
  parallel(units, [&](int64_t unit) {
    double* const sums = parts.data() + unit * width * 2;
    visit(unit, [&](int64_t n, int64_t c, int64_t at) {
      Acc xhat, slope;
      const Acc dz = derivative(n, c, at, &xhat, &slope);
      double* const s = sums + (d.channels_last ? c * 2 : 0);
      s[0] += dz;
      s[1] += double(dz) * xhat;
    });
  });
  std::vector<double> sums(d.n * d.c * 2, 0.0);
  for (int64_t unit = 0; unit < units; ++unit) {
    for (int64_t k = 0; k < width; ++k) {
      const int64_t row = d.channels_last ? unit / pieces * d.c + k : unit / pieces;
      sums[row * 2] += parts[(unit * width + k) * 2];
      sums[row * 2 + 1] += parts[(unit * width + k) * 2 + 1];
    }
  }
  std::vector<Acc> term(d.n * d.g), term_xhat(d.n * d.g);
  const double m = double(d.channels_per_group()) * double(d.s);
  for (int64_t n = 0; n < d.n; ++n) {
    for (int64_t c = 0; c < d.c; ++c) {
      const double* const s = sums.data() + (n * d.c + c) * 2;
      (*dbias)[c] += s[0];
      (*dweight)[c] += s[1];
      term[group_of(n, c)] += static_cast<Acc>(weight[c] * s[0] / m);
      term_xhat[group_of(n, c)] += static_cast<Acc>(weight[c] * s[1] / m);
    }
  }
  parallel(units, [&](int64_t unit) {
    visit(unit, [&](int64_t n, int64_t c, int64_t at) {
      Acc xhat, slope;
      const Acc dz = derivative(n, c, at, &xhat, &slope);
      const int64_t g = group_of(n, c);
      dx[at] = static_cast<T>(slope * static_cast<Acc>(rstd[g]) *
                              (static_cast<Acc>(weight[c]) * dz - (term[g] + xhat * term_xhat[g])));
    });
  });
}

std::tuple<Tensor, Tensor, Tensor> run_backward(const Tensor& x, const Gradient& gradient, const GroupNormDims& d,
                                                const Tensor& mean, const Tensor& rstd, const OptTensor& weight,
                                                const OptTensor& bias, const ActChain& act, const ActChain& pre) {
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  std::vector<double> dweight(d.c, 0.0), dbias(d.c, 0.0);
  if (d.numel() > 0) {
    dispatch_dtype(d.dtype, [&](auto zero) {
      using T = decltype(zero);
      backward(static_cast<const T*>(dense.const_data_ptr()), gradient, static_cast<T*>(dx.mutable_data_ptr()), d,
               read_all(mean, d.n * d.g), read_all(rstd, d.n * d.g), read_all(weight, d.c, 1.0),
               read_all(bias, d.c, 0.0), act, pre, &dweight, &dbias);
    });
  }
  const ScalarType type = affine_type(x, weight, bias);
  Tensor dweight_out = empty_like_shape(x, {d.c}, type), dbias_out = empty_like_shape(x, {d.c}, type);
  for (int64_t c = 0; c < d.c; ++c) {
    write_double(dweight_out, c, dweight[c]);
    write_double(dbias_out, c, dbias[c]);
  }
  return {dx, dweight_out, dbias_out};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                                       int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       std::string act, std::string pre_act) {
  const char* const op = "group_norm_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act);
  check_gradient(op, "dy", dy, x);
  check_statistics(op, "mean", mean, x, {d.n, d.g});
  check_statistics(op, "rstd", rstd, x, {d.n, d.g});
  const Tensor dense_dy = dense_in(dy, format_of(x, d));
  return run_backward(x, {dense_dy.const_data_ptr(), {}}, d, mean, rstd, weight, bias, act_chain, pre_chain);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_mean_backward(Tensor dout, Tensor x, Tensor channel_mean, Tensor mean,
                                                            Tensor rstd, int64_t num_groups, OptTensor weight) {
  const char* const op = "group_norm_mean_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight);
  check_same_device(op, "dout", dout, x);
  check_shape(op, "dout", dout, {d.n});
  check_dtype(op, "dout", dout);
  check_statistics(op, "channel_mean", channel_mean, x, {d.n, d.c});
  check_statistics(op, "mean", mean, x, {d.n, d.g});
  check_statistics(op, "rstd", rstd, x, {d.n, d.g});
  Gradient gradient{nullptr, read_all(dout, d.n)};
  for (double& v : gradient.per_sample) v /= double(d.c) * double(d.s);
  return run_backward(x, gradient, d, mean, rstd, weight, std::nullopt, ActChain(), ActChain());
}

Tensor group_norm(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps, std::string act) {
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
  m.impl("group_norm_fwd", TORCH_BOX(&kgopt::group_norm_fwd_cpu));
  m.impl("group_norm_backward", TORCH_BOX(&kgopt::group_norm_backward));
  m.impl("group_norm_mean", TORCH_BOX(&kgopt::group_norm_mean));
  m.impl("group_norm_mean_fwd", TORCH_BOX(&kgopt::group_norm_mean_fwd_cpu));
  m.impl("group_norm_mean_backward", TORCH_BOX(&kgopt::group_norm_mean_backward));
}
