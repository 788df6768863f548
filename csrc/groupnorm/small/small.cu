// GroupNorm forward and backward of small groups; see groupnorm/small/params.h. The formulas of backward are those of
// groupnorm/passes/backward.cu.
#include "common/async.cuh"
#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/pointwise.cuh"
#include "groupnorm/small/small.cuh"

namespace kgopt {
namespace {

// A kernel whose chain is Chain::kAny looks up at run time which ones its activations are. Few elements do not pay for
// kernels of their own, but for the usual ones: no pre-activation, and behind the norm none, relu or SiLU. What they
// need not jump over they need not fetch, and instructions come from memory at first, as x does.
template <int kElements>
__device__ __forceinline__ void apply_kind(Chain kind, const ActChain& chain, float (&v)[kElements]) {
  if (kind == Chain::kNone) return;
  if (kind == Chain::kRelu) {
    apply_chain<Chain::kRelu, false>(chain, v);
  } else if (kind == Chain::kSilu) {
    apply_chain<Chain::kSilu, false>(chain, v);
  } else {
    apply_chain<Chain::kAny, false>(chain, v);
  }
}

// v becomes the chain's value, and `by` is multiplied with its slope. A bit for each element whose gradient is 0
// instead.
template <int kElements>
__device__ __forceinline__ uint32_t apply_slope(Chain kind, const ActChain& chain, float (&v)[kElements],
                                                float (&by)[kElements]) {
  uint32_t bits = 0;
  if (kind == Chain::kRelu) {
    const auto stopped = chain_slopes<Chain::kRelu, false, true>(chain, v, by);
#pragma unroll
    for (int k = 0; k < kElements; ++k) bits |= uint32_t(stopped[k]) << k;
  } else if (kind == Chain::kSilu) {
    chain_slopes<Chain::kSilu, false, true>(chain, v, by);
  } else if (kind == Chain::kAny) {
    bits = chain_slopes<Chain::kAny, false, true>(chain, v, by).bits;
  }
  return bits;
}
// A gradient that comes in becomes the one that goes out.
template <int kElements>
__device__ __forceinline__ void multiply_slope(Chain kind, const ActChain& chain, float (&v)[kElements],
                                               float (&gradient)[kElements]) {
  const uint32_t stopped = apply_slope(kind, chain, v, gradient);
#pragma unroll
  for (int k = 0; k < kElements; ++k) gradient[k] = stopped >> k & 1 ? 0.f : gradient[k];
}

// Parameters of a thread's elements, fp32 or x's type T, as bits: what converts them would wait for each load in turn.
// kBoth: the loads of both are there, each where it is wanted, and have a register of their own, or one would wait for
// the other.
template <typename T, int kElements, bool kBoth>
struct SmallAffine {
  uint32_t words[kElements] = {}, halves[kBoth ? kElements : 1] = {};

  __device__ __forceinline__ void load_words(const void* values, int k, uint32_t channel, bool wanted) {
    words[k] = load_bits<float>(values, channel, wanted);
  }
  __device__ __forceinline__ void load_halves(const void* values, int k, uint32_t channel, bool wanted) {
    (kBoth ? halves[kBoth ? k : 0] : words[k]) = load_bits<T>(values, channel, wanted);
  }
  __device__ __forceinline__ float value(int k, bool wide) const {
    if (wide || sizeof(T) == 4) return __uint_as_float(words[k]);
    const uint16_t half = static_cast<uint16_t>(kBoth ? halves[kBoth ? k : 0] : words[k]);
    return static_cast<float>(to_acc(*reinterpret_cast<const T*>(&half)));
  }
};
// Calls load(as_words, as_halves): with both, or behind a branch with what is wanted.
template <typename T, bool kBoth, typename Load>
__device__ __forceinline__ void load_as_wanted(bool wide, Load load) {
  if (sizeof(T) == 4) {
    load(std::true_type(), std::false_type());
  } else if (kBoth) {
    load(std::true_type(), std::true_type());
  } else if (wide) {
    load(std::true_type(), std::false_type());
  } else {
    load(std::false_type(), std::true_type());
  }
}

// What a thread has of its team's unit: kRuns vectors of kRun elements.
template <typename T, int kRun_, int kRuns_, Chain kAct_>
struct SmallTraits {
  using Element = T;
  static constexpr int kRun = kRun_, kRuns = kRuns_, kElements = kRun * kRuns;
  static constexpr Chain kAct = kAct_;
};

template <typename Traits>
struct SmallTeam {
  using T = typename Traits::Element;
  static constexpr int kRun = Traits::kRun, kRuns = Traits::kRuns, kElements = Traits::kElements;

  const SmallShares& s;
  const uint32_t tid = threadIdx.x;
  uint32_t team, lane, unit, channel0;
  uint32_t rank, first, end;  // in the cluster; elements of the unit
  uint32_t base;
  uint32_t offset[kElements], channel[kElements];
  bool has[kElements];

