// GroupNorm's gradients on the CPU, in the pieces of cpu_units.h and as independent of the number of threads.
#include "groupnorm/api/cpu_units.h"
#include "groupnorm/api/group_norm_cpu.h"

namespace kgopt {
namespace {

using namespace cpu;

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
    parallel(t.units * t.pieces, t.piece, [&](int64_t i) {
      apply_piece<T>(t, table, from, nullptr, to, ActChain(), ActChain(), i / t.pieces, i % t.pieces);
    });
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

}  // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm_backward_cpu(Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                                           int64_t num_groups, OptTensor weight, OptTensor bias,
                                                           std::string act, std::string pre_act) {
  const char* const op = "group_norm_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act, "pre_act");
  check_like(op, "dy", dy, x);
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

namespace {

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

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("group_stats_backward", TORCH_BOX(&kgopt::group_stats_backward));
  m.impl("group_norm_backward", TORCH_BOX(&kgopt::group_norm_backward_cpu));
  m.impl("group_norm_mean_backward", TORCH_BOX(&kgopt::group_norm_mean_backward));
}
