// Reductions on the CPU, over [outer][reduced][inner].
#include "../common/cpu_block.h"
#include "reduce_checks.h"

namespace kgopt {
namespace {

using namespace cpu;

// Calls f(o, i_begin, i_end) over all results in parallel, in runs of inner that fit a block.
template <typename F>
void each_run(const ReduceShape& s, const F& f) {
  const int64_t runs = (s.inner + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, s.reduced * std::min(s.inner, kBlock)));
  torch::stable::parallel_for(0, s.outer * runs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t i = u % runs * kBlock;
      f(u / runs, i, std::min(s.inner, i + kBlock));
    }
  });
}

template <typename Acc>
Acc finite_or_zero(Acc m) {
  return std::isinf(m) ? Acc(0) : m;
}

// One contiguous row, a block at a time; blocks are added in double.
template <typename T>
acc_t<T> row_logsumexp(const T* from, int64_t length) {
  using Acc = acc_t<T>;
  Acc buffer[kBlock];
  Acc maximum = -std::numeric_limits<Acc>::infinity();
  double sum = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t at = 0; at < length; at += kBlock) {
      const int64_t n = std::min(kBlock, length - at);
      load_block(from + at, buffer, n);
      if constexpr (std::is_same_v<Acc, float>) {
        if (pass == 0) {
          maximum = row_maximum(buffer, n, maximum);
        } else {
          sum += row_exponentials(buffer, n, finite_or_zero(maximum));
        }
      } else {
        for (int64_t i = 0; i < n; ++i) {
          if (pass == 0) {
            maximum = buffer[i] > maximum ? buffer[i] : maximum;
          } else {
            sum += std::exp(buffer[i] - finite_or_zero(maximum));
          }
        }
      }
    }
  }
  return static_cast<Acc>(std::log(sum) + finite_or_zero(maximum));
}

Tensor logsumexp(Tensor x, IntArray dim, bool keepdim) {
  const char* const op = "logsumexp";
  const ReduceShape s = check_reduce(op, "dim", x, dim, keepdim);
  const Tensor dense = reduce_input(x, s);
  Tensor y = empty_like_shape(x, s.out_sizes);
  if (y.numel() == 0) return y;
  dispatch_dtype(check_dtype(op, "x", x), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    each_run(s, [&](int64_t o, int64_t begin, int64_t end) {
      const Acc lowest = -std::numeric_limits<Acc>::infinity();
      if (s.inner == 1) {
        to[o] = static_cast<T>(row_logsumexp(from + o * s.reduced, s.reduced));
        return;
      }
      const int64_t n = end - begin;
      std::vector<Acc> maximum(n, lowest), row(n);
      std::vector<double> sum(n, 0.0);
      for (int pass = 0; pass < 2; ++pass) {
        for (int64_t r = 0; r < s.reduced; ++r) {
          load_block(from + (o * s.reduced + r) * s.inner + begin, row.data(), n);
          if (pass == 0) {
            for (int64_t i = 0; i < n; ++i) maximum[i] = row[i] > maximum[i] ? row[i] : maximum[i];
          } else if constexpr (std::is_same_v<Acc, float>) {
            add_exponentials(row.data(), maximum.data(), sum.data(), n);
          } else {
            for (int64_t i = 0; i < n; ++i) sum[i] += std::exp(row[i] - finite_or_zero(maximum[i]));
          }
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        to[o * s.inner + begin + i] = static_cast<T>(static_cast<Acc>(std::log(sum[i]) + finite_or_zero(maximum[i])));
      }
    });
  });
  return y;
}

