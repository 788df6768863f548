// A PReLU behind a norm: y = PReLU((x - mean) * rstd * weight + bias + residual), where no family keeps x on chip; and
// the backward of both: a pass that computes the activation's argument z again from x, leaves the gradient dz and its
// sums, then what follows such sums in backward.cu.
#include "common/device/dependent_launch.cuh"
#include "common/device/traverse.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/affine_row.cuh"
#include "groupnorm/shared/prelu.cuh"

namespace kgopt {
namespace {

inline constexpr int kPReluSums = 3;  // of a channel: of dz, of dz * xhat, and the slope's

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

// Writes dz, and sums what the norm's backward wants of it, and dy * z where PyTorch's PReLU takes its slope: z above 0
// is not, NaN is.
template <typename T>
struct PReluGradient {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = 3;  // x, dy, perhaps a residual
  static constexpr int kValues = kPReluSums;
  static constexpr bool kWalks = true, kHasScalars = true, kWrites = true;
  struct Coef {
    DistanceRow<Acc> norm;
    Acc slope;
  };
  struct Partial {
    Acc dz = 0, dz_xhat = 0, dslope = 0;
  };
  using State = Partial;  // the second of dz times the distance from the mean
  AffineSource affine;
  PReluSlopes slopes;
  Acc slope;
  T* dz;

  __device__ Coef load(int64_t row) const {
    const int64_t channel = row % affine.c;
    return {make_distance_row<Acc>(affine, row), slopes.data ? slope_of_channel<T>(slopes, channel) : slope};
  }
  __device__ State start(const Coef&, Acc) const { return {}; }
  template <int kSize, typename StateOf, typename CoefOf, typename IsOwn>
  __device__ __forceinline__ void add(StateOf state, CoefOf coef, const Acc (&x)[kSize], const Acc (&dy)[kSize],
                                      const Acc (&residual)[kSize], int64_t at, IsOwn is_own) const {
    Acc dzs[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const DistanceRow<Acc>& norm = coef(j).norm;
      const Acc distance = x[j] - norm.mean, z = distance * norm.scale + norm.bias + residual[j];
      const bool above = z > Acc(0);
      dzs[j] = above ? dy[j] : dy[j] * coef(j).slope;
      state(j).dz += dzs[j];
      state(j).dz_xhat += dzs[j] * distance;
      state(j).dslope += above ? Acc(0) : dy[j] * z;
    }
    if constexpr (std::is_same_v<IsOwn, OwnsAll>) {
      store_result<T, kSize>(dz + at, pack<T, kSize>(dzs));
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (is_own(j)) dz[at + j] = from_acc<T>(dzs[j]);
      }
    }
  }
  __device__ Partial finish(const State& s, const Coef& coef, Acc) const {
    return {s.dz, s.dz_xhat * coef.norm.rstd, s.dslope};
  }
  static __device__ void merge(Partial& a, const Partial& b) {
    a.dz += b.dz;
    a.dz_xhat += b.dz_xhat;
    a.dslope += b.dslope;
  }
};

template <typename T>
Status launch_gradient(const PReluBwdParams& p, cudaStream_t stream) {
  using R = PReluGradient<T>;
  const GroupNormPassesBwdParams& norm = p.norm;
  const GroupNormDims& d = norm.dims;
  ReduceArgs<R> a{};
  a.x = static_cast<const T*>(norm.x);
  a.second = static_cast<const T*>(p.dy);
  a.third = static_cast<const T*>(p.residual);
  a.n = d.n;
  a.rows = d.c * norm.turns;
  a.row_length = d.s;
  a.slices = norm.slices / norm.turns;
  a.channels = d.c;
  if (d.channels_last) set_turns(d.s, d.c, norm.turns, &a);
  a.slice_length = norm.slice_length;
  a.partials = static_cast<acc_t<T>*>(norm.partial_sums);
  a.r.affine = norm.affine;
  a.r.slopes = p.slopes;
  a.r.slope = static_cast<acc_t<T>>(p.slope);
  a.r.dz = static_cast<T*>(p.dz);
  return launch_reduce("prelu_gradient_kernel", a, d.channels_last, stream, true);
}

// A block takes a few columns of sums [sets][columns], `stride` values apart, and adds each in a fixed order.
inline constexpr int kSumThreads = 256;

template <typename Acc>
__global__ void __launch_bounds__(kSumThreads)
    prelu_slope_sums_kernel(const Acc* sums, int stride, int64_t sets, int64_t columns, int width, void* dslope,
                            Dtype dtype) {
  __shared__ Acc shared[kSumThreads];
  const int walkers = kSumThreads / width, walker = threadIdx.x / width;
  const int64_t c = int64_t(blockIdx.x) * width + threadIdx.x % width;
  wait_for_prerequisites();
  Acc sum = 0;
  if (c < columns) {
#pragma unroll 4
    for (int64_t i = walker; i < sets; i += walkers) sum += sums[(i * columns + c) * stride];
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
Status launch_slope_sums(const PReluBwdParams& p, cudaStream_t stream) {
  const char* const name = "prelu_slope_sums_kernel";
  const GroupNormDims& d = p.norm.dims;
  const auto add_up = [&](const Acc* sums, int stride, int64_t sets, int64_t columns, void* to, Dtype dtype) {
    const int width = columns > 1 ? 8 : 1;
    const unsigned blocks = static_cast<unsigned>((columns + width - 1) / width);
    return launch_after<prelu_slope_sums_kernel<Acc>>(false, name, blocks, kSumThreads, stream, sums, stride, sets,
                                                      columns, width, to, dtype);
  };
  const Acc* const sums = static_cast<const Acc*>(p.norm.partial_sums) + kPReluSums - 1;
  const int64_t sets = d.n * p.norm.slices;
  if (p.slopes.by_channel()) return add_up(sums, kPReluSums, sets, d.c, p.dslope, p.slopes.dtype);
  constexpr Dtype kAcc = std::is_same_v<Acc, double> ? Dtype::kFloat64 : Dtype::kFloat32;
  const Status status = add_up(sums, kPReluSums, sets, d.c, p.slope_sums, kAcc);
  if (!status.ok()) return status;
  return add_up(static_cast<const Acc*>(p.slope_sums), 1, d.c, 1, p.dslope, p.slopes.dtype);
}

}  // namespace

Status run_normalize_prelu(const NormalizeParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, status = launch_normalize<T>(p, stream));
  return status;
}

void plan_prelu_bwd(PReluBwdParams* p, int sm_count) {
  plan_group_norm_passes_bwd(&p->norm, sm_count);
  p->norm.partial_values = kPReluSums;
}

Status run_prelu_bwd(const PReluBwdParams& p, cudaStream_t stream) {
  const GroupNormDims& d = p.norm.dims;
  if (d.numel() == 0) return Status::Ok();
  Status status;
  KGOPT_DISPATCH_DTYPE(d.dtype, T, status = launch_gradient<T>(p, stream));
  if (status.ok()) status = run_group_norm_passes_bwd_merge(p.norm, stream);
  if (status.ok()) status = run_group_norm_passes_bwd_dx(p.norm, stream);
  if (!status.ok() || p.dslope == nullptr) return status;
  return d.dtype == Dtype::kFloat64 ? launch_slope_sums<double>(p, stream) : launch_slope_sums<float>(p, stream);
}

}  // namespace kgopt
