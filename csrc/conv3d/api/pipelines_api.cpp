// The three fused pipelines on CUDA: which passes run, over which buffers. Conv + GroupNorm + mean and Conv + GroupNorm
// + ... + logsumexp never store the convolution's output where the implicit GEMM runs; elsewhere they are composed of
// the single ops, and explain_conv says why.
#include "conv3d/api/call.h"
#include "conv3d/few_channels/start.h"
#include "conv3d/implicit_gemm/start.h"
#include "conv3d/norm_conv/scaled_half.h"
#include "conv3d/small_chain/start.h"
#include "conv3d/wgmma/transposed_norm/start.h"
#include "groupnorm/api/checks.h"
#include "groupnorm/api/group_norm_api.h"
#include "reduce/reduce_api.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

struct __attribute__((visibility("hidden"))) Norm {
  int64_t groups;
  OptTensor weight, bias;
  double eps;

  Norm(const char* op, const Tensor& x, int64_t channels, int64_t num_groups, const OptTensor& gn_weight,
       const OptTensor& gn_bias, double epsilon)
      : groups(num_groups), eps(epsilon) {
    check_group_norm_affine(op, x, channels, num_groups, gn_weight, gn_bias);
    if (gn_weight) weight = dense_in(*gn_weight, MemoryFormat::Contiguous);
    if (gn_bias) bias = dense_in(*gn_bias, MemoryFormat::Contiguous);
  }
  const void* weight_data() const { return weight ? weight->const_data_ptr() : nullptr; }
  const void* bias_data() const { return bias ? bias->const_data_ptr() : nullptr; }
  Dtype dtype(const char* op) const {
    return weight ? check_dtype(op, "weight", *weight) : bias ? check_dtype(op, "bias", *bias) : Dtype::kFloat32;
  }
};

int64_t partials_slices(const ImplicitGemmPlan& plan) {
  return plan.slices * plan.classes[0] * plan.classes[1] * plan.classes[2];
}

int64_t partials_bytes(const ConvOperands& o, int64_t slices) { return o.n * slices * o.c_out * 3 * 4; }

// The merge of what a convolution's epilogue left in `partials`.
GroupStatsFinalizeParams finalize_params(const ConvArgs& a, const ConvShape& shape, int64_t slices, const Norm& norm,
                                         float* partials, void* mean, void* rstd) {
  GroupStatsFinalizeParams f;
  f.partials = {partials, slices, shape.c_out};
  f.n = shape.n;
  f.c = shape.c_out;
  f.g = norm.groups;
  f.eps = norm.eps;
  f.mean = mean;
  f.rstd = rstd;
  f.weight = norm.weight_data();
  f.bias = norm.bias_data();
  f.affine_dtype = norm.dtype(a.op);
  return f;
}

// Statistics of a convolution whose output is not stored.
struct __attribute__((visibility("hidden"))) StatsPass {
  const ConvArgs& a;
  const CallOperands& operands;
  const Choice& choice;
  int64_t packed = 0, bias = 0, partials = 0, sums = 0, inexact = 0;  // workspace pieces

  bool packs_weights() const { return choice.path() == ConvPath::kImplicitGemm; }
  // The plan counts on rows in vectors where their width lets them be.
  bool from_input() const {
    const int64_t vector = 16 / dtype_size(operands.dtype);
    return choice.autocorrelation && (operands.in[2] % vector != 0 || rows_in_vectors(operands, vector));
  }
  int64_t slices() const {
    return packs_weights() ? partials_slices(choice.as<ImplicitGemmPlan>()) : choice.as<FewChannelsPlan>().slices;
  }

  void reserve(Workspace* workspace) {
    if (packs_weights()) {
      packed = workspace->reserve(packed_weight_bytes(choice.as<ImplicitGemmPlan>()));
      bias = workspace->reserve(packed_bias_bytes(operands, choice.as<ImplicitGemmPlan>()));
    }
    partials = workspace->reserve(partials_bytes(operands, slices()));
    if (from_input()) {
      sums = workspace->reserve(operands.n * choice.autocorrelation->slices * choice.autocorrelation->slice_floats * 4);
      inexact = workspace->reserve(operands.n * 4);
    }
  }

