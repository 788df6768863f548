// Tests of the kernels as a plain C++ library, without Python and torch. The host side (planning, activation chains)
// is checked everywhere; with a GPU, small shapes are launched and compared with loops on the host. Also an example of
// calling the launchers from a C++ program.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/act_names.h"
#include "common/activation.h"
#include "conv3d/choice/choice.h"
#include "conv3d/implicit_gemm/plan.h"
#include "conv3d/shape.h"

#if defined(KGOPT_CUDA)
#include <cuda_runtime_api.h>

#include "common/host/device_info.h"
#include "conv3d/implicit_gemm/implicit_gemm.h"
#include "groupnorm/groupnorm.h"
#endif

namespace {

using namespace kgopt;

int checks = 0, failures = 0;
const char* current_test = "";

#define CHECK(cond)                                                                      \
  do {                                                                                   \
    ++checks;                                                                            \
    if (!(cond)) {                                                                       \
      ++failures;                                                                        \
      std::printf("%s:%d: %s: not true: %s\n", __FILE__, __LINE__, current_test, #cond); \
    }                                                                                    \
  } while (0)

struct ConvCase {
  const char* name;
  int64_t n, c_in, c_out, groups;
  int64_t in[3], kernel[3], stride[3], padding[3], dilation[3];
  bool transposed;
};

// Each is there for what its name says; sizes are small, odd and no multiple of a tile.
const ConvCase kConvCases[] = {
    {"plain 3d", 2, 3, 24, 1, {5, 9, 11}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}, false},
    {"2d as depth 1", 2, 8, 40, 1, {1, 13, 37}, {1, 3, 3}, {1, 1, 1}, {0, 1, 1}, {1, 1, 1}, false},
    {"stride, padding, dilation", 1, 5, 7, 1, {6, 11, 13}, {2, 3, 4}, {2, 1, 3}, {1, 2, 0}, {1, 2, 1}, false},
    {"conv groups", 2, 6, 10, 2, {4, 7, 9}, {3, 1, 3}, {1, 1, 1}, {1, 0, 1}, {1, 1, 1}, false},
    {"channels in chunks", 1, 33, 70, 1, {2, 6, 10}, {1, 3, 3}, {1, 1, 1}, {0, 1, 1}, {1, 1, 1}, false},
    {"one of everything", 1, 1, 1, 1, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}, false},
    {"transposed", 2, 6, 12, 1, {3, 5, 7}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}, true},
    {"transposed, strides mixed", 1, 4, 9, 1, {3, 5, 6}, {3, 4, 2}, {2, 3, 1}, {1, 0, 1}, {1, 1, 1}, true},
    {"transposed, kernel below stride", 1, 4, 8, 1, {3, 4, 5}, {1, 2, 3}, {3, 3, 4}, {0, 0, 0}, {1, 1, 1}, true},
    {"transposed, groups and dilation", 1, 4, 6, 2, {2, 5, 4}, {2, 3, 3}, {2, 2, 3}, {0, 1, 2}, {3, 2, 1}, true},
};

int64_t out_size(const ConvCase& c, int i) {
  return conv_out_size(c.in[i], c.kernel[i], c.stride[i], c.padding[i], c.dilation[i], c.transposed, 0);
}

ConvProblem make_problem(const ConvCase& c, Dtype dtype, bool allow_tf32) {
  ConvProblem p;
  p.n = c.n;
  p.c_in = c.c_in;
  p.c_out = c.c_out;
  p.groups = c.groups;
  for (int i = 0; i < 3; ++i) {
    p.in[i] = c.in[i];
    p.out[i] = out_size(c, i);
    p.kernel[i] = c.kernel[i];
    p.stride[i] = c.stride[i];
    p.padding[i] = c.padding[i];
    p.dilation[i] = c.dilation[i];
  }
  p.transposed = c.transposed;
  p.dtype = dtype;
  p.allow_tf32 = allow_tf32;
  return p;
}

// Input index that output o reads through tap k along dim i, or -1: the definition of the operation.
int64_t input_index(const ConvCase& c, int i, int64_t o, int64_t k) {
  int64_t at = o * c.stride[i] - c.padding[i] + k * c.dilation[i];
  if (c.transposed) {
    const int64_t scaled = o + c.padding[i] - k * c.dilation[i];
    if (scaled < 0 || scaled % c.stride[i] != 0) return -1;
    at = scaled / c.stride[i];
  }
  return at >= 0 && at < c.in[i] ? at : -1;
}