  __device__ __forceinline__ explicit SmallTeam(const SmallShares& shares) : s(shares) {
    team = s.by_lanes(tid);
    lane = tid - team * s.by_lanes.d;
    rank = blockIdx.x & ((1u << s.blocks_log2) - 1);
    first = rank * s.chunk;
    end = min(first + s.chunk, s.elements);
    uint32_t n, g;
    if (s.owner) {
      n = team;
      g = blockIdx.x;
      unit = n * s.by_groups.d + g;
    } else {
      unit = (blockIdx.x >> s.blocks_log2) * s.teams + team;
      n = s.by_groups(unit);
      g = unit - n * s.by_groups.d;
    }
    if (team >= s.teams || unit >= s.units) end = 0;
    channel0 = g * s.channels;
    base = n * s.sample + g * s.stride;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) find(r);
  }
  // Element of the unit.
  __device__ __forceinline__ uint32_t element(int r) const { return first + (lane + r * s.by_lanes.d) * kRun; }
  __device__ __forceinline__ bool active() const { return end > 0; }
  __device__ __forceinline__ void find(int r) {
    const uint32_t i = element(r);
    uint32_t row = s.by_minor(i), column = i - row * s.by_minor.d, at = base + row * s.pitch + column;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int k = r * kRun + j;
      has[k] = i + j < end;
      offset[k] = at;
      channel[k] = channel0 + (s.channels_last ? column : row);
      ++at;
      if (++column == s.by_minor.d) {
        at += s.pitch - column;
        column = 0;
        ++row;
      }
    }
  }
  __device__ __forceinline__ void load(const void* from, T (&raw)[kElements]) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if constexpr (kRun > 1) {
        Vec<T, kRun> v{};
        if (has[r * kRun]) v = load_vec<T, kRun>(static_cast<const T*>(from) + offset[r * kRun]);
#pragma unroll
        for (int j = 0; j < kRun; ++j) raw[r * kRun + j] = v.v[j];
      } else {
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
          const int k = r * kRun + j;
          raw[k] = has[k] ? static_cast<const T*>(from)[offset[k]] : from_acc<T>(0.f);
        }
      }
    }
  }
  __device__ __forceinline__ void store(void* to, const float (&v)[kElements]) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if constexpr (kRun > 1) {
        float x[kRun];
#pragma unroll
        for (int j = 0; j < kRun; ++j) x[j] = v[r * kRun + j];
        if (has[r * kRun]) store_vec(static_cast<T*>(to) + offset[r * kRun], pack<T, kRun>(x));
      } else {
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
          const int k = r * kRun + j;
          if (has[k]) static_cast<T*>(to)[offset[k]] = from_acc<T>(v[k]);
        }
      }
    }
  }
  // Weight or bias of each element, as bits: what converts them would wait for each load in turn.
  __device__ __forceinline__ void load_affine(const void* values, bool wide, uint32_t (&bits)[kElements]) const {
    if (values == nullptr) return;
    const auto load_one = [&](int k) -> uint32_t {
      if (!has[k]) return 0;
      return wide ? static_cast<const uint32_t*>(values)[channel[k]] : static_cast<const uint16_t*>(values)[channel[k]];
    };
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      bits[r * kRun] = load_one(r * kRun);
#pragma unroll
      for (int j = 1; j < kRun; ++j) {
        // A run in one row of a contiguous tensor has one channel.
        bits[r * kRun + j] = kRun > 1 && !s.channels_last ? bits[r * kRun] : load_one(r * kRun + j);
      }
    }
  }
  __device__ __forceinline__ void affine(const void* values, bool wide, float none, const uint32_t (&bits)[kElements],
                                         float (&v)[kElements]) const {
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      if (sizeof(T) == 4 || wide) {
        v[k] = __uint_as_float(bits[k]);
      } else {
        const uint16_t half = static_cast<uint16_t>(bits[k]);
        v[k] = to_acc(*reinterpret_cast<const T*>(&half));
      }
      if (values == nullptr) v[k] = none;
    }
  }
  // Over the whole team. `shared` has an entry a warp, and is written once.
  template <int kValues>
  __device__ __forceinline__ void sum(float (&v)[kValues], float (*shared)[kValues]) const {
    const uint32_t lanes = s.by_lanes.d;
    lanes_sum(lanes, v);
    if (lanes <= 32) return;
    const uint32_t warps = lanes / 32, in_warp = tid % 32;
    if (in_warp == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared[tid / 32][i] = v[i];
    }
    __syncthreads();
    const uint32_t from = min(team * warps + in_warp, uint32_t(kSmallMaxThreads / 32 - 1));
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = in_warp < warps ? shared[from][i] : 0.f;
    // Lanes from `warps` on hold zeros, and the first ones are read.
    lanes_sum(warps > 16 ? 32 : warps > 8 ? 16 : warps > 4 ? 8 : warps > 2 ? 4 : 2, v);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = __shfl_sync(0xffffffffu, v[i], 0);
  }
};

