// GroupNorm on the CPU. Work is cut into pieces of fixed size, whatever the number of threads, and merged in order:
// batch 1 uses every core, and the result does not depend on how many there are.
#include "groupnorm/api/group_norm_cpu.h"

#include "groupnorm/api/cpu_units.h"

namespace kgopt {
namespace {

using namespace cpu;

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

// y = act(PReLU(GroupNorm(pre(x)) + residual)); y may be x. All dense, in the layout that d says. Without slopes there
// is no PReLU.
Statistics normalize_into(const Tensor& x, const Tensor& y, const GroupNormDims& d, const OptTensor& weight,
                          const OptTensor& bias, double eps, const ActChain& act, const ActChain& pre,
                          const OptTensor& residual = std::nullopt, const OptTensor& slope = std::nullopt) {
  Statistics s(d);
  if (d.numel() == 0) return s;
  const std::vector<double> w = read_all(weight, d.c, 1.0), b = read_all(bias, d.c, 0.0);
  const std::vector<double> slopes = slope ? read_slopes(*slope, d.c) : std::vector<double>();
  dispatch_dtype(d.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(x.const_data_ptr());
    const T* const added = residual ? static_cast<const T*>(residual->const_data_ptr()) : nullptr;
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    const Tiles t(d, d.channels_per_group());
    RowMoments<T> moments(t, from, pre);
    Table<Acc> table(t, d.n, slope.has_value());
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
        if (slope) table.slope[at] = static_cast<Acc>(slopes[c]);
      }
      table.repeat(t, unit);
    };
    two_passes(
        t, sizeof(T), [&](int64_t u, int64_t p) { moments.piece(u, p); }, merge,
        [&](int64_t u, int64_t p) { apply_piece(t, table, from, added, to, act, pre, u, p); });
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

Tensor group_norm(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps, std::string act) {
  return std::get<0>(group_norm_fwd_cpu(x, num_groups, weight, bias, eps, act, "none"));
}

std::tuple<Tensor, Tensor, Tensor> group_norm_add_fwd(Tensor x, Tensor residual, int64_t num_groups, OptTensor weight,
                                                      OptTensor bias, double eps, std::string act) {
  const char* const op = "group_norm_add";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  check_like(op, "residual", residual, x);
  const ActChain chain = check_act(op, act);
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  const Statistics s =
      normalize_into(dense_in(x, format), y, d, weight, bias, eps, chain, ActChain(), dense_in(residual, format));
  return {y, to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

Tensor group_norm_add(Tensor x, Tensor residual, int64_t num_groups, OptTensor weight, OptTensor bias, double eps,
                      std::string act) {
  return std::get<0>(group_norm_add_fwd(x, residual, num_groups, weight, bias, eps, act));
}

std::tuple<Tensor, Tensor, Tensor> group_norm_prelu_fwd(Tensor x, Tensor slope, int64_t num_groups, OptTensor weight,
                                                        OptTensor bias, double eps, OptTensor residual) {
  const char* const op = "group_norm_prelu";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  check_slope(op, slope, x, d.c);
  if (residual) check_like(op, "residual", *residual, x);
  const MemoryFormat format = format_of(x, d);
  const OptTensor added = residual ? OptTensor(dense_in(*residual, format)) : std::nullopt;
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  const Statistics s =
      normalize_into(dense_in(x, format), y, d, weight, bias, eps, ActChain(), ActChain(), added, slope);
  return {y, to_tensor(x, s.mean, {d.n, d.g}), to_tensor(x, s.rstd, {d.n, d.g})};
}

Tensor group_norm_prelu(Tensor x, Tensor slope, int64_t num_groups, OptTensor weight, OptTensor bias, double eps,
                        OptTensor residual) {
  return std::get<0>(group_norm_prelu_fwd(x, slope, num_groups, weight, bias, eps, residual));
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
  m.impl("group_norm", TORCH_BOX(&kgopt::group_norm));
  m.impl("group_norm_moments", TORCH_BOX(&kgopt::group_norm_moments));
  m.impl("group_norm_fwd", TORCH_BOX(&kgopt::group_norm_fwd_cpu));
  m.impl("group_norm_add", TORCH_BOX(&kgopt::group_norm_add));
  m.impl("group_norm_add_fwd", TORCH_BOX(&kgopt::group_norm_add_fwd));
  m.impl("group_norm_prelu", TORCH_BOX(&kgopt::group_norm_prelu));
  m.impl("group_norm_prelu_fwd", TORCH_BOX(&kgopt::group_norm_prelu_fwd));
  m.impl("explain_group_norm", TORCH_BOX(&kgopt::explain_group_norm));
  m.impl("group_norm_mean", TORCH_BOX(&kgopt::group_norm_mean));
  m.impl("group_norm_mean_fwd", TORCH_BOX(&kgopt::group_norm_mean_fwd_cpu));
}