  // Leaves what `finish` asks for and, where it can, in sample_mean the mean of each sample's norm. Says whether it
  // did.
  bool run(Workspace& workspace, GroupStatsFinalizeParams finish, float* sample_mean, cudaStream_t stream) const {
    const int64_t n = operands.n;
    if (!packs_weights()) {
      const FewChannelsPlan& plan = choice.as<FewChannelsPlan>();
      FewChannelsStats stats{};
      stats.partials = workspace.at<float>(partials);
      stats.slices = slices();
      stats.c_out_total = static_cast<int>(operands.c_out);
      stats.finishes = few_channels_sees_samples(plan, operands.groups);
      stats.finish = finish;
      stats.sample_mean = sample_mean;
      if (from_input()) {
        AutocorrelationParams p = autocorrelation_params(operands, *choice.autocorrelation);
        p.stats = stats;
        p.sums = workspace.at<float>(sums);
        p.inexact = workspace.at<int>(inexact);
        raise_on_error(a.op, run_conv_autocorrelation(p, n, stream));
        // Behind it the convolution does the samples that are not exact enough.
        stats.only = finish.only = p.inexact;
      }
      FewChannelsParams p = few_channels_params(operands, plan);
      p.stats = stats;
      raise_on_error(a.op, run_few_channels_stats(p, n, stream));
      if (stats.finishes) return true;
    } else {
      ImplicitGemmParams p = implicit_gemm_params(operands, choice.as<ImplicitGemmPlan>());
      raise_on_error(
          a.op, pack_implicit_gemm(operands, &p, workspace.at<uint32_t>(packed), workspace.at<float>(bias), stream));
      p.partials = workspace.at<float>(partials);
      raise_on_error(a.op, run_conv3d_stats(p, n, stream));
    }
    raise_on_error(a.op, run_group_stats_finalize(finish, stream));
    return false;
  }
};

// A small result in float32: a tensor where somebody is given it, else a piece of the workspace. An allocation takes
// the host a third of a launch.
class __attribute__((visibility("hidden"))) SmallResult {
 public:
  // Before the workspace is allocated.
  SmallResult(Workspace* workspace, IntArray sizes, bool given) : sizes_(std::move(sizes)), given_(given) {
    int64_t count = 4;
    for (const int64_t size : sizes_) count *= size;
    if (!given_) at_ = workspace->reserve(count);
  }
  // And behind it.
  void make(const Tensor& like, const Workspace& workspace) {
    if (given_) tensor = empty_like_shape(like, sizes_, ScalarType::Float);
    data = given_ ? tensor.mutable_data_ptr() : workspace.at<void>(at_);
  }

  Tensor tensor;
  void* data = nullptr;

 private:
  IntArray sizes_;
  bool given_;
  int64_t at_ = 0;
};

// Whether the chain kernel's offsets suffice, within a sample of x and within the weight.
bool offsets_suffice(const ConvArgs& a) {
  const auto last = [](const Tensor& t, int64_t from) {
    int64_t at = 0;
    for (int64_t i = from; i < t.dim(); ++i) at += (t.size(i) - 1) * t.stride(i);
    return at;
  };
  return std::max(last(a.x, 1), last(a.weight, 0)) < int64_t(1) << 31;
}

// The norm's groups where one launch may do the chain, else 0.
int64_t chain_groups(const ConvArgs& a, int64_t num_groups) { return offsets_suffice(a) ? num_groups : 0; }

// The whole chain in one launch: `y` and, where they are not null, the statistics. False where it is refused after all,
// as in a process that may use only some multiprocessors.
bool run_chain(const ConvArgs& a, const ConvShape& shape, const ChainPlan& plan, const Norm& norm, const Tensor& y,
               const Tensor* mean, const Tensor* rstd, const Tensor* channel_mean) {
  const CallOperands operands(a, shape);
  ChainParams p = chain_params(operands, plan);
  p.norm_weight = norm.weight_data();
  p.norm_bias = norm.bias_data();
  p.affine_dtype = norm.dtype(a.op);
  p.num_groups = static_cast<int>(norm.groups);
  p.eps = static_cast<float>(norm.eps);
  p.lse = a.rank == 2;
  p.y = y.mutable_data_ptr();
  p.y_dtype = check_dtype(a.op, "y", y);
  const auto data = [](const Tensor* t) { return t ? static_cast<float*>(t->mutable_data_ptr()) : nullptr; };
  p.mean = data(mean);
  p.rstd = data(rstd);
  p.channel_mean = data(channel_mean);
  Workspace workspace(a.x);
  const int64_t moments = workspace.reserve(plan.is_team ? shape.n * plan.blocks * shape.c_out * 16 : 0);
  const int64_t arrived = workspace.reserve(plan.is_team ? shape.n * sizeof(uint32_t) : 0);
  workspace.allocate();
  p.moments = workspace.at<void>(moments);
  p.arrived = workspace.at<uint32_t>(arrived);
  const Status status = run_conv_chain(p, static_cast<cudaStream_t>(current_stream(a.x)));
  if (status.code == StatusCode::kUnsupported) return false;
  raise_on_error(a.op, status);
  return true;
}