// What the blocks of a cluster tell each other.
struct SmallBox {
  float4 parts[kSmallMaxBlocks];
  uint64_t arrived;
};

__device__ __forceinline__ void open_box(SmallBox* box, uint32_t blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    barrier_init(&box->arrived, 1);
    barrier_init_fence();
    barrier_expect_bytes(&box->arrived, blocks * sizeof(float4));
  }
  __syncthreads();
  cluster_arrive();
#endif
}
// Afterwards box->parts has what each block said.
__device__ __forceinline__ void exchange(SmallBox* box, uint32_t blocks, uint32_t rank, float4 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cluster_wait();
  if (threadIdx.x < blocks) cluster_send(v, box->parts + rank, &box->arrived, threadIdx.x);
  cluster_barrier_wait(&box->arrived, 0);
#endif
}
// Sums over the cluster, in the order of the blocks.
__device__ __forceinline__ void exchange(SmallBox* box, uint32_t blocks, uint32_t rank, float (&v)[2]) {
  exchange(box, blocks, rank, make_float4(v[0], v[1], 0.f, 0.f));
  v[0] = v[1] = 0.f;
  for (uint32_t r = 0; r < blocks; ++r) {
    v[0] += box->parts[r].x;
    v[1] += box->parts[r].y;
  }
}

// Forward is all latency, so each of its kernels computes what it needs and no more: a team is the block (kBlock) or up
// to a warp, blocks share a unit (kCluster) or not, and contiguous offsets need no rows.
template <typename Traits, bool kBlock_, bool kLast_, bool kCluster_ = false>
struct SmallFwdTraits : Traits {
  static constexpr bool kBlock = kBlock_, kLast = kLast_, kCluster = kCluster_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kCluster ? kSmallMaxBwdThreads : kSmallMaxThreads)
    group_norm_small_fwd_kernel(const __grid_constant__ GroupNormSmallFwdParams p) {
  using T = typename Traits::Element;
  constexpr int kRun = Traits::kRun, kRuns = Traits::kRuns, kElements = Traits::kElements;
  constexpr bool kBlock = Traits::kBlock, kLast = Traits::kLast, kCluster = Traits::kCluster;
  __shared__ float4 shared[kCluster ? 3 : 2][kSmallMaxWarps / 4];
  __shared__ SmallBox box;
  const SmallShares& s = p.shares;
  const uint32_t tid = threadIdx.x, lanes = s.by_lanes.d, warps = blockDim.x / 32;
  const uint32_t blocks = kCluster ? 1u << s.blocks_log2 : 1,
                 block = kCluster ? blockIdx.x >> s.blocks_log2 : blockIdx.x;
  const uint32_t rank = kCluster ? blockIdx.x & (blocks - 1) : 0, begin = kCluster ? rank * s.chunk : 0;
  // Below a warp lanes are a power of two.
  const uint32_t lane = kBlock ? tid : tid & (lanes - 1);
  const uint32_t unit = kBlock ? block : block * s.teams + s.by_lanes(tid);
  const bool active = kBlock || unit < s.units;
  const uint32_t end = !active ? 0 : kCluster ? min(begin + s.chunk, s.elements) : s.elements;
  const uint32_t n = s.by_groups(unit), g = unit - n * s.by_groups.d;

  T raw[kElements];
  uint32_t offset[kElements], channel[kElements];
  const auto has = [&](int k) { return begin + (lane + k / kRun * lanes) * kRun + k % kRun < end; };
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const uint32_t i = begin + (lane + r * lanes) * kRun;
    uint32_t row = s.by_minor(i), column = i - row * s.by_minor.d;
    uint32_t at = kLast ? n * s.sample + g * s.stride + row * s.pitch + column : unit * s.elements + i;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int k = r * kRun + j;
      offset[k] = at++;
      channel[k] = g * s.channels + (kLast ? column : row);
      if (++column == s.by_minor.d) {
        if (kLast) at += s.pitch - column;
        column = 0;
        ++row;
      }
    }
  }
  const bool wide = p.affine_dtype == Dtype::kFloat32;
  constexpr bool kOneChannel = kRun > 1 && !kLast;  // of a vector
  const bool weighted = p.weight != nullptr, biased = p.bias != nullptr;
  constexpr bool kBoth = kElements == 1 || kOneChannel;
  SmallAffine<T, kElements, kBoth> weights, biases;
  const auto load_affine = [&] {
    load_as_wanted<T, kBoth>(wide, [&](auto as_words, auto as_halves) {
#pragma unroll
      for (int k = 0; k < kElements; k += kOneChannel ? kRun : 1) {
        const bool words = has(k) && (wide || !as_halves), halves = has(k) && !(wide && as_words);
        if (as_words) weights.load_words(p.weight, k, channel[k], words && weighted);
        if (as_halves) weights.load_halves(p.weight, k, channel[k], halves && weighted);
        if (as_words) biases.load_words(p.bias, k, channel[k], words && biased);
        if (as_halves) biases.load_halves(p.bias, k, channel[k], halves && biased);
      }
    });
  };
  // Few, they come ahead of x: ptxas puts uses of x ahead of loads that come later, which then wait for x.
  constexpr bool kParametersFirst = kBlock && kBoth;
  if (kParametersFirst) load_affine();
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    if constexpr (kRun > 1) {
      Vec<T, kRun> v{};
      if (has(r * kRun)) v = load_vec<T, kRun>(static_cast<const T*>(p.x) + offset[r * kRun]);
#pragma unroll
      for (int j = 0; j < kRun; ++j) raw[r * kRun + j] = v.v[j];
    } else {
      raw[r] = load_in_order<T>(p.x, offset[r], has(r));
    }
  }
  // Values relative to one of them: summed as they are, an offset that is large beside their spread would cost digits.
  // So would one that is far from all others: it is the median of three.
  const uint32_t start = kLast ? n * s.sample + g * s.stride : unit * s.elements;
  const T first = load_in_order<T>(p.x, start, active);
  T middle{}, last{};
  if (!kCluster) {
    middle = load_in_order<T>(p.x, start + s.middle, active);
    last = load_in_order<T>(p.x, start + s.last, active);
  }
  if (!kParametersFirst) load_affine();
  if (kCluster) open_box(&box, blocks);
  if (kBlock && tid >= warps && tid < kSmallMaxWarps) {
    reinterpret_cast<float*>(shared[0])[tid] = reinterpret_cast<float*>(shared[1])[tid] = 0.f;
    if (kCluster) reinterpret_cast<float*>(shared[kCluster ? 2 : 0])[tid] = 0.f;
  }
  const auto team_sum = [&](float v, float4* entries) {
    if (kBlock) return block_total(v, entries, warps);
    float total[1] = {v};
    lanes_sum(lanes, total);
    return total[0];
  };
  float v[kElements], origin[1] = {kCluster ? to_acc(first) : median(to_acc(first), to_acc(middle), to_acc(last))};
