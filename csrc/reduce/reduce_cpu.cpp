// Reductions on the CPU, over [outer][repeats][kept][reduced][inner]. Work is cut into pieces of fixed size, whatever
// the number of threads, whose results are merged in order.
#include "common/cpu/block.h"
#include "reduce/reduce_checks.h"

namespace kgopt {
namespace {

using namespace cpu;

constexpr int64_t kPiece = 32768;  // elements of a piece, about
constexpr int kGroups = 2;         // of neighbouring reduced dims

// A row is one index of [outer][repeats][kept]. With inner == 1 a piece is part of a row, or `batch` short rows. Else
// it is `length` steps of the reduced dim of `run` neighbouring results.
struct Cut {
  int64_t rows, repeats, kept, reduced, inner;
  int64_t results;  // in all
  int64_t batch = 1, run = 1, runs = 1;
  int64_t width = 1;       // results side by side as one row of parameters: run, repeated where it is narrow and dense
  int64_t length, pieces;  // steps of the reduced dim in a piece, pieces of a row
  int64_t parts;           // pieces of a result

  explicit Cut(const ReduceShape& s)
      : rows(s.outer * s.repeats * s.kept), repeats(s.repeats), kept(s.kept), reduced(s.reduced), inner(s.inner) {
    if (inner == 1) {
      batch = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, reduced));
      length = kPiece;
    } else {
      run = std::min(inner, kBlock);
      runs = (inner + run - 1) / run;
      width = runs == 1 ? run * std::max<int64_t>(1, 256 / run) : run;
      length = std::max<int64_t>(128, kPiece / run);
    }
    pieces = std::max<int64_t>(1, (reduced + length - 1) / length);
    parts = repeats * pieces;
    results = s.outer * kept * inner;
  }

  struct Piece {
    int64_t index;          // of the row
    int64_t row, batch;     // rows
    int64_t column, count;  // results side by side
    int64_t begin, length;  // of the reduced dim
  };
  template <typename F>
  void each(const F& f) const {
    const int64_t units = (rows + batch - 1) / batch * runs * pieces;
    parallel(units, std::min(length, reduced) * run * batch, [&](int64_t u) {
      const int64_t p = u % pieces, column = u / pieces % runs * run, row = u / pieces / runs * batch;
      f(Piece{p, row, std::min(batch, rows - row), column, std::min(run, inner - column), p * length,
              std::min(length, reduced - p * length)});
    });
  }
  int64_t offset(const Piece& p) const { return (p.row * reduced + p.begin) * inner + p.column; }
  // The first result of a row; and where this piece's part of it is, in [results][parts].
  int64_t result(int64_t row) const { return (row / (repeats * kept) * kept + row % kept) * inner; }
  int64_t part(const Piece& p, int64_t row) const {
    return (result(row) + p.column) * parts + row / kept % repeats * pieces + p.index;
  }

  // f(offset in the tensor, steps, stride, width): blocks of a piece as `steps` rows of `width` columns. Blocks that a
  // buffer holds are dense; without one (direct) they may be strided.
  template <typename F>
  void each_block(const Piece& p, bool direct, const F& f) const {
    const int64_t first = offset(p);
    if (runs > 1 && direct) return f(first, p.length, inner, p.count);
    if (runs > 1) {
      for (int64_t r = 0; r < p.length; ++r) f(first + r * inner, 1, p.count, p.count);
      return;
    }
    const int64_t steps = std::max<int64_t>(1, kBlock / width), total = p.length * inner, whole = total / width;
    for (int64_t r = 0; r < whole; r += steps) f(first + r * width, std::min(steps, whole - r), width, width);
    if (total > whole * width) f(first + whole * width, 1, width, total - whole * width);
  }
  // value(result) for the columns of a piece, repeated.
  template <typename T, typename F>
  std::vector<T> columns(const Piece& p, const F& value) const {
    std::vector<T> v(width);
    for (int64_t i = 0; i < (runs > 1 ? p.count : width); ++i) v[i] = value(result(p.row) + p.column + i % p.count);
    return v;
  }
};

template <typename Acc>
Acc finite_or_zero(Acc m) {
  return std::isinf(m) ? Acc(0) : m;
}

// max and sum of exp(x - max), with 0 for an infinite maximum.
struct Exponentials {
  double maximum = -std::numeric_limits<double>::infinity(), sum = 0;