void test_activation_chains() {
  current_test = "activation chains";
  ActChain chain;
  std::string error;
  CHECK(parse_act_chain("tanh+hardswish", &chain, &error) && chain.length == 2);
  CHECK(std::abs(chain_value(chain, 0.3) - std::tanh(0.3) * (std::tanh(0.3) + 3) / 6) < 1e-15);
  CHECK(parse_act_chain("none", &chain, &error) && chain.empty());
  CHECK(!parse_act_chain("relu+swish2", &chain, &error));
  CHECK(error.find("swish2") != std::string::npos && error.find("hardswish") != std::string::npos);
  CHECK(parse_act_chain("relu", &chain, &error) && std::isnan(chain_value(chain, std::nan(""))));
}

// Along each dim, the classes and taps of the plan multiply exactly what the definition does.
void test_plans() {
  for (const ConvCase& c : kConvCases) {
    current_test = c.name;
    const DeviceLimits limits;
    const ConvProblem problem = make_problem(c, Dtype::kFloat32, true);
    const ImplicitGemmPlan plan = plan_implicit_gemm(problem, limits);
    CHECK(plan.refusal == nullptr);
    CHECK(plan.smem_bytes > 0 && plan.smem_bytes <= limits.smem_per_block);
    CHECK(plan.slices * plan.tiles_per_slice >= plan.tiles_per_sample);
    for (int i = 0; i < 3; ++i) {
      std::set<std::tuple<int64_t, int64_t, int64_t>> wanted, planned;
      for (int64_t o = 0; o < problem.out[i]; ++o) {
        for (int64_t k = 0; k < c.kernel[i]; ++k) {
          const int64_t at = input_index(c, i, o, k);
          if (at >= 0) wanted.insert({o, at, k});
        }
      }
      for (int r = 0; r < plan.classes[i]; ++r) {
        const ConvDimClass& cls = plan.dim[i][r];
        for (int64_t q = 0; q < cls.q_count; ++q) {
          for (int tap = 0; tap < cls.taps; ++tap) {
            const int64_t at = q * plan.in_step[i] + cls.off0 + int64_t(tap) * cls.off_step;
            if (at < 0 || at >= c.in[i]) continue;
            const bool first_time = planned.insert({q * plan.out_step[i] + r, at, cls.k0 + tap * cls.k_step}).second;
            CHECK(first_time);
          }
        }
      }
      CHECK(planned == wanted);
    }
  }
}

void test_choices() {
  current_test = "choices";
  ConvProblem problem = make_problem(kConvCases[0], Dtype::kFloat32, true);
  CHECK(choose_conv(problem, {}, ConvBackend::kAten).path() == ConvPath::kAten);
  CHECK(choose_conv(problem, {}, ConvBackend::kKgopt).path() == ConvPath::kImplicitGemm);
  if (!problem.transposed) {
    problem.epilogue = ConvEpilogue::kStats;
    CHECK(choose_conv(problem, {}, ConvBackend::kKgopt).path() == ConvPath::kFewChannels);
    DeviceLimits older;
    older.has_wgmma = false;
    CHECK(choose_conv(problem, older, ConvBackend::kKgopt).path() == ConvPath::kImplicitGemm);
    problem.epilogue = ConvEpilogue::kStore;
  }
  problem.dtype = Dtype::kFloat64;
  CHECK(choose_conv(problem, {}, ConvBackend::kKgopt).path() == ConvPath::kDirect);
  CHECK(!choose_conv(problem, {}, ConvBackend::kAuto).reason.empty());
}

#if defined(KGOPT_CUDA)

// Small integers: every product and sum is exact in TF32 and fp32, so results are compared bit for bit.
std::vector<float> small_integers(int64_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (float& v : values) {
    seed = seed * 1664525u + 1013904223u;
    v = static_cast<float>(static_cast<int>(seed >> 24) % 7 - 3);
  }
  return values;
}

// A device allocation that starts as the given values.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes, int fill = 0xff) : bytes_(bytes) {
    ok_ = cudaMalloc(&data_, bytes < 4 ? 4 : bytes) == cudaSuccess && cudaMemset(data_, fill, bytes) == cudaSuccess;
  }
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size() * sizeof(T)) {
    ok_ = ok_ && cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice) == cudaSuccess;
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDeviceToHost);
    return values;
  }
  bool ok() const { return ok_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
  bool ok_ = false;
};