#pragma unroll
  for (int k = 0; k < kElements; ++k) v[k] = to_acc(raw[k]);
  if constexpr (Traits::kAct == Chain::kAny) {
    apply_kind(s.pre_kind, p.pre_act, v);
    apply_kind(s.pre_kind, p.pre_act, origin);
  }
  float sum = 0.f, squares = 0.f, rest = 0.f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const float relative = v[k] - origin[0];
    sum += has(k) ? relative : 0.f;
    if (!kCluster) v[k] = relative;
  }
  const auto count_of = [&](uint32_t r) { return static_cast<float>(min(s.chunk, s.elements - r * s.chunk)); };
  const float scale = kCluster ? 1.f / count_of(rank) : s.scale, from_origin = team_sum(sum, shared[0]) * scale;
  float mean = origin[0] + from_origin;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    v[k] -= kCluster ? mean : from_origin;
    squares += has(k) ? v[k] * v[k] : 0.f;
    rest += has(k) ? v[k] : 0.f;
  }
  squares = team_sum(squares, shared[1]);
  if constexpr (kCluster) {
    // All blocks' moments, merged in their order. A block's mean is rounded to the digits of its size or of its
    // distance from the origin, which may be far from all others; the mean of what is left says by how much. Relative
    // to the first block's the means are exact.
    rest = team_sum(rest, shared[kCluster ? 2 : 0]) * scale;
    exchange(&box, blocks, rank, make_float4(mean, squares, rest, 0.f));
    const float own = mean, zero = box.parts[0].x;
    const auto mean_of = [&](uint32_t r) { return box.parts[r].x - zero + box.parts[r].z; };
    float shift = 0.f;
    for (uint32_t r = 0; r < blocks; ++r) shift += count_of(r) * mean_of(r);
    shift *= s.scale;
    mean = zero + shift;
    squares = 0.f;
    for (uint32_t r = 0; r < blocks; ++r) {
      const float d = mean_of(r) - shift, left = box.parts[r].z;
      squares += box.parts[r].y + count_of(r) * (d * d - left * left);
    }
    const float to_mean = zero - own + shift;
#pragma unroll
    for (int k = 0; k < kElements; ++k) v[k] -= to_mean;
  }
  const float rstd = rsqrtf(squares * s.scale + p.eps);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const int from = kOneChannel ? k / kRun * kRun : k;
    const float weight = weighted ? weights.value(from, wide) : 1.f;
    v[k] = v[k] * (rstd * weight) + (biased ? biases.value(from, wide) : 0.f);
  }
  if constexpr (Traits::kAct == Chain::kAny) {
    apply_kind(s.act_kind, p.act, v);
  } else {
    apply_chain<Traits::kAct, false>(p.act, v);
  }
  if (p.add_input) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) v[k] += to_acc(raw[k]);
  }
  T* const y = static_cast<T*>(p.y);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    if constexpr (kRun > 1) {
      float x[kRun];
#pragma unroll
      for (int j = 0; j < kRun; ++j) x[j] = v[r * kRun + j];
      if (has(r * kRun)) store_vec(y + offset[r * kRun], pack<T, kRun>(x));
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const int k = r * kRun + j;
        if (has(k)) y[offset[k]] = from_acc<T>(v[k]);
      }
    }
  }
  if (active && lane == 0 && rank == 0) {
    p.mean[unit] = mean;
    p.rstd[unit] = rstd;
  }
}

