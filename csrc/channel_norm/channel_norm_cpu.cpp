// Norms over channels on the CPU: tiles of all channels of some positions, channels outermost, so that the compiler
// vectorizes along positions in either layout.
#include <algorithm>
#include <cmath>

#include "channel_norm/channel_norm_checks.h"
#include "common/cpu/block.h"

namespace kgopt {
namespace {

using namespace cpu;

constexpr int64_t kTileElements = 16384;

// Tiles of `width` positions of a sample, or channels_last of all samples in a row.
struct Tiles {
  int64_t c, width, per_row, count, row;
  bool channels_last;

  explicit Tiles(const ChannelNormParams& p) : c(p.c), channels_last(p.channels_last) {
    row = channels_last ? p.n * p.s : p.s;
    width = std::max<int64_t>(1, std::min(row, std::max<int64_t>(16, kTileElements / c)));
    per_row = (row + width - 1) / width;
    count = per_row * (channels_last ? 1 : p.n);
  }
  int64_t sample(int64_t i) const { return i / per_row; }
  int64_t first(int64_t i) const { return i % per_row * width; }
  int64_t positions(int64_t i) const { return std::min(width, row - first(i)); }

  // to [c][positions]
  template <typename T>
  void load(const T* from, int64_t i, acc_t<T>* to, std::vector<acc_t<T>>* buffer) const {
    const int64_t n = positions(i);
    if (!channels_last) {
      for (int64_t k = 0; k < c; ++k) load_block(from + (sample(i) * c + k) * row + first(i), to + k * n, n);
      return;
    }
    buffer->resize(c * n);
    load_block(from + first(i) * c, buffer->data(), c * n);
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t k = 0; k < c; ++k) to[k * n + j] = (*buffer)[j * c + k];
    }
  }
  template <typename T>
  void store(const acc_t<T>* from, int64_t i, T* to, std::vector<acc_t<T>>* buffer) const {
    const int64_t n = positions(i);
    if (!channels_last) {
      for (int64_t k = 0; k < c; ++k) store_block(from + k * n, to + (sample(i) * c + k) * row + first(i), n);
      return;
    }
    buffer->resize(c * n);
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t k = 0; k < c; ++k) (*buffer)[j * c + k] = from[k * n + j];
    }
    store_block(buffer->data(), to + first(i) * c, c * n);
  }
};

// f(k, part) adds channel k to sums of positions. Those of a few channels are added up first: one after the other, a
// thousand terms would lose digits.
template <typename A, typename F>
void sum_channels(int64_t c, std::vector<A>* sums, const F& f) {
  constexpr int64_t kFew = 32;
  std::vector<A> part(sums->size());
  for (int64_t first = 0; first < c; first += kFew) {
    std::fill(part.begin(), part.end(), A(0));
    for (int64_t k = first; k < std::min(c, first + kFew); ++k) f(k, part.data());
    for (size_t j = 0; j < part.size(); ++j) (*sums)[j] += part[j];
  }
}

// x becomes xhat; `scale`, and where it is asked for whether xhat keeps its length as x changes.
template <typename A>
void normalize(const ChannelNormParams& p, int64_t n, A* x, std::vector<A>* scale, std::vector<A>* turns) {
  const A count = static_cast<A>(p.c), eps = static_cast<A>(p.eps);
  scale->assign(n, A(0));
  turns->assign(n, A(1));
  std::vector<A> off(n, A(0));  // what is left of the mean
  A* const s = scale->data();
  if (p.kind == ChannelNormKind::kLayer) {
    std::vector<A> mean(n, A(0));
    A* const m = mean.data();
    sum_channels(p.c, &mean, [&](int64_t k, A* part) {
      for (int64_t j = 0; j < n; ++j) part[j] += x[k * n + j];
    });
    for (int64_t j = 0; j < n; ++j) m[j] /= count;
    sum_channels(p.c, &off, [&](int64_t k, A* part) {
      for (int64_t j = 0; j < n; ++j) {
        x[k * n + j] -= m[j];
        part[j] += x[k * n + j];
      }
    });
    for (int64_t j = 0; j < n; ++j) off[j] /= count;
  }
  const A* const o = off.data();
  sum_channels(p.c, scale, [&](int64_t k, A* part) {
    for (int64_t j = 0; j < n; ++j) {
      const A d = x[k * n + j] - o[j];
      part[j] += d * d;
    }
  });
  for (int64_t j = 0; j < n; ++j) {
    if (p.kind == ChannelNormKind::kL2) {
      const A length = std::sqrt(s[j]);
      (*turns)[j] = length <= eps ? A(0) : A(1);
      s[j] = std::sqrt(count) / (length < eps ? eps : length);
    } else {
      s[j] = A(1) / std::sqrt(s[j] / count + eps);
    }
  }
  for (int64_t k = 0; k < p.c; ++k) {
    for (int64_t j = 0; j < n; ++j) x[k * n + j] = (x[k * n + j] - o[j]) * s[j];
  }
}

// Of g * x and of g, in double: in float, a tile's equal terms would lose digits one after the other.
template <typename A>
void add_sums(const A* x, const A* g, int64_t n, double* sum_x, double* sum_1) {
  constexpr int kLanes = 8;  // that do not wait for each other
  double in_x[kLanes] = {}, in_1[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      in_x[lane] += static_cast<double>(g[j + lane]) * static_cast<double>(x[j + lane]);
      in_1[lane] += static_cast<double>(g[j + lane]);
    }
  }
  for (; j < n; ++j) {
    in_x[0] += static_cast<double>(g[j]) * static_cast<double>(x[j]);
    in_1[0] += static_cast<double>(g[j]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    *sum_x += in_x[lane];
    *sum_1 += in_1[lane];
  }
}