struct __attribute__((visibility("hidden"))) MeanResult {
  Tensor out, channel_mean, mean, rstd;
};

// Without `given` out alone is returned, in x's dtype.
MeanResult conv_group_norm_mean(const ConvArgs& a, int64_t num_groups, const OptTensor& gn_weight,
                                const OptTensor& gn_bias, double eps, bool given) {
  const ConvShape shape = check_conv_args(a);
  const Norm norm(a.op, a.x, shape.c_out, num_groups, gn_weight, gn_bias, eps);
  const DeviceGuard guard(a.x.get_device_index());
  ChoicePtr choice = choose(a, shape, ConvEpilogue::kStats, chain_groups(a, num_groups));
  if (choice->path() == ConvPath::kChain && !shape.is_empty()) {
    MeanResult r{empty_like_shape(a.x, {shape.n}, given ? ScalarType::Float : a.x.scalar_type())};
    if (given) {
      r.channel_mean = empty_like_shape(a.x, {shape.n, shape.c_out}, ScalarType::Float);
      r.mean = empty_like_shape(a.x, {shape.n, num_groups}, ScalarType::Float);
      r.rstd = empty_like_shape(a.x, {shape.n, num_groups}, ScalarType::Float);
    }
    if (run_chain(a, shape, choice->as<ChainPlan>(), norm, r.out, given ? &r.mean : nullptr, given ? &r.rstd : nullptr,
                  given ? &r.channel_mean : nullptr)) {
      return r;
    }
    choice = choice->passes;
  }
  if (choice->composed || shape.is_empty()) {
    ConvTail tail;  // the bias can wait: to statistics it is a shift of each channel
    const Tensor c = conv_forward(a, &tail);
    auto [out, channel_mean, mean, rstd] =
        group_norm_mean_cuda(c, num_groups, norm.weight, norm.bias, eps, tail.left_bias ? a.bias : std::nullopt, given);
    return {out, channel_mean, mean, rstd};
  }
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  const CallOperands operands(a, shape);
  StatsPass pass{a, operands, *choice};
  Workspace workspace(a.x);
  pass.reserve(&workspace);
  SmallResult out(&workspace, {shape.n}, given || shape.dtype == Dtype::kFloat32);
  SmallResult channel_mean(&workspace, {shape.n, shape.c_out}, given);
  SmallResult mean(&workspace, {shape.n, num_groups}, given), rstd(&workspace, {shape.n, num_groups}, given);
  workspace.allocate();
  for (SmallResult* r : {&out, &channel_mean, &mean, &rstd}) r->make(a.x, workspace);

  GroupStatsFinalizeParams f =
      finalize_params(a, shape, pass.slices(), norm, workspace.at<float>(pass.partials), mean.data, rstd.data);
  f.channel_mean = channel_mean.data;
  if (pass.run(workspace, f, static_cast<float*>(out.data), stream)) {
    if (!given && shape.dtype != Dtype::kFloat32) out.tensor = rounded_cuda(a.op, out.data, {shape.n}, a.x);
    return {out.tensor, channel_mean.tensor, mean.tensor, rstd.tensor};
  }

  GroupNormMeanParams m;
  m.channel_mean = channel_mean.data;
  m.mean = mean.data;
  m.rstd = rstd.data;
  m.weight = norm.weight_data();
  m.bias = norm.bias_data();
  m.affine_dtype = norm.dtype(a.op);
  m.n = shape.n;
  m.c = shape.c_out;
  m.g = num_groups;
  if (!given && shape.dtype != Dtype::kFloat32) {
    out.tensor = empty_like_shape(a.x, {shape.n});
    out.data = out.tensor.mutable_data_ptr();
    m.out_dtype = shape.dtype;
  }
  m.out = out.data;
  raise_on_error(a.op, run_group_norm_mean(m, stream));
  return {out.tensor, channel_mean.tensor, mean.tensor, rstd.tensor};
}