std::vector<float> conv_on_host(const ConvCase& c, const std::vector<float>& x, const std::vector<float>& weight,
                                const std::vector<float>& bias) {
  const int64_t out[3] = {out_size(c, 0), out_size(c, 1), out_size(c, 2)};
  const int64_t ci_per = c.c_in / c.groups, co_per = c.c_out / c.groups;
  std::vector<float> y;
  for (int64_t n = 0; n < c.n; ++n) {
    for (int64_t co = 0; co < c.c_out; ++co) {
      for (int64_t position = 0; position < out[0] * out[1] * out[2]; ++position) {
        const int64_t o[3] = {position / (out[1] * out[2]), position / out[2] % out[1], position % out[2]};
        double sum = bias[co];
        for (int64_t tap = 0; tap < c.kernel[0] * c.kernel[1] * c.kernel[2]; ++tap) {
          const int64_t k[3] = {tap / (c.kernel[1] * c.kernel[2]), tap / c.kernel[2] % c.kernel[1], tap % c.kernel[2]};
          int64_t at = 0;
          for (int i = 0; i < 3 && at >= 0; ++i) {
            const int64_t index = input_index(c, i, o[i], k[i]);
            at = index < 0 ? -1 : at * c.in[i] + index;
          }
          if (at < 0) continue;
          for (int64_t ci = 0; ci < ci_per; ++ci) {
            const int64_t channel = co / co_per * ci_per + ci;
            // [C_out, C_in / groups, k...], and transposed [C_in, C_out / groups, k...].
            const int64_t row = c.transposed ? channel * co_per + co % co_per : co * ci_per + ci;
            sum += double(x[(n * c.c_in + channel) * c.in[0] * c.in[1] * c.in[2] + at]) *
                   weight[row * c.kernel[0] * c.kernel[1] * c.kernel[2] + tap];
          }
        }
        y.push_back(static_cast<float>(sum));
      }
    }
  }
  return y;
}

// Strides of a contiguous [*, d, h, w].
void contiguous_strides(const int64_t (&size)[3], int64_t (&stride)[3]) {
  stride[2] = 1;
  stride[1] = size[2];
  stride[0] = size[1] * size[2];
}

void test_convolutions(const DeviceInfo& info) {
  for (const ConvCase& c : kConvCases) {
    current_test = c.name;
    const ConvProblem problem = make_problem(c, Dtype::kFloat32, true);
    const int64_t in_size = c.in[0] * c.in[1] * c.in[2], taps = c.kernel[0] * c.kernel[1] * c.kernel[2];
    const int64_t out_total = problem.out[0] * problem.out[1] * problem.out[2];
    const std::vector<float> x = small_integers(c.n * c.c_in * in_size, 1);
    const std::vector<float> weight = small_integers(c.c_in * c.c_out / c.groups * taps, 2);
    const std::vector<float> bias = small_integers(c.c_out, 3);
    const std::vector<float> expected = conv_on_host(c, x, weight, bias);
    const DeviceBuffer x_device(x), weight_device(weight), bias_device(bias);

    for (const bool tf32 : {true, false}) {
      const ImplicitGemmPlan plan = plan_implicit_gemm(make_problem(c, Dtype::kFloat32, tf32),
                                                       {info.sm_count, info.smem_per_block, info.smem_per_sm});
      CHECK(plan.refusal == nullptr);
      ImplicitGemmPackParams pack{};
      pack.weight = weight_device.as<void>();
      pack.bias = bias_device.as<void>();
      pack.c_in = static_cast<int>(c.c_in / c.groups);
      pack.c_out = static_cast<int>(c.c_out / c.groups);
      pack.groups = static_cast<int>(c.groups);
      pack.stride_out = c.transposed ? taps : pack.c_in * taps;
      pack.stride_in = c.transposed ? pack.c_out * taps : taps;
      pack.stride_group = c.transposed ? pack.c_in * pack.stride_in : pack.c_out * pack.stride_out;
      contiguous_strides(c.kernel, pack.stride_k);
      pack.dtype = Dtype::kFloat32;
      pack.plan = plan;
      const DeviceBuffer packed(plan.packed_words * 4), packed_bias(c.groups * plan.n_tiles * plan.nb * 8 * 4);
      pack.packed = packed.as<uint32_t>();
      pack.packed_bias = packed_bias.as<float>();

      ImplicitGemmParams p{};
      p.x = x_device.as<void>();
      p.x_stride_c = in_size;
      p.x_stride_n = c.c_in * in_size;
      contiguous_strides(c.in, p.x_stride);
      p.packed_weight = pack.packed;
      p.bias = pack.packed_bias;
      const DeviceBuffer y(expected.size() * sizeof(float));  // starts as NaN: an unwritten element shows
      p.y = y.as<void>();
      p.y_stride_c = out_total;
      p.y_stride_n = c.c_out * out_total;
      contiguous_strides(problem.out, p.y_stride);
      p.c_in = pack.c_in;
      p.c_out = pack.c_out;
      p.c_out_total = static_cast<int>(c.c_out);
      p.groups = pack.groups;
      for (int i = 0; i < 3; ++i) {
        p.in[i] = static_cast<int>(c.in[i]);
        p.out[i] = static_cast<int>(problem.out[i]);
      }
      p.plan = plan;
      CHECK(x_device.ok() && weight_device.ok() && packed.ok() && y.ok());
      CHECK(run_conv_pack(pack, nullptr).ok());
      CHECK(run_conv3d(p, c.n, nullptr).ok());
      CHECK(cudaDeviceSynchronize() == cudaSuccess);
      CHECK(y.read<float>() == expected);
    }
  }
}