template <typename A>
void affine(const ChannelNormParams& p, int64_t n, const A* xhat, const std::vector<double>& weight,
            const std::vector<double>& bias, A* z) {
  for (int64_t k = 0; k < p.c; ++k) {
    const A w = static_cast<A>(weight[k]), b = static_cast<A>(bias[k]);
    for (int64_t j = 0; j < n; ++j) z[k * n + j] = xhat[k * n + j] * w + b;
  }
}

Tensor channel_norm(Tensor x, OptTensor weight, OptTensor bias, std::string kind, double eps, std::string act) {
  const ChannelNormParams p = check_channel_norm("channel_norm", x, weight, bias, kind, eps, act);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (x.numel() == 0) return y;
  const std::vector<double> w = read_all(weight, p.c, 1), b = read_all(bias, p.c, 0);
  const Tiles tiles(p);
  dispatch_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    parallel(tiles.count, tiles.width * p.c, [&](int64_t i) {
      const int64_t n = tiles.positions(i);
      std::vector<A> v(p.c * n), buffer, scale, turns;
      tiles.load(from, i, v.data(), &buffer);
      normalize(p, n, v.data(), &scale, &turns);
      affine(p, n, v.data(), w, b, v.data());
      activate_chain(p.act, v.data(), v.data(), p.c * n);
      tiles.store(v.data(), i, to, &buffer);
    });
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> channel_norm_backward(Tensor dy, Tensor x, OptTensor weight, OptTensor bias,
                                                         std::string kind, double eps, std::string act) {
  const ChannelNormParams p = check_channel_norm_backward("channel_norm_backward", dy, x, weight, bias, kind, eps, act);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  const ScalarType type = affine_type(x, weight, bias);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  Tensor dweight = empty_like_shape(x, {p.c}, type), dbias = empty_like_shape(x, {p.c}, type);
  std::vector<double> total_x(p.c), total_1(p.c);
  if (x.numel() > 0) {
    const std::vector<double> w = read_all(weight, p.c, 1), b = read_all(bias, p.c, 0);
    const Tiles tiles(p);
    // As many sums whatever the threads: the same bits.
    const int64_t parts = std::min<int64_t>(tiles.count, 64), per_part = (tiles.count + parts - 1) / parts;
    std::vector<double> sums(parts * 2 * p.c);
    dispatch_dtype(p.dtype, [&](auto zero) {
      using T = decltype(zero);
      using A = acc_t<T>;
      const T* const from = static_cast<const T*>(dense.const_data_ptr());
      const T* const gradient = static_cast<const T*>(dense_dy.const_data_ptr());
      T* const to = static_cast<T*>(dx.mutable_data_ptr());
      parallel(parts, per_part * tiles.width * p.c, [&](int64_t part) {
        double* const sum_x = sums.data() + part * 2 * p.c;
        double* const sum_1 = sum_x + p.c;
        std::vector<A> v, g, z, inner, buffer, scale, turns, dot_x, dot_1;
        for (int64_t i = part * per_part; i < std::min(tiles.count, (part + 1) * per_part); ++i) {
          const int64_t n = tiles.positions(i), size = p.c * n;
          for (auto* const t : {&v, &g, &z, &inner}) t->resize(size);
          tiles.load(from, i, v.data(), &buffer);
          tiles.load(gradient, i, g.data(), &buffer);
          normalize(p, n, v.data(), &scale, &turns);
          affine(p, n, v.data(), w, b, z.data());
          chain_gradient(p.act, z.data(), inner.data(), g.data(), g.data(), size);
          dot_x.assign(n, A(0));
          dot_1.assign(n, A(0));
          for (int64_t k = 0; k < p.c; ++k) {
            const A weight_k = static_cast<A>(w[k]);
            A* const gk = g.data() + k * n;
            const A* const xk = v.data() + k * n;
            add_sums(xk, gk, n, sum_x + k, sum_1 + k);
            for (int64_t j = 0; j < n; ++j) gk[j] *= weight_k;
          }
          sum_channels(p.c, &dot_1, [&](int64_t k, A* part) {
            for (int64_t j = 0; j < n; ++j) part[j] += g[k * n + j];
          });
          sum_channels(p.c, &dot_x, [&](int64_t k, A* part) {
            for (int64_t j = 0; j < n; ++j) part[j] += g[k * n + j] * v[k * n + j];
          });
          const A inverse = A(1) / static_cast<A>(p.c);
          for (int64_t j = 0; j < n; ++j) {
            dot_1[j] = p.kind == ChannelNormKind::kLayer ? dot_1[j] * inverse : A(0);
            dot_x[j] = turns[j] != A(0) ? dot_x[j] * inverse : A(0);
          }
          for (int64_t k = 0; k < p.c; ++k) {
            A* const gk = g.data() + k * n;
            const A* const xk = v.data() + k * n;
            for (int64_t j = 0; j < n; ++j) gk[j] = scale[j] * (gk[j] - dot_1[j] - xk[j] * dot_x[j]);
          }
          tiles.store(g.data(), i, to, &buffer);
        }
      });
    });
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t k = 0; k < p.c; ++k) {
        total_x[k] += sums[part * 2 * p.c + k];
        total_1[k] += sums[part * 2 * p.c + p.c + k];
      }
    }
  }
  write_all(dweight, total_x);
  write_all(dbias, total_1);
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("channel_norm", TORCH_BOX(&kgopt::channel_norm));
  m.impl("channel_norm_backward", TORCH_BOX(&kgopt::channel_norm_backward));
}