// `kept`: what the norm read, or the convolution's output before relu, where it was asked for.
struct __attribute__((visibility("hidden"))) NormResult {
  Tensor y, mean, rstd, kept;
};

// The whole pipeline in one launch, after passes that lay out x and the weights. Nothing where the launch is refused
// after all, as in a process that may use only some multiprocessors.
std::optional<NormResult> conv_transposed_norm(const ConvArgs& a, const ConvShape& shape,
                                               const TransposedNormPlan& plan, const Norm& norm, bool keeps) {
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  const Tensor x = plan.scaled ? dense_in(a.x, MemoryFormat::Contiguous) : a.x;
  const ConvArgs of_x{a.op,      x,          a.weight,         a.bias,       a.stride,
                      a.padding, a.dilation, a.output_padding, a.groups,     a.transposed,
                      a.rank,    a.backend,  a.allow_tf32,     a.wide_weight};
  CallOperands operands(of_x, shape);
  const TransposedNormSpace space(operands, plan);
  Workspace workspace(a.x);
  const int64_t packed = workspace.reserve(plan.packed_bytes);
  const int64_t bias = workspace.reserve(transposed_norm_bias_bytes(plan));
  const int64_t partials = workspace.reserve(shape.n * norm.groups * plan.blocks * 16);
  const int64_t arrived = workspace.reserve(shape.n * 4);
  const int64_t copy = workspace.reserve(space.copy_bytes(operands, plan));
  const auto if_scaled = [&](int64_t bytes) { return plan.scaled ? workspace.reserve(bytes) : 0; };
  const int64_t largest = if_scaled(shape.c_in * 4), factors = if_scaled(shape.c_out * 2 * 4);
  const int64_t half_weight = if_scaled(a.weight.numel() * 2);
  workspace.allocate();
  ScaledHalfParams s;
  if (plan.scaled) {
    s.x = static_cast<const float*>(operands.x);
    s.n = shape.n;
    s.c = shape.c_in;
    s.s = shape.in[0] * shape.in[1] * shape.in[2];
    s.largest = workspace.at<uint32_t>(largest);
    s.keeps_infinities = true;
    s.factors = workspace.at<float>(factors);
    s.half_weight = workspace.at<void>(half_weight);
    s.weight = static_cast<const float*>(operands.weight);
    s.w_stride_out = operands.w_stride_out;
    s.w_stride_in = operands.w_stride_in;
    std::copy(operands.w_stride_k, operands.w_stride_k + 3, s.w_stride_k);
    s.c_out = shape.c_out;
    std::copy(shape.kernel, shape.kernel + 3, s.kernel);
    raise_on_error(a.op, run_channel_magnitudes(s, workspace.at<uint32_t>(largest), stream));
    operands.weight = s.half_weight;
    operands.w_stride_in = 1;
    operands.w_stride_k[2] = shape.c_in;
    operands.w_stride_k[1] = operands.w_stride_k[2] * shape.kernel[2];
    operands.w_stride_k[0] = operands.w_stride_k[1] * shape.kernel[1];
    operands.w_stride_out = operands.w_stride_k[0] * shape.kernel[0];
  }
  NormResult r{allocate_output(a, shape), empty_like_shape(a.x, {shape.n, norm.groups}, ScalarType::Float),
               empty_like_shape(a.x, {shape.n, norm.groups}, ScalarType::Float)};
  if (keeps) r.kept = allocate_output(a, shape);
  const Tensor& c = keeps ? r.kept : r.y;
  TransposedNormParams p;
  raise_on_error(a.op, start_transposed_norm(operands, plan, space, c.mutable_data_ptr(), workspace.at<void>(packed),
                                             workspace.at<float>(bias), workspace.at<uint32_t>(arrived),
                                             workspace.at<void>(copy), plan.scaled ? &s : nullptr, &p, stream));
  p.z = r.y.mutable_data_ptr();
  p.partials = workspace.at<float>(partials);
  p.mean = static_cast<float*>(r.mean.mutable_data_ptr());
  p.rstd = static_cast<float*>(r.rstd.mutable_data_ptr());
  p.gamma = norm.weight_data();
  p.beta = norm.bias_data();
  p.affine_dtype = norm.dtype(a.op);
  p.groups = static_cast<int>(norm.groups);
  p.eps = static_cast<float>(norm.eps);
  const char* const in_c = static_cast<const char*>(c.const_data_ptr()) + space.x_in_y_at;
  Status status = set_transposed_norm_input(&p, in_c, workspace.at<void>(copy));
  if (status.ok()) status = run_conv_transposed_norm(p, stream);
  if (status.code == StatusCode::kUnsupported) return std::nullopt;
  raise_on_error(a.op, status);
  return r;
}