// The sums of a channel in shared memory and where they go: of all samples, or of a sample's part that a block has.
template <typename Traits>
__device__ __forceinline__ void write_sums(const GroupNormSmallBwdParams& p, const SmallTeam<Traits>& t, uint32_t team,
                                           uint32_t c, float dz, float dz_xhat) {
  const SmallShares& s = p.shares;
  if (s.owner) {
    const int64_t at = int64_t(blockIdx.x) * s.channels + c;
    store_as(p.dbias, at, p.gradient_dtype, dz);
    store_as(p.dweight, at, p.gradient_dtype, dz_xhat);
    return;
  }
  const uint32_t unit = (blockIdx.x >> s.blocks_log2) * s.teams + team;
  if (unit >= s.units) return;
  const uint32_t n = s.by_groups(unit), part = (n << s.blocks_log2) + t.rank;
  const int64_t at = (int64_t(part) * s.by_groups.d + unit - n * s.by_groups.d) * s.channels + c;
  reinterpret_cast<float2*>(p.channel_sums)[at] = make_float2(dz, dz_xhat);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kElements == kSmallMaxElements ? kSmallMaxBwdThreads : kSmallMaxThreads)
    group_norm_small_bwd_kernel(const __grid_constant__ GroupNormSmallBwdParams p) {
  using T = typename Traits::Element;
  constexpr int kRun = Traits::kRun, kRuns = Traits::kRuns, kElements = Traits::kElements;
  extern __shared__ float2 pairs[];  // [teams][terms of a chunk] of dz and dz * xhat
  __shared__ float shared[2][kSmallMaxWarps][2];
  __shared__ SmallBox box;
  let_dependents_start();
  const SmallTeam<Traits> t(p.shares);
  const SmallShares& s = p.shares;
  const uint32_t blocks = 1u << s.blocks_log2;
  const bool wide = p.affine_dtype == Dtype::kFloat32;
  const float mean = t.active() ? p.mean[t.unit] : 0.f, rstd = t.active() ? p.rstd[t.unit] : 0.f;
  T raw_x[kElements], raw_dy[kElements];
  uint32_t weight_bits[kElements] = {}, bias_bits[kElements] = {};
  t.load(p.x, raw_x);
  t.load(p.dy, raw_dy);
  t.load_affine(p.weight, wide, weight_bits);
  if (Traits::kAct == Chain::kAny ? s.act_kind != Chain::kNone : Traits::kAct != Chain::kNone) {
    t.load_affine(p.bias, wide, bias_bits);
  }
  if (blocks > 1) open_box(&box, blocks);
  float xhat[kElements], dz[kElements], z[kElements], slope[kElements], weight[kElements], bias[kElements];
  uint32_t stopped = 0;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = to_acc(raw_x[k]);
    dz[k] = to_acc(raw_dy[k]);
    slope[k] = rstd;
  }
  if constexpr (Traits::kAct == Chain::kAny) stopped = apply_slope(s.pre_kind, p.pre_act, xhat, slope);
  t.affine(p.weight, wide, 1.f, weight_bits, weight);
  t.affine(p.bias, wide, 0.f, bias_bits, bias);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = (xhat[k] - mean) * rstd;
    z[k] = xhat[k] * weight[k] + bias[k];
  }
  if constexpr (Traits::kAct == Chain::kAny) {
    multiply_slope(s.act_kind, p.act, z, dz);
  } else {
    multiply_slopes<Traits::kAct, false>(p.act, z, dz);
  }
  // With one channel the sums of the group are those of the channel, but for the weight.
  const bool one_channel = s.channels == 1;
  float terms[2] = {0.f, 0.f};
  if (one_channel) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      terms[0] += t.has[k] ? dz[k] : 0.f;
      terms[1] += t.has[k] ? dz[k] * xhat[k] : 0.f;
      dz[k] *= weight[k];
    }
  } else {
    float2* const own = pairs + t.team * (s.chunk >> s.run_log2);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      float2 run = make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const int k = r * kRun + j;
        const float product = dz[k] * xhat[k];
        if (t.has[k]) {
          if (s.run_log2 == 0) own[t.element(r) - t.first + j] = make_float2(dz[k], product);
          run.x += dz[k];
          run.y += product;
          terms[0] += weight[k] * dz[k];
          terms[1] += weight[k] * product;
        }
        dz[k] *= weight[k];
      }
      if (s.run_log2 > 0 && t.has[r * kRun]) own[(t.element(r) - t.first) >> s.run_log2] = run;
    }
  }
  t.sum(terms, shared[0]);
  if (s.by_lanes.d <= 32) __syncthreads();  // the pairs are there
  if (one_channel) {
    if (!s.owner) {
      if (t.active() && t.lane == 0) write_sums(p, t, t.team, 0, terms[0], terms[1]);
    } else if (t.lane == 0 && t.active()) {
      pairs[t.team] = make_float2(terms[0], terms[1]);
    }
  }
  if (blocks > 1) exchange(&box, blocks, t.rank, terms);
  // Divided, not multiplied by a reciprocal: its rounding error would be the same for every group, and add up in sums
  // of dx.
  const float scale = one_channel ? weight[0] : 1.f, elements = static_cast<float>(s.elements);
  terms[0] = scale * terms[0] / elements;
  terms[1] = scale * terms[1] / elements;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    z[k] = stopped >> k & 1 ? 0.f : slope[k] * (dz[k] - (terms[0] + xhat[k] * terms[1]));
  }
  t.store(p.dx, z);
  if (one_channel) {
    if (!s.owner) return;
    __syncthreads();
    if (t.tid >= 32) return;
    float sums[2] = {0.f, 0.f};
    for (uint32_t n = t.tid; n < s.teams; n += 32) {
      sums[0] += pairs[n].x;
      sums[1] += pairs[n].y;
    }
    lanes_sum(32, sums);
    if (t.tid == 0) write_sums(p, t, 0, 0, sums[0], sums[1]);
    return;
  }

  const uint32_t sum_team = s.by_sum_lanes(t.tid), sum_lane = t.tid - sum_team * s.by_sum_lanes.d;
  for (uint32_t first_sum = 0; first_sum < s.sums; first_sum += s.sum_teams) {
    const uint32_t m = first_sum + sum_team, team0 = s.by_channels(m), c = m - team0 * s.channels;
    const bool is_mine = sum_team < s.sum_teams && m < s.sums;
    float sums[2] = {0.f, 0.f};
    if (is_mine) {
      const uint32_t row_terms = s.by_row_terms.d, skipped = t.first >> s.run_log2;
      uint32_t begin = 0, end = s.terms;
      if (blocks > 1) {  // what this block has of the channel
        const auto term_of = [&](uint32_t i) {
          if (s.channels_last) return i > c ? s.by_channels(i - c - 1) + 1 : 0;
          i = (i + (1u << s.run_log2) - 1) >> s.run_log2;
          return i > c * row_terms ? min(i - c * row_terms, row_terms) : 0;
        };
        begin = term_of(t.first);
        end = term_of(t.end);
      }
#pragma unroll 4
      for (uint32_t e = begin + sum_lane; e < end; e += s.by_sum_lanes.d) {
        const uint32_t team = s.by_row_terms(e), position = e - team * row_terms;
        const uint32_t i = s.channels_last ? position * s.channels + c : c * row_terms + position;
        const float2 pair = pairs[(team0 + team) * (s.chunk >> s.run_log2) + i - skipped];
        sums[0] += pair.x;
        sums[1] += pair.y;
      }
    }
    lanes_sum(s.by_sum_lanes.d, sums);
    if (s.by_sum_lanes.d > 32) {  // then there is one round
      if (t.tid % 32 == 0) {
        shared[1][t.tid / 32][0] = sums[0];
        shared[1][t.tid / 32][1] = sums[1];
      }
      __syncthreads();
      if (sum_lane == 0 && is_mine) {
        for (uint32_t w = 1; w < s.by_sum_lanes.d / 32; ++w) {
          sums[0] += shared[1][t.tid / 32 + w][0];
          sums[1] += shared[1][t.tid / 32 + w][1];
        }
      }
    }
    if (is_mine && sum_lane == 0) write_sums(p, t, team0, c, sums[0], sums[1]);
  }
}

