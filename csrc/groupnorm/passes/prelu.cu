// A PReLU behind a norm: y = PReLU((x - mean) * rstd * weight + bias + residual), where no family keeps x on chip; and
// its gradient, a pass ahead of the norm's own backward. The activation's argument z is computed again from x.
#include "common/device/dependent_launch.cuh"
#include "common/device/traverse.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/affine_row.cuh"
#include "groupnorm/shared/prelu.cuh"

namespace kgopt {
namespace {

// T: the tensors' type.
template <typename T>
__device__ __forceinline__ acc_t<T> slope_of_channel(const PReluSlopes& s, int64_t channel) {
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<const double*>(s.data)[s.by_channel() ? channel : 0];
  } else {
    return slope_at<T>(s, s.by_channel() ? channel : 0);
  }
}

// Without a residual x stands in for it, whose second read hits the L1: an instance less.
template <typename T>
struct NormalizePRelu {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = 2;
  static constexpr bool kWalks = false, kHasScalars = true;
  struct Coef {
    Acc mean, weight, bias, slope;
  };
  const AffineRow<Acc>* table;
  PReluSlopes slopes;
  int64_t channels;
  bool has_residual;

  __device__ Coef load(int64_t row) const {
    const AffineRow<Acc> r = table[row];
    return {r.mean, r.weight * r.rstd, r.bias, slope_of_channel<T>(slopes, row % channels)};
  }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf coef, const Acc (&x)[kSize], const Acc (&residual)[kSize],
                                        Acc (&y)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      y[j] = (x[j] - coef(j).mean) * coef(j).weight + coef(j).bias;
      if (has_residual) y[j] += residual[j];
      y[j] = prelu(y[j], coef(j).slope);
    }
  }
};

template <typename T>
Status launch_normalize(const NormalizeParams& p, cudaStream_t stream) {
  using F = NormalizePRelu<T>;
  ElementwiseArgs<F> a{};
  a.x = static_cast<const T*>(p.x);
  a.second = p.residual ? static_cast<const T*>(p.residual) : a.x;
  a.y = static_cast<T*>(p.y);
  a.n = p.dims.n;
  a.c = p.dims.c;
  a.s = p.dims.s;
  a.f.table = static_cast<const AffineRow<acc_t<T>>*>(p.table);
  a.f.slopes = p.slopes;
  a.f.channels = p.dims.c;
  a.f.has_residual = p.residual != nullptr;
  return launch_elementwise("normalize_prelu_kernel", a, p.dims.channels_last, stream, true);
}

// Writes dz and sums dy * z where PyTorch's PReLU takes its slope: z above 0 is not, NaN is.
template <typename T>
struct PReluGradient {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = 2;
  static constexpr int kValues = 1;
  static constexpr bool kWalks = true, kHasScalars = true, kWrites = true;
  struct Coef {
    Acc mean, rstd_weight, bias, slope;
  };
  struct Partial {
    Acc sum = 0;
  };
  using State = Partial;
  AffineSource affine;
  PReluSlopes slopes;
  const T* residual;  // or null
  T* dz;

  __device__ Coef load(int64_t row) const {
    const AffineRow<Acc> r = make_affine_row<Acc>(affine, row / affine.c, row % affine.c);
    return {r.mean, r.rstd * r.weight, r.bias, slope_of_channel<T>(slopes, row % affine.c)};
  }
  __device__ State start(const Coef&, Acc) const { return {}; }
  template <int kSize, typename StateOf, typename CoefOf, typename IsOwn>
  __device__ __forceinline__ void add(StateOf state, CoefOf coef, Acc (&x)[kSize], Acc (&dy)[kSize], int64_t at,
                                      IsOwn is_own) const {
    constexpr bool kWhole = std::is_same_v<IsOwn, OwnsAll>;
    Acc z[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) z[j] = (x[j] - coef(j).mean) * coef(j).rstd_weight + coef(j).bias;
    if (residual) {
      Vec<T, kSize> r{};
      if constexpr (kWhole) {
        r = load_vec<T, kSize>(residual + at);
      } else {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (is_own(j)) r.v[j] = residual[at + j];
        }
      }
      Acc added[kSize];
      unpack(r, added);
#pragma unroll
      for (int j = 0; j < kSize; ++j) z[j] += added[j];
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const bool above = z[j] > Acc(0);
      state(j).sum += above ? Acc(0) : dy[j] * z[j];
      dy[j] = above ? dy[j] : dy[j] * coef(j).slope;
    }
    if constexpr (kWhole) {
      store_result<T, kSize>(dz + at, pack<T, kSize>(dy));
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (is_own(j)) dz[at + j] = from_acc<T>(dy[j]);
      }
    }
  }
  __device__ Partial finish(const State& s, Acc) const { return s; }
  static __device__ void merge(Partial& a, const Partial& b) { a.sum += b.sum; }
};