// relu and the norm after a transposed convolution; the norm is written over the convolution's output, unless that is
// kept.
NormResult conv_transpose_relu_group_norm(const ConvArgs& a, int64_t num_groups, const OptTensor& gn_weight,
                                          const OptTensor& gn_bias, double eps, bool keeps) {
  const ConvShape shape = check_conv_args(a);
  const Norm norm(a.op, a.x, shape.c_out, num_groups, gn_weight, gn_bias, eps);
  const DeviceGuard guard(a.x.get_device_index());
  const ChoicePtr choice = choose(a, shape, ConvEpilogue::kStoreStats);
  if (choice->path() == ConvPath::kTransposedNorm && !shape.is_empty()) {
    const std::optional<NormResult> r = conv_transposed_norm(a, shape, choice->as<TransposedNormPlan>(), norm, keeps);
    if (r) return *r;
  }
  if (choice->path() != ConvPath::kImplicitGemm || shape.is_empty()) {
    const Tensor c = conv_forward(a);
    if (keeps || c.numel() == 0) {
      auto [y, mean, rstd] = group_norm_fwd_cuda(c, num_groups, norm.weight, norm.bias, eps, "none", "relu");
      return {y, mean, rstd, c};
    }
    auto [mean, rstd] = group_norm_inplace_cuda(a.op, c, num_groups, norm.weight, norm.bias, eps, "none", "relu");
    return {c, mean, rstd};
  }
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  const ImplicitGemmPlan& plan = choice->as<ImplicitGemmPlan>();
  const CallOperands operands(a, shape);
  Workspace workspace(a.x);
  const int64_t packed = workspace.reserve(packed_weight_bytes(plan));
  const int64_t bias = workspace.reserve(packed_bias_bytes(operands, plan));
  const int64_t partials = workspace.reserve(partials_bytes(operands, partials_slices(plan)));
  const int64_t table = workspace.reserve(shape.n * shape.c_out * 4 * 4);
  workspace.allocate();
  NormResult r{allocate_output(a, shape), empty_like_shape(a.x, {shape.n, num_groups}, ScalarType::Float),
               empty_like_shape(a.x, {shape.n, num_groups}, ScalarType::Float)};
  ImplicitGemmParams p = implicit_gemm_params(operands, plan);
  raise_on_error(a.op,
                 pack_implicit_gemm(operands, &p, workspace.at<uint32_t>(packed), workspace.at<float>(bias), stream));
  if (keeps) r.kept = allocate_output(a, shape);
  const Tensor& c = keeps ? r.kept : r.y;
  set_output(&p, c, a.rank);
  p.partials = workspace.at<float>(partials);
  p.relu = true;
  raise_on_error(a.op, run_conv3d_stats(p, shape.n, stream));

  GroupStatsFinalizeParams f = finalize_params(a, shape, partials_slices(plan), norm, p.partials,
                                               r.mean.mutable_data_ptr(), r.rstd.mutable_data_ptr());
  f.table = workspace.at<void>(table);
  raise_on_error(a.op, run_group_stats_finalize(f, stream));

  NormalizeParams apply;
  apply.x = c.const_data_ptr();
  apply.y = r.y.mutable_data_ptr();
  apply.table = f.table;
  apply.dims = check_group_norm(a.op, r.y, num_groups);
  raise_on_error(a.op, run_normalize(apply, stream));
  return r;
}

