// The backward of a norm, a sum and a PReLU or LeakyReLU on the CPU: a pass ahead of the norm's own.
#include "groupnorm/api/cpu_units.h"
#include "groupnorm/api/group_norm_cpu.h"

namespace kgopt {
namespace {

using namespace cpu;

// Of a PReLU of z = GroupNorm(x) + residual: dz, and the sums of dy * z where z is not above 0, by channel.
template <typename T>
void prelu_gradient(const T* x, const T* dy, const T* residual, T* dz, const GroupNormDims& d,
                    const std::vector<double>& mean, const std::vector<double>& rstd, const std::vector<double>& weight,
                    const std::vector<double>& bias, const std::vector<double>& slopes, std::vector<double>* sums) {
  using Acc = acc_t<T>;
  const Tiles t(d, d.channels_per_group());
  Table<Acc> table(t, d.n, true);
  for (int64_t u = 0; u < t.units; ++u) {
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t channel = u * t.rows + row, c = channel % d.c, g = channel / d.channels_per_group();
      const int64_t at = t.table_row(u) + row;
      table.mean[at] = static_cast<Acc>(mean[g]);
      table.scale[at] = static_cast<Acc>(rstd[g] * weight[c]);
      table.bias[at] = static_cast<Acc>(bias[c]);
      table.slope[at] = static_cast<Acc>(slopes[c]);
    }
    table.repeat(t, u);
  }
  // By piece, and by channel within it.
  const int64_t slots = d.channels_last ? d.c * t.pieces : t.rows * t.pieces_per_row;
  std::vector<double> parts(t.units * slots);
  parallel(t.units * t.pieces, t.piece, [&](int64_t i) {
    const int64_t unit = i / t.pieces, p = i % t.pieces;
    const Buffers<Acc, 4> b(t);
    const Acc* const slope = table.slope.data() + t.table_row(unit);
    std::vector<Acc> columns(t.width);
    t.each_block(t.range(p), [&](int64_t at, int64_t n) {
      const int64_t first = unit * t.length + at;
      normalize_block(t, table, unit, at, n, view_block(x + first, b[0], n), b[1]);
      Acc* const z = b[1];
      if (residual) {
        const Acc* const r = view_block(residual + first, b[0], n);
        for (int64_t k = 0; k < n; ++k) z[k] += r[k];
      }
      const Acc* const g = view_block(dy + first, b[2], n);
      Acc* const to = target_block(dz + first, b[3]);
      if (d.channels_last) {
        Loops<Acc>::prelu_gradient_columns(z, g, to, n, t.width, slope, columns.data());
      } else {
        t.each_row(at, n, [&](int64_t row, int64_t offset, int64_t count) {
          parts[unit * slots + row * t.pieces_per_row + p % t.pieces_per_row] +=
              Loops<Acc>::prelu_gradient_row(z + offset, g + offset, to + offset, count, slope[row]);
        });
      }
      store_block(to, dz + first, n);
    });
    for (int64_t k = 0; k < t.width; ++k) parts[unit * slots + p * d.c + k % d.c] += columns[k];
  });
  const int64_t count = d.channels_last ? t.pieces : t.pieces_per_row;
  for (int64_t channel = 0; channel < d.n * d.c; ++channel) {
    const int64_t unit = channel / t.rows, row = channel % t.rows;
    for (int64_t p = 0; p < count; ++p) {
      (*sums)[channel % d.c] += parts[unit * slots + (d.channels_last ? p * d.c + row : row * count + p)];
    }
  }
}

// dx, dz, dweight and dbias, and the sums of the slopes' gradients, by channel.
std::tuple<Tensor, Tensor, Tensor, Tensor> run_sum_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                            const Tensor& rstd, const GroupNormDims& d,
                                                            const OptTensor& weight, const OptTensor& bias,
                                                            const OptTensor& residual,
                                                            const std::vector<double>& slopes,
                                                            std::vector<double>* sums) {
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  const OptTensor added = residual ? OptTensor(dense_in(*residual, format)) : std::nullopt;
  Tensor dz = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() > 0) {
    dispatch_dtype(d.dtype, [&](auto zero) {
      using T = decltype(zero);
      prelu_gradient(static_cast<const T*>(dense.const_data_ptr()), static_cast<const T*>(dense_dy.const_data_ptr()),
                     added ? static_cast<const T*>(added->const_data_ptr()) : nullptr,
                     static_cast<T*>(dz.mutable_data_ptr()), d, read_all(mean, d.n * d.g), read_all(rstd, d.n * d.g),
                     read_all(weight, d.c, 1.0), read_all(bias, d.c, 0.0), slopes, sums);
    });
  }
  const auto [dx, dweight, dbias] = group_norm_backward_cpu(dz, x, mean, rstd, d.g, weight, bias, "none", "none");
  return {dx, dz, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_norm_prelu_backward(Tensor dy, Tensor x, Tensor mean,
                                                                             Tensor rstd, Tensor slope,
                                                                             int64_t num_groups, OptTensor weight,
                                                                             OptTensor bias, OptTensor residual) {
  const char* const op = "group_norm_prelu_backward";
  const GroupNormDims d = check_prelu_backward(op, dy, x, mean, rstd, slope, num_groups, weight, bias, residual);
  std::vector<double> sums(d.c);
  const auto [dx, dz, dweight, dbias] =
      run_sum_backward(dy, x, mean, rstd, d, weight, bias, residual, read_slopes(slope, d.c), &sums);
  if (slope.numel() == 1) {
    for (int64_t c = 1; c < d.c; ++c) sums[0] += sums[c];
    sums.resize(1);
  }
  Tensor dslope = empty_like_shape(slope, sizes_of(slope));
  write_all(dslope, sums);
  return {dx, dz, dslope, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_add_leaky_relu_backward(Tensor dy, Tensor x, Tensor residual,
                                                                              Tensor mean, Tensor rstd,
                                                                              int64_t num_groups, OptTensor weight,
                                                                              OptTensor bias, double slope) {
  const char* const op = "group_norm_add_leaky_relu_backward";
  const GroupNormDims d = check_sum_backward(op, dy, x, mean, rstd, num_groups, weight, bias, residual);
  std::vector<double> sums(d.c);
  return run_sum_backward(dy, x, mean, rstd, d, weight, bias, residual, std::vector<double>(d.c, slope), &sums);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("group_norm_prelu_backward", TORCH_BOX(&kgopt::group_norm_prelu_backward));
  m.impl("group_norm_add_leaky_relu_backward", TORCH_BOX(&kgopt::group_norm_add_leaky_relu_backward));
}