// Backward where what a block or a team has of a channel is one element: nothing of it is added up here, and dweight
// and dbias have a thread each. A third of the instructions of the kernel above, which come from memory as x does.
template <typename T_, int kElements_, Chain kAct_, bool kBlock_>
struct SingleTraits {
  using T = T_;
  static constexpr int kElements = kElements_;
  static constexpr Chain kAct = kAct_;
  static constexpr bool kBlock = kBlock_;  // a team is the block; else up to a warp
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kElements == kSmallMaxElements ? kSmallMaxBwdThreads : kSmallMaxThreads)
    group_norm_single_bwd_kernel(const __grid_constant__ GroupNormSmallBwdParams p) {
  using T = typename Traits::T;
  constexpr int kElements = Traits::kElements;
  constexpr bool kBlock = Traits::kBlock, kAny = Traits::kAct == Chain::kAny;
  __shared__ float2 shared[kSmallMaxWarps];
  let_dependents_start();
  const SmallShares& s = p.shares;
  const uint32_t tid = threadIdx.x, lanes = kBlock ? blockDim.x : s.by_lanes.d, team = kBlock ? 0 : s.by_lanes(tid);
  const uint32_t lane = tid - team * lanes, unit = kBlock ? blockIdx.x : blockIdx.x * s.teams + team;
  const bool active = kBlock || (team < s.teams && unit < s.units), wide = p.affine_dtype == Dtype::kFloat32;
  const uint32_t first = unit * s.elements, channel0 = first - s.by_groups(unit) * s.sample;
  const auto element = [&](int k) { return lane + k * lanes; };
  const auto has = [&](int k) { return active && element(k) < s.elements; };
  const bool weighted = p.weight != nullptr, biased = p.bias != nullptr;
  // Parameters first, and all before any use: ptxas puts uses of x ahead of loads that come later.
  SmallAffine<T, kElements, true> weights, biases;
  T raw_x[kElements], raw_dy[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const uint32_t c = channel0 + element(k);
    weights.load_words(p.weight, k, c, has(k) && weighted && (wide || sizeof(T) == 4));
    if (sizeof(T) < 4) weights.load_halves(p.weight, k, c, has(k) && weighted && !wide);
    if (Traits::kAct == Chain::kNone) continue;
    biases.load_words(p.bias, k, c, has(k) && biased && (wide || sizeof(T) == 4));
    if (sizeof(T) < 4) biases.load_halves(p.bias, k, c, has(k) && biased && !wide);
  }
  const float mean = load_in_order<float>(p.mean, unit, active), rstd = load_in_order<float>(p.rstd, unit, active);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    raw_x[k] = load_in_order<T>(p.x, first + element(k), has(k));
    raw_dy[k] = load_in_order<T>(p.dy, first + element(k), has(k));
  }
  float xhat[kElements], dz[kElements], z[kElements], slope[kElements], weight[kElements];
  uint32_t stopped = 0;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = to_acc(raw_x[k]);
    dz[k] = to_acc(raw_dy[k]);
    slope[k] = rstd;
  }
  if constexpr (kAny) stopped = apply_slope(s.pre_kind, p.pre_act, xhat, slope);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    weight[k] = weighted ? weights.value(k, wide) : 1.f;
    xhat[k] = (xhat[k] - mean) * rstd;
    z[k] = xhat[k] * weight[k] + (biased ? biases.value(k, wide) : 0.f);
  }
  if constexpr (kAny) {
    multiply_slope(s.act_kind, p.act, z, dz);
  } else {
    multiply_slopes<Traits::kAct, false>(p.act, z, dz);
  }
  float terms[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const float own = weight[k] * dz[k];
    terms[0] += has(k) ? own : 0.f;
    terms[1] += has(k) ? own * xhat[k] : 0.f;
  }
  lanes_sum(kBlock ? 32 : lanes, terms);
  if (kBlock) {
    if (tid % 32 == 0) shared[tid / 32] = make_float2(terms[0], terms[1]);
    __syncthreads();
    const float2 other = tid % 32 < blockDim.x / 32 ? shared[tid % 32] : make_float2(0.f, 0.f);
    terms[0] = other.x;
    terms[1] = other.y;
    lanes_sum(32, terms);
  }
  // Divided, as in group_norm_small_bwd_kernel.
  const float elements = static_cast<float>(s.elements);
  terms[0] /= elements;
  terms[1] /= elements;
  T* const dx = static_cast<T*>(p.dx);
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    if (!has(k)) continue;
    const float d = slope[k] * (weight[k] * dz[k] - (terms[0] + xhat[k] * terms[1]));
    dx[first + element(k)] = from_acc<T>(stopped >> k & 1 ? 0.f : d);
    const float product = dz[k] * xhat[k];
    if (s.owner) {
      store_gradient<T>(p.dbias, channel0 + element(k), p.gradient_dtype, dz[k]);
      store_gradient<T>(p.dweight, channel0 + element(k), p.gradient_dtype, product);
    } else {
      reinterpret_cast<float2*>(p.channel_sums)[first + element(k)] = make_float2(dz[k], product);
    }
  }
}