// The convolution runs twice: once for its statistics, once into the epilogue that reduces over channels. Without
// `given` y alone is returned, in x's dtype.
NormResult conv_residual_logsumexp(const ConvArgs& a, int64_t num_groups, const OptTensor& gn_weight,
                                   const OptTensor& gn_bias, double eps, bool given) {
  const ConvShape shape = check_conv_args(a);
  const Norm norm(a.op, a.x, shape.c_out, num_groups, gn_weight, gn_bias, eps);
  const DeviceGuard guard(a.x.get_device_index());
  ChoicePtr lse = choose(a, shape, ConvEpilogue::kResidualLse, chain_groups(a, num_groups));
  if (lse->path() == ConvPath::kChain && !shape.is_empty()) {
    IntArray sizes = shape.out_sizes;
    sizes[1] = 1;
    NormResult r{empty_like_shape(a.x, sizes, given ? ScalarType::Float : a.x.scalar_type())};
    if (given) {
      r.mean = empty_like_shape(a.x, {shape.n, num_groups}, ScalarType::Float);
      r.rstd = empty_like_shape(a.x, {shape.n, num_groups}, ScalarType::Float);
    }
    if (run_chain(a, shape, lse->as<ChainPlan>(), norm, r.y, given ? &r.mean : nullptr, given ? &r.rstd : nullptr,
                  nullptr)) {
      return r;
    }
    lse = lse->passes;
  }
  if (lse->composed || shape.is_empty()) {
    const bool in_one = shape.dtype != Dtype::kFloat64 && !shape.out_channels_last;
    ConvTail tail;
    ConvTail* const left = in_one ? &tail : nullptr;
    const Tensor c = lse->path() == ConvPath::kFewChannels ? conv_by(a, shape, *lse, left) : conv_forward(a, left);
    NormResult r;
    if (in_one && c.numel() > 0) {
      auto [y, mean, rstd] = norm_residual_logsumexp_cuda(a.op, c, num_groups, norm.weight, norm.bias, eps,
                                                          tail.left_bias ? a.bias : std::nullopt, given);
      if (given && y.scalar_type() != stats_type(a.x)) y = torch::stable::to(y, stats_type(a.x));
      return {y, mean, rstd};
    }
    // The residual is written over the convolution's output.
    if (c.numel() == 0) {
      auto [y, mean, rstd] = group_norm_fwd_cuda(c, num_groups, norm.weight, norm.bias, eps, "none", "none");
      r.mean = mean, r.rstd = rstd;
    } else {
      auto [mean, rstd] = group_norm_inplace_cuda(a.op, c, num_groups, norm.weight, norm.bias, eps, "tanh+hardswish",
                                                  "none", /*add_input=*/true, given);
      r.mean = mean, r.rstd = rstd;
    }
    r.y = logsumexp_cuda(c, {1}, true);
    if (given && r.y.scalar_type() != stats_type(a.x)) r.y = torch::stable::to(r.y, stats_type(a.x));
    return r;
  }
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  const CallOperands operands(a, shape);
  const Choice& stats = *lse->statistics;
  const bool few = lse->path() == ConvPath::kFewChannels;
  StatsPass pass{a, operands, stats};
  const auto packs_alike = [&] {
    const ImplicitGemmPlan &one = lse->as<ImplicitGemmPlan>(), &other = stats.as<ImplicitGemmPlan>();
    return one.nb == other.nb && one.words == other.words;
  };
  // The two passes may tile differently, but a packed weight serves both only if their chunks agree.
  const bool shared_weights = pass.packs_weights() && !few && packs_alike();
  Workspace workspace(a.x);
  pass.reserve(&workspace);
  const bool packs = !few && !shared_weights;
  const int64_t packed = packs ? workspace.reserve(packed_weight_bytes(lse->as<ImplicitGemmPlan>())) : pass.packed;
  const int64_t bias = packs ? workspace.reserve(packed_bias_bytes(operands, lse->as<ImplicitGemmPlan>())) : pass.bias;
  const int64_t table = workspace.reserve(shape.n * shape.c_out * 4 * 4);
  SmallResult mean(&workspace, {shape.n, num_groups}, given), rstd(&workspace, {shape.n, num_groups}, given);
  workspace.allocate();
  mean.make(a.x, workspace);
  rstd.make(a.x, workspace);
  IntArray out_sizes = shape.out_sizes;
  out_sizes[1] = 1;
  const bool is_half = shape.dtype != Dtype::kFloat32;
  const bool stores_rounded = !given && is_half && few;
  NormResult r{empty_like_shape(a.x, out_sizes, stores_rounded ? a.x.scalar_type() : ScalarType::Float), mean.tensor,
               rstd.tensor};
  const auto finish = [&] {
    if (!given && is_half && !stores_rounded) r.y = rounded_cuda(a.op, r.y.const_data_ptr(), out_sizes, a.x);
    return r;
  };

  GroupStatsFinalizeParams f =
      finalize_params(a, shape, pass.slices(), norm, workspace.at<float>(pass.partials), mean.data, rstd.data);
  f.table = workspace.at<void>(table);
  pass.run(workspace, f, nullptr, stream);

  if (few) {
    FewChannelsParams q = few_channels_params(operands, lse->as<FewChannelsPlan>());
    q.norm_table = f.table;
    q.y = r.y.mutable_data_ptr();
    q.y_rounded = stores_rounded;
    q.y_stride_n = r.y.stride(0);
    spatial_strides(r.y, a.rank, q.y_stride);
    raise_on_error(a.op, run_few_channels_residual_lse(q, shape.n, stream));
    return finish();
  }
  ImplicitGemmParams q = implicit_gemm_params(operands, lse->as<ImplicitGemmPlan>());
  if (packs) {
    raise_on_error(a.op,
                   pack_implicit_gemm(operands, &q, workspace.at<uint32_t>(packed), workspace.at<float>(bias), stream));
  } else {
    q.packed_weight = workspace.at<uint32_t>(packed);
    q.bias = workspace.at<float>(bias);
  }
  q.norm_table = f.table;
  set_output(&q, r.y, a.rank);
  raise_on_error(a.op, run_conv3d_residual_lse(q, shape.n, stream));
  return finish();
}

}  // namespace

