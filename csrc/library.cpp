// Schemas of every op, and the entry point of the `_C` module; nothing else.
// Ops ending in _fwd return, beside their result, the statistics that the backward op needs.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(kgopt, m) {
  // Convolutions: arguments as torch.nn.functional. backend is "auto", "kgopt" or "aten"; allow_tf32 None
  // follows torch.backends.cudnn.
  m.def(
      "conv2d(Tensor x, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, int[2] dilation=1, "
      "int groups=1, *, str backend=\"auto\", bool? allow_tf32=None) -> Tensor");
  m.def(
      "conv3d(Tensor x, Tensor weight, Tensor? bias=None, int[3] stride=1, int[3] padding=0, int[3] dilation=1, "
      "int groups=1, *, str backend=\"auto\", bool? allow_tf32=None) -> Tensor");
  m.def(
      "conv_transpose2d(Tensor x, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, "
      "int[2] output_padding=0, int groups=1, int[2] dilation=1, *, str backend=\"auto\", bool? allow_tf32=None) "
      "-> Tensor");
  m.def(
      "conv_transpose3d(Tensor x, Tensor weight, Tensor? bias=None, int[3] stride=1, int[3] padding=0, "
      "int[3] output_padding=0, int groups=1, int[3] dilation=1, *, str backend=\"auto\", bool? allow_tf32=None) "
      "-> Tensor");

  // dx, dweight and dbias of any of them, as far as mask asks; empty tensors for the others.
  m.def(
      "conv_backward(Tensor dy, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, "
      "int[] output_padding, int groups, bool transposed, bool[3] mask, *, str backend=\"auto\", "
      "bool? allow_tf32=None) -> (Tensor, Tensor, Tensor)");

  // The gradients of conv3d_group_norm_mean, or in 2D: dx, dweight and dbias as far as mask asks, and those of the
  // norm's parameters, which are empty where no kernel of this kind is the choice.
  m.def(
      "conv_group_norm_mean_gradients(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor? gn_weight, "
      "Tensor channel_mean, Tensor mean, Tensor rstd, int num_groups, int[] stride, int[] padding, int[] dilation, "
      "int groups, bool[3] mask, *, str backend=\"auto\", bool? allow_tf32=None) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor)");
  // The same of conv2d_group_norm_tanh_hardswish_residual_logsumexp.
  m.def(
      "conv_group_norm_lse_gradients(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor? gn_weight, "
      "Tensor? gn_bias, Tensor mean, Tensor rstd, int num_groups, int[] stride, int[] padding, int[] dilation, "
      "int groups, bool[3] mask, *, str backend=\"auto\", bool? allow_tf32=None) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor)");

  // GroupNorm.
  m.def("group_stats(Tensor x, int num_groups, float eps=1e-5) -> (Tensor, Tensor)");
  m.def(
      "group_stats_backward(Tensor dmean, Tensor drstd, Tensor x, Tensor mean, Tensor rstd, int num_groups) -> Tensor");
  m.def(
      "group_norm(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, "
      "str act=\"none\") -> Tensor");
  // With moments, mean and variance of every channel [N, C, 2], as conv_add_moments gives them.
  m.def(
      "group_norm_moments(Tensor x, Tensor moments, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5, str act=\"none\") -> Tensor");
  m.def(
      "group_norm_fwd(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, "
      "str act=\"none\", str pre_act=\"none\") -> (Tensor, Tensor, Tensor)");
  // act(group_norm(x) * scale + shift), where scale and shift are as nearest upsampling by whole factors would repeat
  // them.
  m.def(
      "group_norm_maps(Tensor x, Tensor? moments, Tensor scale, Tensor shift, int num_groups, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-5, str act=\"none\") -> Tensor");
  // With weight and bias of each sample, [N, C].
  m.def(
      "group_norm_by_sample(Tensor x, Tensor weight, Tensor bias, int num_groups, float eps=1e-5, str act=\"none\") "
      "-> Tensor");
  m.def(
      "group_norm_by_sample_fwd(Tensor x, Tensor weight, Tensor bias, int num_groups, float eps=1e-5, "
      "str act=\"none\") -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_by_sample_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias, "
      "int num_groups, str act=\"none\") -> (Tensor, Tensor, Tensor)");
  // act(group_norm(x) + residual).
  m.def(
      "group_norm_add(Tensor x, Tensor residual, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5, str act=\"none\") -> Tensor");
  m.def(
      "group_norm_add_fwd(Tensor x, Tensor residual, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5, str act=\"none\") -> (Tensor, Tensor, Tensor)");
  // PReLU(group_norm(x) + residual) with one slope or one a channel. The backward gives the gradients of x, of the
  // PReLU's argument, which is the residual's, of the slopes, weight and bias.
  m.def(
      "group_norm_prelu(Tensor x, Tensor slope, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5, Tensor? residual=None) -> Tensor");
  m.def(
      "group_norm_prelu_fwd(Tensor x, Tensor slope, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5, Tensor? residual=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_prelu_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor slope, int num_groups, "
      "Tensor? weight=None, Tensor? bias=None, Tensor? residual=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // That of leaky_relu(group_norm(x) + residual): the gradients of x, of the sum, which is the residual's, weight,
  // bias.
  m.def(
      "group_norm_add_leaky_relu_backward(Tensor dy, Tensor x, Tensor residual, Tensor mean, Tensor rstd, "
      "int num_groups, Tensor? weight=None, Tensor? bias=None, float slope=0.01) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, int num_groups, Tensor? weight=None, "
      "Tensor? bias=None, str act=\"none\", str pre_act=\"none\") -> (Tensor, Tensor, Tensor)");
  m.def("group_norm_mean(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor");
  m.def(
      "group_norm_mean_fwd(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_mean_backward(Tensor dout, Tensor x, Tensor channel_mean, Tensor mean, Tensor rstd, int num_groups, "
      "Tensor? weight=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_tanh_hardswish_residual_logsumexp_backward(Tensor dlse, Tensor x, Tensor mean, Tensor rstd, "
      "int num_groups, Tensor? weight=None, Tensor? bias=None) -> (Tensor, Tensor, Tensor)");
  // dx is written over x, which nobody needs then.
  m.def(
      "group_norm_tanh_hardswish_residual_logsumexp_backward_(Tensor dlse, Tensor(a!) x, Tensor mean, Tensor rstd, "
      "int num_groups, Tensor? weight=None, Tensor? bias=None) -> (Tensor, Tensor)");

  // Norms over channels, at each position: kind "rms", "l2" or "layer".
  m.def(
      "channel_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, str kind=\"rms\", float eps=1e-5, "
      "str act=\"none\") -> Tensor");
  m.def(
      "channel_norm_backward(Tensor dy, Tensor x, Tensor? weight=None, Tensor? bias=None, str kind=\"rms\", "
      "float eps=1e-5, str act=\"none\") -> (Tensor, Tensor, Tensor)");

  // Pointwise and reductions.
  m.def("activation(Tensor x, str act) -> Tensor");
  m.def("activation_backward(Tensor dy, Tensor x, str act) -> Tensor");
  m.def("logsumexp(Tensor x, int[1] dim, bool keepdim=False) -> Tensor");
  m.def("logsumexp_backward(Tensor dy, Tensor x, Tensor y, int[1] dim, bool keepdim=False) -> Tensor");
  m.def("mean(Tensor x, int[1] dims, bool keepdim=False) -> Tensor");
  m.def("mean_backward(Tensor dy, SymInt[] sizes, int[1] dims, bool keepdim=False) -> Tensor");
  // softmax(x * scale) over the last dim, as dtype.
  m.def("scaled_softmax(Tensor x, float scale, ScalarType dtype) -> Tensor");

  // What stands between norms and convolutions. conv_add: act((convolution + bias + residual) / divisor); with
  // moments: mean and variance of every channel, too;
  // upsample_linear: to twice the size, plus residual; pad_replicate: pad as F.pad has it; max_pool: without indices.
  m.def(
      "conv_add(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, "
      "int[] output_padding, int groups=1, bool transposed=False, float divisor=1.0, "
      "str act=\"none\", *, str backend=\"auto\") -> Tensor");
  m.def(
      "conv_add_moments(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int[] stride, int[] padding, "
      "int[] dilation, int[] output_padding, int groups=1, bool transposed=False, float divisor=1.0, "
      "str act=\"none\", *, str backend=\"auto\") -> (Tensor, Tensor)");
  // conv(act(group_norm(x))) with a kernel of 1; num_groups 0: no norm, and no act.
  m.def(
      "group_norm_conv1x1(Tensor x, Tensor? moments, int num_groups, Tensor? gn_weight, Tensor? gn_bias, float eps, "
      "str act, Tensor weight, Tensor? bias) -> Tensor");
  // conv_add of act(group_norm(x)): gn_act follows the norm, act the sum; replicate: its outermost positions are
  // repeated around it, as F.pad has them, behind gn_act.
  m.def(
      "group_norm_conv(Tensor x, Tensor? moments, int num_groups, Tensor? gn_weight, Tensor? gn_bias, float eps, "
      "str gn_act, Tensor weight, Tensor? bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, "
      "int[] output_padding, int groups=1, bool transposed=False, float divisor=1.0, str act=\"none\", *, "
      "int[] replicate=[], str backend=\"auto\") -> Tensor");
  m.def(
      "group_norm_conv_moments(Tensor x, Tensor? moments, int num_groups, Tensor? gn_weight, Tensor? gn_bias, "
      "float eps, str gn_act, Tensor weight, Tensor? bias, Tensor? residual, int[] stride, int[] padding, "
      "int[] dilation, int[] output_padding, int groups=1, bool transposed=False, float divisor=1.0, "
      "str act=\"none\", *, int[] replicate=[], str backend=\"auto\") -> (Tensor, Tensor)");
  // fp32 convolutions on fp16 tensor cores, in graphs of training: act(group_norm(x)), or with 0 groups x, rounded to
  // fp16 by a power of two a channel, with the powers' inverses and the groups' mean and rstd; convolutions of such
  // tensors, and their gradients. Where TF32 is allowed.
  m.def(
      "scaled_half(Tensor x, int num_groups=0, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, "
      "str act=\"none\") -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "conv_scaled_half(Tensor x, Tensor inverse, Tensor weight, Tensor? bias, Tensor? residual, int[] stride, "
      "int[] padding, int[] dilation) -> Tensor");
  m.def(
      "conv_scaled_half_backward(Tensor dy, Tensor x, Tensor inverse, Tensor weight, int[] stride, int[] padding, "
      "int[] dilation, bool[3] mask) -> (Tensor, Tensor, Tensor)");
  m.def("upsample_linear(Tensor x, Tensor? residual=None) -> Tensor");
  m.def("upsample_linear_backward(Tensor dy) -> Tensor");
  m.def("upsample_nearest(Tensor x, int[] factors) -> Tensor");
  m.def("upsample_nearest_backward(Tensor dy, int[] factors) -> Tensor");
  m.def("pad_replicate(Tensor x, int[] pad) -> Tensor");
  // A new tensor of x's values in channels_last, or contiguous.
  m.def("in_format(Tensor x, bool channels_last, ScalarType? dtype=None) -> Tensor");
  m.def("max_pool(Tensor x, int[] kernel_size, int[] stride, int[] padding) -> Tensor");
  // The weight of the transposed convolution that is upsample_nearest and a convolution with this one behind it.
  m.def("upsample_conv_weight(Tensor weight, int[] factors, int groups=1, bool channels_last=False) -> Tensor");

  // The three pipelines.
  m.def(
      "conv3d_group_norm_mean(Tensor x, Tensor weight, Tensor? bias, int num_groups, Tensor? gn_weight=None, "
      "Tensor? gn_bias=None, int[3] stride=1, int[3] padding=0, int[3] dilation=1, int groups=1, float eps=1e-5, *, "
      "str backend=\"auto\", bool? allow_tf32=None) -> Tensor");
  m.def(
      "conv3d_group_norm_mean_fwd(Tensor x, Tensor weight, Tensor? bias, int num_groups, Tensor? gn_weight=None, "
      "Tensor? gn_bias=None, int[3] stride=1, int[3] padding=0, int[3] dilation=1, int groups=1, float eps=1e-5, *, "
      "str backend=\"auto\", bool? allow_tf32=None) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "conv_transpose3d_relu_group_norm(Tensor x, Tensor weight, Tensor? bias, int num_groups, "
      "Tensor? gn_weight=None, Tensor? gn_bias=None, int[3] stride=1, int[3] padding=0, int[3] output_padding=0, "
      "int groups=1, int[3] dilation=1, float eps=1e-5, *, str backend=\"auto\", bool? allow_tf32=None) -> Tensor");
  m.def(
      "conv_transpose3d_relu_group_norm_fwd(Tensor x, Tensor weight, Tensor? bias, int num_groups, "
      "Tensor? gn_weight=None, Tensor? gn_bias=None, int[3] stride=1, int[3] padding=0, int[3] output_padding=0, "
      "int groups=1, int[3] dilation=1, float eps=1e-5, *, str backend=\"auto\", bool? allow_tf32=None) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "conv2d_group_norm_tanh_hardswish_residual_logsumexp(Tensor x, Tensor weight, Tensor? bias, int num_groups, "
      "Tensor? gn_weight=None, Tensor? gn_bias=None, int[2] stride=1, int[2] padding=0, int[2] dilation=1, "
      "int groups=1, float eps=1e-5, *, str backend=\"auto\", bool? allow_tf32=None) -> Tensor");
  m.def(
      "conv2d_group_norm_tanh_hardswish_residual_logsumexp_fwd(Tensor x, Tensor weight, Tensor? bias, "
      "int num_groups, Tensor? gn_weight=None, Tensor? gn_bias=None, int[2] stride=1, int[2] padding=0, "
      "int[2] dilation=1, int groups=1, float eps=1e-5, *, str backend=\"auto\", bool? allow_tf32=None) "
      "-> (Tensor, Tensor, Tensor)");

  // Which path an op would take for these arguments and why, as text: "kgopt: ..." or "aten: ...".
  m.def(
      "explain_conv(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int[] output_padding, "
      "int groups, bool transposed, str epilogue=\"store\", str backend=\"auto\", bool? allow_tf32=None, "
      "int num_groups=0) -> str");
  m.def(
      "explain_group_norm(Tensor x, int num_groups, str act=\"none\", str pre_act=\"none\", bool backward=False, "
      "bool? channels_last=None, bool reasons=False) -> str");
  m.def(
      "explain_group_norm_conv(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, "
      "int[] output_padding, int groups, bool transposed, str gn_act=\"none\", str act=\"none\", bool moments=False, "
      "str backend=\"auto\") -> str");
  m.def("build_info() -> str");
}

// Importing the module runs the static registrations above; it holds no functions of its own.
PyMODINIT_FUNC PyInit__C(void) {
  static struct PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