template <auto kKernel, typename Params>
Status launch_small(const char* name, const Params& p, const SmallPlan& plan, cudaStream_t stream) {
  const LaunchShape shape{dim3(plan.grid), plan.threads, plan.smem_bytes, false, 1 << p.shares.blocks_log2};
  return launch_with(kKernel, facts_of<kKernel>(), name, shape, stream, p);
}

template <typename Traits>
Status launch_fwd(const GroupNormSmallFwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  const auto launch = [&](auto block, auto last, auto cluster) {
    using Own = SmallFwdTraits<Traits, decltype(block)::value, decltype(last)::value, decltype(cluster)::value>;
    return launch_small<group_norm_small_fwd_kernel<Own>>("group_norm_small_fwd_kernel", p, plan, stream);
  };
  const std::true_type yes;
  const std::false_type no;
  const bool last = p.shares.channels_last;
  if constexpr (Traits::kElements == 1) {
    if (p.shares.by_lanes.d <= 32) return last ? launch(no, yes, no) : launch(no, no, no);
  }
  if constexpr (Traits::kElements == kSmallMaxElements) {
    if (p.shares.blocks_log2 > 0) return launch(yes, yes, yes);
  }
  return last ? launch(yes, yes, no) : launch(yes, no, no);
}
template <typename Traits>
Status launch_bwd(Traits, const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  return launch_small<group_norm_small_bwd_kernel<Traits>>("group_norm_small_bwd_kernel", p, plan, stream);
}