struct NormCase {
  const char* name;
  int64_t n, c, s, g;
  bool channels_last;
  const char* act;
};

const NormCase kNormCases[] = {
    {"group norm, contiguous", 2, 24, 5 * 7 * 9, 8, false, "none"},
    {"group norm, channels last", 2, 24, 5 * 7 * 9, 8, true, "silu"},
    {"group norm, large groups", 1, 8, 40009, 2, false, "tanh+hardswish"},
    {"group norm, large and channels last", 1, 12, 20011, 3, true, "relu"},
    {"group norm, one channel a group", 3, 5, 17, 5, false, "none"},
    {"group norm, one position", 2, 30, 1, 3, false, "none"},
};

// Values around 100 and a spread of 3: statistics by E[x^2] - E[x]^2 would lose digits here.
void test_group_norms(const DeviceInfo& info) {
  const double eps = 1e-5;
  for (const NormCase& c : kNormCases) {
    current_test = c.name;
    ActChain act;
    std::string error;
    CHECK(parse_act_chain(c.act, &act, &error));
    std::vector<float> x = small_integers(c.n * c.c * c.s, 4);
    for (size_t i = 0; i < x.size(); ++i) x[i] += 100.f + static_cast<float>(i % 11) * 0.25f;
    std::vector<float> weight = small_integers(c.c, 5), bias = small_integers(c.c, 6);
    const auto at = [&](int64_t n, int64_t channel, int64_t position) {
      return c.channels_last ? (n * c.s + position) * c.c + channel : (n * c.c + channel) * c.s + position;
    };

    const DeviceBuffer x_device(x), weight_device(weight), bias_device(bias), y(x.size() * sizeof(float));
    const DeviceBuffer mean(c.n * c.g * sizeof(float)), rstd(c.n * c.g * sizeof(float));
    const DeviceBuffer table(c.n * c.c * 4 * sizeof(float));
    GroupStatsParams stats;
    stats.x = x_device.as<void>();
    stats.dims.n = c.n;
    stats.dims.c = c.c;
    stats.dims.s = c.s;
    stats.dims.g = c.g;
    stats.dims.channels_last = c.channels_last;
    plan_group_stats(&stats, false, info.sm_count);
    CHECK(stats.partials.rows % c.g == 0 && stats.partials.slices > 0);
    const DeviceBuffer partials(c.n * stats.partials.slices * stats.partials.rows * 3 * sizeof(float));
    stats.partials.data = partials.as<void>();
    CHECK(run_group_stats(stats, nullptr).ok());

    GroupStatsFinalizeParams finalize;
    finalize.partials = stats.partials;
    finalize.n = c.n;
    finalize.c = c.c;
    finalize.g = c.g;
    finalize.eps = eps;
    finalize.mean = mean.as<void>();
    finalize.rstd = rstd.as<void>();
    finalize.table = table.as<void>();
    finalize.weight = weight_device.as<void>();
    finalize.bias = bias_device.as<void>();
    CHECK(run_group_stats_finalize(finalize, nullptr).ok());

    NormalizeParams normalize;
    normalize.x = x_device.as<void>();
    normalize.y = y.as<void>();
    normalize.table = table.as<void>();
    normalize.dims = stats.dims;
    normalize.act = act;
    CHECK(run_normalize(normalize, nullptr).ok());
    CHECK(cudaDeviceSynchronize() == cudaSuccess);

    // Against host loops in double precision.
    const auto compare = [&](const DeviceBuffer& y, const DeviceBuffer& mean, const DeviceBuffer& rstd) {
      const std::vector<float> y_host = y.read<float>(), mean_host = mean.read<float>(), rstd_host = rstd.read<float>();
      const int64_t per_group = c.c / c.g;
      double worst = 0, worst_mean = 0, worst_rstd = 0;
      for (int64_t n = 0; n < c.n; ++n) {
        for (int64_t g = 0; g < c.g; ++g) {
          const double count = double(per_group) * double(c.s);
          double sum = 0, squares = 0;
          for (int64_t i = 0; i < per_group * c.s; ++i) sum += x[at(n, g * per_group + i / c.s, i % c.s)];
          for (int64_t i = 0; i < per_group * c.s; ++i) {
            const double deviation = x[at(n, g * per_group + i / c.s, i % c.s)] - sum / count;
            squares += deviation * deviation;
          }
          const double expected_rstd = 1 / std::sqrt(squares / count + eps);
          // Written so that a NaN counts as the worst and stays.
          const auto raise = [](double* to, double error) {
            if (!(error <= *to) && !std::isnan(*to)) *to = error;
          };
          raise(&worst_mean, std::abs(mean_host[n * c.g + g] - sum / count) / 100);
          raise(&worst_rstd, std::abs(rstd_host[n * c.g + g] / expected_rstd - 1));
          for (int64_t i = 0; i < per_group * c.s; ++i) {
            const int64_t channel = g * per_group + i / c.s, index = at(n, channel, i % c.s);
            const double z = (x[index] - sum / count) * expected_rstd * weight[channel] + bias[channel];
            raise(&worst, std::abs(y_host[index] - chain_value(act, z)));
          }
        }
      }
      CHECK(worst_mean < 1e-6);
      CHECK(worst_rstd < 1e-5);
      // x has 24 bits and sits at 100: what is left of them after the mean is taken, times rstd and weight. A single
      // position has rstd = 316 where the group is constant.
      CHECK(worst < (c.s == 1 ? 1e-2 : 2e-4));
    };
    compare(y, mean, rstd);

    NormPlanInput in;
    in.dims = stats.dims;
    in.x_offset = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x_device.as<void>()) % 128);
    in.max_blocks = info.compute_capability >= 90 ? max_cluster_blocks(0) : 0;
    in.sm_count = info.sm_count;
    in.smem_bytes = info.smem_per_block;
    const ClusterPlan plan = plan_group_norm_cluster(in);
    CHECK((plan.refusal != nullptr) == (c.channels_last || (in.max_blocks == 0 && c.s * c.c / c.g > 500)));
    if (plan.refusal) continue;
    const DeviceBuffer y_chip(x.size() * sizeof(float));
    const DeviceBuffer mean_chip(c.n * c.g * sizeof(float)), rstd_chip(c.n * c.g * sizeof(float));
    GroupNormClusterFwdParams p;
    p.x = x_device.as<void>();
    p.y = y_chip.as<void>();
    p.weight = weight_device.as<void>();
    p.bias = bias_device.as<void>();
    p.shares = plan.shares;
    p.act = act;
    p.mean = mean_chip.as<float>();
    p.rstd = rstd_chip.as<float>();
    CHECK(run_group_norm_cluster_fwd(p, plan, nullptr).ok());
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    compare(y_chip, mean_chip, rstd_chip);
  }
}

// Where there is a GPU that the kernels can run on.
void test_on_gpu() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("no GPU here: kernels not launched\n");
    return;
  }
  current_test = "device_info";
  DeviceInfo info;
  CHECK(device_info(0, &info).ok());
  CHECK(!device_info(1000, &info).ok());
  CHECK(device_info(0, &info).ok());
  if (info.compute_capability < 80 || !info.has_code) {
    std::printf("GPU 0 has compute capability %d.%d: no code for it here, kernels not launched\n",
                info.compute_capability / 10, info.compute_capability % 10);
    return;
  }
  test_convolutions(info);
  test_group_norms(info);
}

#endif

}  // namespace

int main() {
  test_activation_chains();
  test_plans();
  test_choices();
#if defined(KGOPT_CUDA)
  test_on_gpu();
#else
  std::printf("built without CUDA: host side only\n");
#endif
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