  void merge(double other_maximum, double other_sum) {
    // Nothing, or only -inf: its shift of 0 may lie so far off that the factor below overflows.
    if (other_sum == 0) return;
    if (sum == 0) {
      *this = {other_maximum, other_sum};
      return;
    }
    const double largest = other_maximum > maximum ? other_maximum : maximum, shift = finite_or_zero(largest);
    sum = sum * std::exp(finite_or_zero(maximum) - shift) + other_sum * std::exp(finite_or_zero(other_maximum) - shift);
    maximum = largest;
  }
  double value() const { return std::log(sum) + finite_or_zero(maximum); }
};

// Of columns that repeat, the first ones gather the others: combine(column, other).
template <typename F>
void fold(int64_t run, int64_t width, const F& combine) {
  for (int64_t i = run; i < width; ++i) combine(i % run, i);
}

// Stores finish(parts of a result) for each result.
template <typename T, typename Part, typename F>
void store_results(const Cut& cut, T* to, const std::vector<Part>& parts, const F& finish) {
  const int64_t block = 1024;
  parallel((cut.results + block - 1) / block, block * cut.parts, [&](int64_t b) {
    for (int64_t i = b * block; i < std::min(cut.results, (b + 1) * block); ++i) {
      to[i] = static_cast<T>(static_cast<acc_t<T>>(finish(parts.data() + i * cut.parts)));
    }
  });
}

Tensor logsumexp(Tensor x, IntArray dim, bool keepdim) {
  const char* const op = "logsumexp";
  const ReduceShape s = check_reduce(op, "dim", x, dim, keepdim, kGroups);
  const Tensor dense = reduce_input(x, s);
  Tensor y = empty_like_shape(x, s.out_sizes);
  if (y.numel() == 0) return y;
  dispatch_dtype(check_dtype(op, "x", x), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    const Cut cut(s);
    std::vector<Exponentials> parts(cut.results * cut.parts);
    const bool direct = std::is_same_v<T, Acc>;
    const Acc lowest = -std::numeric_limits<Acc>::infinity();
    cut.each([&](const Cut::Piece& p) {
      alignas(64) Acc buffer[kBlock];
      if (cut.inner == 1) {
        for (int64_t at = 0; at < p.length; at += kBlock) {
          const int64_t n = std::min(kBlock, p.length - at);
          const Acc* const block = view_block(from + cut.offset(p) + at, buffer, n * p.batch);
          for (int64_t k = 0; k < p.batch; ++k) {
            const Acc* const row = block + k * n;
            const Acc maximum = Loops<Acc>::row_maximum(row, n, lowest);
            parts[cut.part(p, p.row + k)].merge(maximum, Loops<Acc>::row_exponentials(row, n, finite_or_zero(maximum)));
          }
        }
        return;
      }
      std::vector<Acc> maximum(cut.width, lowest), sum(cut.width);
      cut.each_block(p, direct, [&](int64_t at, int64_t steps, int64_t stride, int64_t width) {
        Loops<Acc>::column_maxima(view_block(from + at, buffer, steps * width), steps, stride, width, maximum.data());
      });
      fold(cut.run, cut.width, [&](int64_t c, int64_t i) { maximum[c] = std::max(maximum[c], maximum[i]); });
      std::vector<Acc> shift(cut.width);
      for (int64_t i = 0; i < cut.width; ++i) shift[i] = finite_or_zero(maximum[i % cut.run]);
      cut.each_block(p, direct, [&](int64_t at, int64_t steps, int64_t stride, int64_t width) {
        const Acc* const block = view_block(from + at, buffer, steps * width);
        Loops<Acc>::column_exponentials(block, steps, stride, width, shift.data(), sum.data());
      });
      fold(cut.run, cut.width, [&](int64_t c, int64_t i) { sum[c] += sum[i]; });
      for (int64_t c = 0; c < p.count; ++c) {
        parts[cut.part(p, p.row) + c * cut.parts] = {double(maximum[c]), double(sum[c])};
      }
    });
    store_results(cut, static_cast<T*>(y.mutable_data_ptr()), parts, [&](const Exponentials* part) {
      Exponentials all;
      for (int64_t k = 0; k < cut.parts; ++k) all.merge(part[k].maximum, part[k].sum);
      return all.value();
    });
  });
  return y;
}