std::string explain_pipeline(const ConvArgs& a, const ConvShape& shape, ConvEpilogue epilogue, int64_t num_groups) {
  const bool follows = epilogue == ConvEpilogue::kStoreStats;  // what is stored is normalized in a pass of its own
  const ChoicePtr choice = choose(a, shape, epilogue, follows ? 0 : chain_groups(a, num_groups));
  if (!shape.is_empty() && (!choice->composed || choice->path() == ConvPath::kFewChannels)) return choice->explain();
  return explain_forward(a, shape) + "; the convolution's output is stored: " + choice->reason;
}

namespace {

// Boxed entry points; the argument order is the schemas'.

MeanResult conv3d_group_norm_mean_of(const Tensor& x, const Tensor& weight, const OptTensor& bias, int64_t num_groups,
                                     const OptTensor& gn_weight, const OptTensor& gn_bias, const IntArray& stride,
                                     const IntArray& padding, const IntArray& dilation, int64_t groups, double eps,
                                     const std::string& backend, std::optional<bool> allow_tf32, bool given) {
  const ConvArgs a = conv_args("conv3d_group_norm_mean", 3, x, weight, bias, stride, padding, dilation, IntArray(3, 0),
                               groups, false, backend, allow_tf32);
  return conv_group_norm_mean(a, num_groups, gn_weight, gn_bias, eps, given);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv3d_group_norm_mean_fwd(Tensor x, Tensor weight, OptTensor bias,
                                                                      int64_t num_groups, OptTensor gn_weight,
                                                                      OptTensor gn_bias, IntArray stride,
                                                                      IntArray padding, IntArray dilation,
                                                                      int64_t groups, double eps, std::string backend,
                                                                      std::optional<bool> allow_tf32) {
  const MeanResult r = conv3d_group_norm_mean_of(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding,
                                                 dilation, groups, eps, backend, allow_tf32, true);
  return {r.out, r.channel_mean, r.mean, r.rstd};
}

Tensor conv3d_group_norm_mean(Tensor x, Tensor weight, OptTensor bias, int64_t num_groups, OptTensor gn_weight,
                              OptTensor gn_bias, IntArray stride, IntArray padding, IntArray dilation, int64_t groups,
                              double eps, std::string backend, std::optional<bool> allow_tf32) {
  return conv3d_group_norm_mean_of(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, dilation, groups,
                                   eps, backend, allow_tf32, false)
      .out;
}

NormResult conv_transpose3d_relu_group_norm_of(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                               int64_t num_groups, const OptTensor& gn_weight, const OptTensor& gn_bias,
                                               const IntArray& stride, const IntArray& padding,
                                               const IntArray& output_padding, int64_t groups, const IntArray& dilation,
                                               double eps, const std::string& backend, std::optional<bool> allow_tf32,
                                               bool keeps) {
  const ConvArgs a = conv_args("conv_transpose3d_relu_group_norm", 3, x, weight, bias, stride, padding, dilation,
                               output_padding, groups, true, backend, allow_tf32);
  return conv_transpose_relu_group_norm(a, num_groups, gn_weight, gn_bias, eps, keeps);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_transpose3d_relu_group_norm_fwd(
    Tensor x, Tensor weight, OptTensor bias, int64_t num_groups, OptTensor gn_weight, OptTensor gn_bias,
    IntArray stride, IntArray padding, IntArray output_padding, int64_t groups, IntArray dilation, double eps,
    std::string backend, std::optional<bool> allow_tf32) {
  const NormResult r =
      conv_transpose3d_relu_group_norm_of(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding,
                                          output_padding, groups, dilation, eps, backend, allow_tf32, true);
  return {r.y, r.kept, r.mean, r.rstd};
}

Tensor conv_transpose3d_relu_group_norm(Tensor x, Tensor weight, OptTensor bias, int64_t num_groups,
                                        OptTensor gn_weight, OptTensor gn_bias, IntArray stride, IntArray padding,
                                        IntArray output_padding, int64_t groups, IntArray dilation, double eps,
                                        std::string backend, std::optional<bool> allow_tf32) {
  return conv_transpose3d_relu_group_norm_of(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding,
                                             output_padding, groups, dilation, eps, backend, allow_tf32, false)
      .y;
}

NormResult conv2d_residual_logsumexp_of(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                        int64_t num_groups, const OptTensor& gn_weight, const OptTensor& gn_bias,
                                        const IntArray& stride, const IntArray& padding, const IntArray& dilation,
                                        int64_t groups, double eps, const std::string& backend,
                                        std::optional<bool> allow_tf32, bool given) {
  const ConvArgs a = conv_args("conv2d_group_norm_tanh_hardswish_residual_logsumexp", 2, x, weight, bias, stride,
                               padding, dilation, IntArray(2, 0), groups, false, backend, allow_tf32);
  return conv_residual_logsumexp(a, num_groups, gn_weight, gn_bias, eps, given);
}

std::tuple<Tensor, Tensor, Tensor> conv2d_residual_logsumexp_fwd(Tensor x, Tensor weight, OptTensor bias,
                                                                 int64_t num_groups, OptTensor gn_weight,
                                                                 OptTensor gn_bias, IntArray stride, IntArray padding,
                                                                 IntArray dilation, int64_t groups, double eps,
                                                                 std::string backend, std::optional<bool> allow_tf32) {
  const NormResult r = conv2d_residual_logsumexp_of(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding,
                                                    dilation, groups, eps, backend, allow_tf32, true);
  return {r.y, r.mean, r.rstd};
}

Tensor conv2d_residual_logsumexp(Tensor x, Tensor weight, OptTensor bias, int64_t num_groups, OptTensor gn_weight,
                                 OptTensor gn_bias, IntArray stride, IntArray padding, IntArray dilation,
                                 int64_t groups, double eps, std::string backend, std::optional<bool> allow_tf32) {
  return conv2d_residual_logsumexp_of(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, dilation,
                                      groups, eps, backend, allow_tf32, false)
      .y;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("conv3d_group_norm_mean", TORCH_BOX(&kgopt::conv3d_group_norm_mean));
  m.impl("conv3d_group_norm_mean_fwd", TORCH_BOX(&kgopt::conv3d_group_norm_mean_fwd));
  m.impl("conv_transpose3d_relu_group_norm", TORCH_BOX(&kgopt::conv_transpose3d_relu_group_norm));
  m.impl("conv_transpose3d_relu_group_norm_fwd", TORCH_BOX(&kgopt::conv_transpose3d_relu_group_norm_fwd));
  m.impl("conv2d_group_norm_tanh_hardswish_residual_logsumexp", TORCH_BOX(&kgopt::conv2d_residual_logsumexp));
  m.impl("conv2d_group_norm_tanh_hardswish_residual_logsumexp_fwd", TORCH_BOX(&kgopt::conv2d_residual_logsumexp_fwd));
}