Tensor logsumexp_backward(Tensor dy, Tensor x, Tensor y, IntArray dim, bool keepdim) {
  const char* const op = "logsumexp_backward";
  const ReduceShape s = check_reduce(op, "dim", x, dim, keepdim);
  check_reduce_gradient(op, "dy", dy, x, s);
  check_reduce_gradient(op, "y", y, x, s);
  const Tensor dense = reduce_input(x, s);
  const Tensor dense_dy = dense_in(dy, MemoryFormat::Contiguous), dense_y = dense_in(y, MemoryFormat::Contiguous);
  Tensor dx = reduce_gradient_buffer(x, sizes_of(x), s);
  dispatch_dtype(check_dtype(op, "x", x), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    const T* const gradient = static_cast<const T*>(dense_dy.const_data_ptr());
    const T* const result = static_cast<const T*>(dense_y.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    each_run(s, [&](int64_t o, int64_t begin, int64_t end) {
      for (int64_t r = 0; r < s.reduced; ++r) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t at = (o * s.reduced + r) * s.inner + i;
          const Acc lse = static_cast<Acc>(result[o * s.inner + i]);
          // All of a row at -inf: no gradient rather than NaN.
          const Acc shift = lse == -std::numeric_limits<Acc>::infinity() ? Acc(0) : lse;
          to[at] = static_cast<T>(static_cast<Acc>(gradient[o * s.inner + i]) *
                                  std::exp(static_cast<Acc>(from[at]) - shift));
        }
      }
    });
  });
  return reduce_unpermute(dx, s);
}

Tensor mean(Tensor x, IntArray dims, bool keepdim) {
  const char* const op = "mean";
  const ReduceShape s = check_reduce(op, "dims", x, dims, keepdim);
  const Tensor dense = reduce_input(x, s);
  Tensor y = empty_like_shape(x, s.out_sizes);
  if (y.numel() == 0) return y;
  dispatch_dtype(check_dtype(op, "x", x), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    each_run(s, [&](int64_t o, int64_t begin, int64_t end) {
      const int64_t n = end - begin;
      if (s.inner == 1) {
        // Blocks of a row, their sums added in double.
        double sum = 0;
        Acc buffer[kBlock];
        for (int64_t r = 0; r < s.reduced; r += kBlock) {
          const int64_t count = std::min(kBlock, s.reduced - r);
          load_block(from + o * s.reduced + r, buffer, count);
          if constexpr (std::is_same_v<Acc, float>) {
            sum += shifted_sums(buffer, count, 0.f).sum;
          } else {
            for (int64_t i = 0; i < count; ++i) sum += buffer[i];
          }
        }
        to[o] = static_cast<T>(static_cast<Acc>(sum / double(s.reduced)));
        return;
      }
      std::vector<double> sum(n, 0.0);
      std::vector<Acc> row(n);
      for (int64_t r = 0; r < s.reduced; ++r) {
        load_block(from + (o * s.reduced + r) * s.inner + begin, row.data(), n);
        for (int64_t i = 0; i < n; ++i) sum[i] += row[i];
      }
      for (int64_t i = 0; i < n; ++i) {
        to[o * s.inner + begin + i] = static_cast<T>(static_cast<Acc>(sum[i] / double(s.reduced)));
      }
    });
  });
  return y;
}

Tensor mean_backward(Tensor dy, IntArray sizes, IntArray dims, bool keepdim) {
  const char* const op = "mean_backward";
  const Dtype dtype = check_dtype(op, "dy", dy);
  const ReduceShape s = check_reduce_sizes(op, "dims", sizes, dims, keepdim, false);
  KGOPT_CHECK(sizes_of(dy) == s.out_sizes, op, ": dy has shape ", shape_string(dy), ", expected ",
              list_string(s.out_sizes));
  const Tensor dense_dy = dense_in(dy, MemoryFormat::Contiguous);
  Tensor dx = reduce_gradient_buffer(dy, sizes, s);
  dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const gradient = static_cast<const T*>(dense_dy.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    each_run(s, [&](int64_t o, int64_t begin, int64_t end) {
      for (int64_t r = 0; r < s.reduced; ++r) {
        for (int64_t i = begin; i < end; ++i) {
          to[(o * s.reduced + r) * s.inner + i] =
              static_cast<T>(static_cast<Acc>(gradient[o * s.inner + i]) / static_cast<Acc>(s.reduced));
        }
      }
    });
  });
  return reduce_unpermute(dx, s);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("logsumexp", TORCH_BOX(&kgopt::logsumexp));
  m.impl("logsumexp_backward", TORCH_BOX(&kgopt::logsumexp_backward));
  m.impl("mean", TORCH_BOX(&kgopt::mean));
  m.impl("mean_backward", TORCH_BOX(&kgopt::mean_backward));
}