Tensor logsumexp_backward(Tensor dy, Tensor x, Tensor y, IntArray dim, bool keepdim) {
  const char* const op = "logsumexp_backward";
  const ReduceShape s = check_reduce(op, "dim", x, dim, keepdim, kGroups);
  check_reduce_gradient(op, "dy", dy, x, s);
  check_reduce_gradient(op, "y", y, x, s);
  const Tensor dense = reduce_input(x, s);
  const Tensor dense_dy = dense_in(dy, MemoryFormat::Contiguous), dense_y = dense_in(y, MemoryFormat::Contiguous);
  Tensor dx = reduce_gradient_buffer(x, sizes_of(x), s);
  if (dx.numel() == 0) return reduce_unpermute(dx, s);
  dispatch_dtype(check_dtype(op, "x", x), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    const T* const gradient = static_cast<const T*>(dense_dy.const_data_ptr());
    const T* const result = static_cast<const T*>(dense_y.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    const auto shift_of = [&](int64_t i) { return static_cast<Acc>(result[i]); };  // -inf: NaN, as in PyTorch
    const Cut cut(s);
    const bool direct = std::is_same_v<T, Acc>;
    cut.each([&](const Cut::Piece& p) {
      alignas(64) Acc buffer[kBlock];
      if (cut.inner == 1) {
        for (int64_t at = 0; at < p.length; at += kBlock) {
          const int64_t n = std::min(kBlock, p.length - at), first = cut.offset(p) + at;
          const Acc* const block = view_block(from + first, buffer, n * p.batch);
          Acc* const target = target_block(to + first, buffer);
          for (int64_t k = 0; k < p.batch; ++k) {
            const int64_t i = cut.result(p.row + k);
            Loops<Acc>::row_softmax(block + k * n, target + k * n, n, shift_of(i), static_cast<Acc>(gradient[i]));
          }
          store_block(target, to + first, n * p.batch);
        }
        return;
      }
      const std::vector<Acc> shift = cut.columns<Acc>(p, shift_of);
      const std::vector<Acc> g = cut.columns<Acc>(p, [&](int64_t i) { return static_cast<Acc>(gradient[i]); });
      cut.each_block(p, direct, [&](int64_t at, int64_t steps, int64_t stride, int64_t width) {
        const Acc* const block = view_block(from + at, buffer, steps * width);
        Acc* const target = target_block(to + at, buffer);
        Loops<Acc>::column_softmax(block, target, steps, stride, width, shift.data(), g.data());
        store_block(target, to + at, steps * width);
      });
    });
  });
  return reduce_unpermute(dx, s);
}

Tensor mean(Tensor x, IntArray dims, bool keepdim) {
  const char* const op = "mean";
  const ReduceShape s = check_reduce(op, "dims", x, dims, keepdim, kGroups);
  const Tensor dense = reduce_input(x, s);
  Tensor y = empty_like_shape(x, s.out_sizes);
  if (y.numel() == 0) return y;
  dispatch_dtype(check_dtype(op, "x", x), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    const Cut cut(s);
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    const auto finish = [&](double sum) { return static_cast<T>(static_cast<Acc>(sum / double(s.reduced_count()))); };
    // A result of a single part needs no place for it.
    std::vector<double> parts(cut.parts == 1 ? 0 : cut.results * cut.parts);
    cut.each([&](const Cut::Piece& p) {
      alignas(64) Acc buffer[kBlock];
      if (cut.inner == 1) {
        double sums[kBlock];
        std::fill_n(sums, p.batch, 0.0);
        for (int64_t at = 0; at < p.length; at += kBlock) {
          const int64_t n = std::min(kBlock, p.length - at);
          Loops<Acc>::row_sums(view_block(from + cut.offset(p) + at, buffer, n * p.batch), p.batch, n, sums);
        }
        for (int64_t k = 0; k < p.batch; ++k) {
          if (cut.parts == 1) {
            to[cut.result(p.row + k)] = finish(sums[k]);
          } else {
            parts[cut.part(p, p.row + k)] = sums[k];
          }
        }
        return;
      }
      std::vector<Acc> sum(cut.width);
      cut.each_block(p, std::is_same_v<T, Acc>, [&](int64_t at, int64_t steps, int64_t stride, int64_t width) {
        Loops<Acc>::column_sums(view_block(from + at, buffer, steps * width), steps, stride, width, sum.data());
      });
      fold(cut.run, cut.width, [&](int64_t c, int64_t i) { sum[c] += sum[i]; });
      const int64_t first = cut.part(p, p.row);
      for (int64_t c = 0; c < p.count; ++c) {
        if (cut.parts == 1) {
          to[first + c] = finish(sum[c]);
        } else {
          parts[first + c * cut.parts] = sum[c];
        }
      }
    });
    if (cut.parts == 1) return;
    store_results(cut, to, parts, [&](const double* part) {
      double sum = 0;
      for (int64_t k = 0; k < cut.parts; ++k) sum += part[k];
      return sum / double(s.reduced_count());
    });
  });
  return y;
}