template <typename T, int kElements, Chain kAct, bool kBlock>
Status launch_bwd(SingleTraits<T, kElements, kAct, kBlock>, const GroupNormSmallBwdParams& p, const SmallPlan& plan,
                  cudaStream_t stream) {
  return launch_small<group_norm_single_bwd_kernel<SingleTraits<T, kElements, kAct, kBlock>>>(
      "group_norm_single_bwd_kernel", p, plan, stream);
}

template <typename T, int kElements, Chain kAct, typename Launch>
Status dispatch_single(const SmallPlan& plan, Launch launch) {
  return plan.shares.by_lanes.d > 32 ? launch(SingleTraits<T, kElements, kAct, true>())
                                     : launch(SingleTraits<T, kElements, kAct, false>());
}
// Calls launch(Traits()) with what the plan and the chains ask for.
template <typename T, Chain kAct, bool kBackward, typename Launch>
Status dispatch_runs(const SmallPlan& plan, Launch launch) {
  if constexpr (kBackward) {
    if (plan.single) {
      return plan.runs == 1   ? dispatch_single<T, 1, kAct>(plan, launch)
             : plan.runs == 4 ? dispatch_single<T, 4, kAct>(plan, launch)
                              : dispatch_single<T, kSmallMaxElements, kAct>(plan, launch);
    }
  }
  if (plan.run == kSmallRun) {
    return plan.runs == 1 ? launch(SmallTraits<T, kSmallRun, 1, kAct>()) : launch(SmallTraits<T, kSmallRun, 2, kAct>());
  }
  return plan.runs == 1   ? launch(SmallTraits<T, 1, 1, kAct>())
         : plan.runs == 4 ? launch(SmallTraits<T, 1, 4, kAct>())
                          : launch(SmallTraits<T, 1, 8, kAct>());
}
template <typename T, bool kBackward, typename Launch>
Status dispatch_chain(const SmallShares& shares, const SmallPlan& plan, Launch launch) {
  if (shares.pre_kind != Chain::kNone) return dispatch_runs<T, Chain::kAny, kBackward>(plan, launch);
  switch (shares.act_kind) {
    case Chain::kNone: return dispatch_runs<T, Chain::kNone, kBackward>(plan, launch);
    case Chain::kRelu: return dispatch_runs<T, Chain::kRelu, kBackward>(plan, launch);
    case Chain::kSilu: return dispatch_runs<T, Chain::kSilu, kBackward>(plan, launch);
    default: return dispatch_runs<T, Chain::kAny, kBackward>(plan, launch);
  }
}
template <bool kBackward, typename Params, typename Launch>
Status dispatch(const char* name, Params& p, const SmallPlan& plan, Launch launch) {
  p.shares.pre_kind = chain_kind(p.pre_act);
  p.shares.act_kind = chain_kind(p.act);
  switch (p.dtype) {
    case Dtype::kFloat32: return dispatch_chain<float, kBackward>(p.shares, plan, launch);
    case Dtype::kBFloat16: return dispatch_chain<__nv_bfloat16, kBackward>(p.shares, plan, launch);
    case Dtype::kFloat16: return dispatch_chain<__half, kBackward>(p.shares, plan, launch);
    default: return Status::Unsupported(name, "float64");
  }
}

}  // namespace

Status run_group_norm_small_fwd(GroupNormSmallFwdParams p, const SmallPlan& plan, cudaStream_t stream) {
  if (plan.plane) return run_group_norm_plane_fwd(p, plan, stream);
  return dispatch<false>("group_norm_small_fwd_kernel", p, plan,
                         [&](auto traits) { return launch_fwd<decltype(traits)>(p, plan, stream); });
}

Status run_group_norm_small_bwd(GroupNormSmallBwdParams p, const SmallPlan& plan, cudaStream_t stream) {
  if (plan.plane) return run_group_norm_plane_bwd(p, plan, stream);
  return dispatch<true>("group_norm_small_bwd_kernel", p, plan,
                        [&](auto traits) { return launch_bwd(traits, p, plan, stream); });
}

}  // namespace kgopt