template <typename T>
Status launch_gradient(const PReluGradientParams& p, cudaStream_t stream) {
  using R = PReluGradient<T>;
  ReduceArgs<R> a{};
  a.x = static_cast<const T*>(p.x);
  a.second = static_cast<const T*>(p.dy);
  a.n = p.dims.n;
  a.rows = p.dims.c * p.turns;
  a.row_length = p.dims.s;
  a.slices = p.slices / p.turns;
  a.channels = p.dims.c;
  if (p.dims.channels_last) set_turns(p.dims.s, p.dims.c, p.turns, &a);
  a.slice_length = p.slice_length;
  a.partials = static_cast<acc_t<T>*>(p.partial_sums);
  a.r.affine = p.affine;
  a.r.slopes = p.slopes;
  a.r.residual = static_cast<const T*>(p.residual);
  a.r.dz = static_cast<T*>(p.dz);
  return launch_reduce("prelu_gradient_kernel", a, p.dims.channels_last, stream);
}

// A block takes a few columns of the partial sums [sets][columns], and adds each in a fixed order.
inline constexpr int kSumThreads = 256;

template <typename Acc>
__global__ void __launch_bounds__(kSumThreads)
    prelu_slope_sums_kernel(const Acc* partials, int64_t sets, int64_t columns, int width, void* dslope, Dtype dtype) {
  __shared__ Acc shared[kSumThreads];
  const int walkers = kSumThreads / width, walker = threadIdx.x / width;
  const int64_t c = int64_t(blockIdx.x) * width + threadIdx.x % width;
  wait_for_prerequisites();
  Acc sum = 0;
  if (c < columns) {
#pragma unroll 4
    for (int64_t i = walker; i < sets; i += walkers) sum += partials[i * columns + c];
  }
  for (int half = walkers / 2; half > 0; half /= 2) {
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (walker < half) sum += shared[threadIdx.x + half * width];
    __syncthreads();
  }
  if (walker == 0 && c < columns) store_as(dslope, c, dtype, sum);
}

template <typename Acc>
Status launch_slope_sums(const PReluGradientParams& p, cudaStream_t stream) {
  const char* const name = "prelu_slope_sums_kernel";
  const int64_t sets = p.dims.n * p.slices, columns = p.slopes.by_channel() ? p.dims.c : 1;
  const int width = columns > 1 ? 8 : 1;
  const int64_t blocks = (columns + width - 1) / width;
  const Acc* const partials = static_cast<const Acc*>(p.partial_sums);
  return launch_after<prelu_slope_sums_kernel<Acc>>(false, name, static_cast<unsigned>(blocks), kSumThreads, stream,
                                                    partials, sets * p.dims.c / columns, columns, width, p.dslope,
                                                    p.slopes.dtype);
}

}  // namespace

Status run_normalize_prelu(const NormalizeParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, status = launch_normalize<T>(p, stream));
  return status;
}

void plan_prelu_gradient(PReluGradientParams* p, int sm_count) {
  const GroupNormDims& d = p->dims;
  if (d.channels_last) {
    const bool aligned = is_aligned(p->x) && is_aligned(p->dy) && is_aligned(p->dz) && is_aligned(p->residual);
    plan_column_slices(d.n, d.c, d.s, walk_size(dtype_size(d.dtype)), aligned, sm_count, &p->turns, &p->slices,
                       &p->slice_length);
  } else {
    plan_slices(d.n * d.c, d.s, 4096, 64, sm_count, &p->slices, &p->slice_length);
  }
}

Status run_prelu_gradient(const PReluGradientParams& p, cudaStream_t stream) {
  if (p.dims.numel() == 0) return Status::Ok();
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, status = launch_gradient<T>(p, stream));
  if (!status.ok()) return status;
  return p.dims.dtype == Dtype::kFloat64 ? launch_slope_sums<double>(p, stream) : launch_slope_sums<float>(p, stream);
}

}  // namespace kgopt