Tensor mean_backward(Tensor dy, IntArray sizes, IntArray dims, bool keepdim) {
  const char* const op = "mean_backward";
  const Dtype dtype = check_dtype(op, "dy", dy);
  const ReduceShape s = check_mean_gradient(op, dy, sizes, dims, keepdim, kGroups);
  const Tensor dense_dy = dense_in(dy, MemoryFormat::Contiguous);
  Tensor dx = reduce_gradient_buffer(dy, sizes, s);
  if (dx.numel() == 0) return reduce_unpermute(dx, s);
  dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const gradient = static_cast<const T*>(dense_dy.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    const auto share = [&](int64_t i) {
      return static_cast<T>(static_cast<Acc>(gradient[i]) / static_cast<Acc>(s.reduced_count()));
    };
    const Cut cut(s);
    cut.each([&](const Cut::Piece& p) {
      if (cut.inner == 1) {
        for (int64_t k = 0; k < p.batch; ++k) {
          std::fill_n(to + cut.offset(p) + k * cut.reduced, p.length, share(cut.result(p.row + k)));
        }
        return;
      }
      const std::vector<T> row = cut.columns<T>(p, share);
      cut.each_block(p, true, [&](int64_t at, int64_t steps, int64_t stride, int64_t width) {
        for (int64_t i = 0; i < steps; ++i) std::copy_n(row.data(), width, to + at + i * stride);
      });
    });
  });
  return reduce_unpermute(dx, s);
}

template <typename T>
void softmax_rows(const Tensor& x, double scale, Tensor* y) {
  const T* const from = static_cast<const T*>(x.const_data_ptr());
  T* const to = static_cast<T*>(y->mutable_data_ptr());
  const int64_t columns = x.size(x.dim() - 1);
  const T factor = static_cast<T>(scale);
  parallel(columns ? x.numel() / columns : 0, columns, [&](int64_t row) {
    const T* const in = from + row * columns;
    T* const out = to + row * columns;
    T top = -std::numeric_limits<T>::infinity();
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) top = std::max(top, in[i] * factor);
    for (int64_t i = 0; i < columns; ++i) {
      out[i] = std::exp(std::fma(in[i], factor, -top));
      sum += out[i];
    }
    const T inverse = static_cast<T>(1 / sum);
    for (int64_t i = 0; i < columns; ++i) out[i] *= inverse;
  });
}

Tensor scaled_softmax(Tensor x, double scale, ScalarType dtype) {
  check_softmax("scaled_softmax", x, dtype);
  const bool wide = x.scalar_type() == ScalarType::Double;
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  const Tensor dense = dense_in(x.scalar_type() == type ? x : torch::stable::to(x, type), MemoryFormat::Contiguous);
  Tensor y = empty_like_shape(x, sizes_of(x), type);
  wide ? softmax_rows<double>(dense, scale, &y) : softmax_rows<float>(dense, scale, &y);
  return dtype == type ? y : torch::stable::to(y, dtype);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("logsumexp", TORCH_BOX(&kgopt::logsumexp));
  m.impl("logsumexp_backward", TORCH_BOX(&kgopt::logsumexp_backward));
  m.impl("mean", TORCH_BOX(&kgopt::mean));
  m.impl("mean_backward", TORCH_BOX(&kgopt::mean_backward));
  m.impl("scaled_softmax", TORCH_BOX(&kgopt::scaled_softmax));
}
