// kgopt_dev: host-side decisions for pytest. Built by CMakeLists.txt, never shipped: pybind11 cannot be built against
// the limited API, and users have no use for plans. Binds the very headers that the launchers include; holds no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <tuple>

#include "channel_norm/plan.h"
#include "common/act_names.h"
#include "common/activation.h"
#include "common/dtype.h"
#include "common/traverse_plan.h"
#include "conv3d/choice/choice.h"
#include "conv3d/choice/gradients.h"
#include "conv3d/choice/measured.h"
#include "conv3d/gradients/norm_lse/params.h"
#include "conv3d/implicit_gemm/plan.h"
#include "conv3d/norm_conv/plan.h"
#include "conv3d/norm_conv/scaled_half_params.h"
#include "conv3d/shape.h"
#include "conv3d/wgmma/position_rows/plan.h"
#include "groupnorm/explain.h"
#include "groupnorm/lse_backward/plan.h"
#include "reduce/reduce_plan.h"

namespace py = pybind11;

namespace kgopt {
namespace {

using Dims = std::array<int64_t, 3>;  // depth, height, width

ActChain parse_chain(const std::string& act) {
  ActChain chain;
  std::string error;
  if (!parse_act_chain(act, &chain, &error)) throw py::value_error("act " + error);
  return chain;
}

Dtype parse_dtype(const std::string& name) {
  for (Dtype t : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat64}) {
    if (name == dtype_name(t)) return t;
  }
  throw py::value_error("dtype is '" + name + "', expected float32, bfloat16, float16 or float64");
}

// C arrays become tuples in Python.
template <typename T, size_t kSize>
std::array<T, kSize> copied(const T (&values)[kSize]) {
  std::array<T, kSize> result;
  for (size_t i = 0; i < kSize; ++i) result[i] = values[i];
  return result;
}

void assign(int64_t (&to)[3], const Dims& from) {
  for (int i = 0; i < 3; ++i) to[i] = from[i];
}

ConvProblem make_problem(int64_t n, int64_t c_in, int64_t c_out, const Dims& in, const Dims& out, const Dims& kernel,
                         const Dims& stride, const Dims& padding, const Dims& dilation, int64_t groups, bool transposed,
                         const std::string& dtype, bool allow_tf32, ConvEpilogue epilogue, bool channels_innermost,
                         bool planar, int64_t norm_groups) {
  ConvProblem p;
  p.norm_groups = norm_groups;
  p.n = n;
  p.c_in = c_in;
  p.c_out = c_out;
  p.groups = groups;
  assign(p.in, in);
  assign(p.out, out);
  assign(p.kernel, kernel);
  assign(p.stride, stride);
  assign(p.padding, padding);
  assign(p.dilation, dilation);
  p.transposed = transposed;
  p.dtype = parse_dtype(dtype);
  p.allow_tf32 = allow_tf32;
  p.epilogue = epilogue;
  p.channels_innermost = channels_innermost;
  p.planar = planar;
  return p;
}

void bind_activation(py::module_& m) {
  m.def(
      "chain_value", [](const std::string& act, double x) { return chain_value(parse_chain(act), x); }, py::arg("act"),
      py::arg("x"), "The chain's value at x, in double precision.");
  m.def(
      "chain_derivative",
      [](const std::string& act, double x) {
        double value = 0;
        bool stops = false;
        const double derivative = chain_derivative(parse_chain(act), x, &value, &stops);
        return std::make_tuple(derivative, value, stops);
      },
      py::arg("act"), py::arg("x"),
      "(derivative, value, whether any gradient that comes in becomes 0) of the chain at x, in double precision.");
}

void bind_conv(py::module_& m) {
  py::enum_<ConvMath>(m, "ConvMath")
      .value("tf32", ConvMath::kTf32)
      .value("tf32x3", ConvMath::kTf32x3)
      .value("bf16", ConvMath::kBf16)
      .value("fp16", ConvMath::kFp16)
      .value("fp16x3", ConvMath::kFp16x3)
      .value("fp16x1", ConvMath::kFp16x1);
  py::enum_<ConvEpilogue>(m, "ConvEpilogue")
      .value("store", ConvEpilogue::kStore)
      .value("store_stats", ConvEpilogue::kStoreStats)
      .value("stats", ConvEpilogue::kStats)
      .value("residual_lse", ConvEpilogue::kResidualLse);
  py::enum_<ConvBackend>(m, "ConvBackend")
      .value("auto", ConvBackend::kAuto)
      .value("kgopt", ConvBackend::kKgopt)
      .value("aten", ConvBackend::kAten)
      .value("implicit_gemm", ConvBackend::kImplicitGemm)
      .value("tap_columns", ConvBackend::kTapColumns)
      .value("position_rows", ConvBackend::kPositionRows)
      .value("few_channels", ConvBackend::kFewChannels);
  py::enum_<ConvTailKind>(m, "ConvTailKind")
      .value("none", ConvTailKind::kNone)
      .value("act", ConvTailKind::kAct)
      .value("more", ConvTailKind::kMore);
  py::enum_<ConvPath>(m, "ConvPath")
      .value("implicit_gemm", ConvPath::kImplicitGemm)
      .value("few_channels", ConvPath::kFewChannels)
      .value("tap_columns", ConvPath::kTapColumns)
      .value("position_rows", ConvPath::kPositionRows)
      .value("transposed_norm", ConvPath::kTransposedNorm)
      .value("chain", ConvPath::kChain)
      .value("head", ConvPath::kHead)
      .value("depthwise", ConvPath::kDepthwise)
      .value("direct", ConvPath::kDirect)
      .value("aten", ConvPath::kAten);

  py::class_<DeviceLimits>(m, "DeviceLimits", "What a plan may use of the device; the default is an H200's.")
      .def(py::init([](int sm_count, int smem_per_block, int smem_per_sm, bool has_wgmma, int cluster_blocks) {
             return DeviceLimits{sm_count, smem_per_block, smem_per_sm, has_wgmma, cluster_blocks};
           }),
           py::arg("sm_count") = DeviceLimits{}.sm_count, py::arg("smem_per_block") = DeviceLimits{}.smem_per_block,
           py::arg("smem_per_sm") = DeviceLimits{}.smem_per_sm, py::arg("has_wgmma") = DeviceLimits{}.has_wgmma,
           py::arg("cluster_blocks") = DeviceLimits{}.cluster_blocks)
      .def_readonly("sm_count", &DeviceLimits::sm_count)
      .def_readonly("smem_per_block", &DeviceLimits::smem_per_block)
      .def_readonly("smem_per_sm", &DeviceLimits::smem_per_sm)
      .def_readonly("cluster_blocks", &DeviceLimits::cluster_blocks);

  py::class_<ConvProblem>(m, "ConvProblem", "A convolution; every size is (depth, height, width).")
      .def(py::init(&make_problem), py::kw_only(), py::arg("n") = 1, py::arg("c_in"), py::arg("c_out"),
           py::arg("input"), py::arg("output"), py::arg("kernel"), py::arg("stride") = Dims{1, 1, 1},
           py::arg("padding") = Dims{0, 0, 0}, py::arg("dilation") = Dims{1, 1, 1}, py::arg("groups") = 1,
           py::arg("transposed") = false, py::arg("dtype") = "float32", py::arg("allow_tf32") = true,
           py::arg("epilogue") = ConvEpilogue::kStore, py::arg("channels_innermost") = false, py::arg("planar") = false,
           py::arg("norm_groups") = 0);

  py::class_<ConvDimClass>(m, "ConvDimClass")
      .def_readonly("taps", &ConvDimClass::taps)
      .def_readonly("k0", &ConvDimClass::k0)
      .def_readonly("k_step", &ConvDimClass::k_step)
      .def_readonly("off0", &ConvDimClass::off0)
      .def_readonly("off_step", &ConvDimClass::off_step)
      .def_readonly("q_count", &ConvDimClass::q_count)
      .def_readonly("tile_lo", &ConvDimClass::tile_lo);

  py::class_<ImplicitGemmSmemLayout>(m, "ImplicitGemmSmemLayout",
                                     "Starts of the shared memory regions, in 32-bit words.")
      .def_readonly("offsets", &ImplicitGemmSmemLayout::offsets)
      .def_readonly("halo_map", &ImplicitGemmSmemLayout::halo_map)
      .def_readonly("weights", &ImplicitGemmSmemLayout::weights)
      .def_readonly("epilogue", &ImplicitGemmSmemLayout::epilogue)
      .def_readonly("halo", &ImplicitGemmSmemLayout::halo)
      .def_readonly("total", &ImplicitGemmSmemLayout::total);

  py::class_<ImplicitGemmPlan>(m, "ImplicitGemmPlan", "The launch plan; fields as in conv3d/implicit_gemm/params.h.")
      .def_property_readonly(
          "refusal", [](const ImplicitGemmPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("math", &ImplicitGemmPlan::math)
      .def_readonly("mb", &ImplicitGemmPlan::mb)
      .def_readonly("nb", &ImplicitGemmPlan::nb)
      .def_readonly("n_tiles", &ImplicitGemmPlan::n_tiles)
      .def_readonly("words", &ImplicitGemmPlan::words)
      .def_readonly("chunks", &ImplicitGemmPlan::chunks)
      .def_readonly("pitch", &ImplicitGemmPlan::pitch)
      .def_readonly("plane", &ImplicitGemmPlan::plane)
      .def_readonly("taps_fast", &ImplicitGemmPlan::taps_fast)
      .def_readonly("k_steps_max", &ImplicitGemmPlan::k_steps_max)
      .def_readonly("tiles_per_sample", &ImplicitGemmPlan::tiles_per_sample)
      .def_readonly("slices", &ImplicitGemmPlan::slices)
      .def_readonly("tiles_per_slice", &ImplicitGemmPlan::tiles_per_slice)
      .def_readonly("smem_bytes", &ImplicitGemmPlan::smem_bytes)
      .def_readonly("packed_words", &ImplicitGemmPlan::packed_words)
      .def_property_readonly("classes", [](const ImplicitGemmPlan& p) { return copied(p.classes); })
      .def_property_readonly("out_step", [](const ImplicitGemmPlan& p) { return copied(p.out_step); })
      .def_property_readonly("in_step", [](const ImplicitGemmPlan& p) { return copied(p.in_step); })
      .def_property_readonly("tile_log2", [](const ImplicitGemmPlan& p) { return copied(p.tile_log2); })
      .def_property_readonly("halo", [](const ImplicitGemmPlan& p) { return copied(p.halo); })
      .def_property_readonly("tiles", [](const ImplicitGemmPlan& p) { return copied(p.tiles); })
      .def(
          "dim", [](const ImplicitGemmPlan& p, int dim, int residue) { return p.dim[dim][residue]; }, py::arg("dim"),
          py::arg("residue"), "The class of outputs o = q * out_step[dim] + residue.")
      .def("smem_layout", [](const ImplicitGemmPlan& p) { return implicit_gemm_smem_layout(p); });

  py::class_<FewChannelsPlan>(m, "FewChannelsPlan",
                              "The plan of the kernels for few channels; fields as in conv3d/few_channels/params.h.")
      .def_property_readonly(
          "refusal", [](const FewChannelsPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("cycles", &FewChannelsPlan::cycles)
      .def_readonly("math", &FewChannelsPlan::math)
      .def_readonly("by_channels", &FewChannelsPlan::by_channels)
      .def_readonly("by_positions", &FewChannelsPlan::by_positions)
      .def_readonly("columns", &FewChannelsPlan::columns)
      .def_readonly("consumers", &FewChannelsPlan::consumers)
      .def_readonly("window", &FewChannelsPlan::window)
      .def_readonly("chunked", &FewChannelsPlan::chunked)
      .def_readonly("by_window", &FewChannelsPlan::by_window)
      .def_readonly("types", &FewChannelsPlan::types)
      .def_readonly("shifted_types", &FewChannelsPlan::shifted_types)
      .def_readonly("blocks", &FewChannelsPlan::blocks)
      .def_readonly("n_tiles", &FewChannelsPlan::n_tiles)
      .def_readonly("words", &FewChannelsPlan::words)
      .def_readonly("k_words", &FewChannelsPlan::k_words)
      .def_readonly("k_steps", &FewChannelsPlan::k_steps)
      .def_readonly("batch", &FewChannelsPlan::batch)
      .def_readonly("zero_plane", &FewChannelsPlan::zero_plane)
      .def_readonly("rows", &FewChannelsPlan::rows)
      .def_readonly("segments", &FewChannelsPlan::segments)
      .def_readonly("lead", &FewChannelsPlan::lead)
      .def_readonly("vectors", &FewChannelsPlan::vectors)
      .def_readonly("pitch", &FewChannelsPlan::pitch)
      .def_readonly("plane", &FewChannelsPlan::plane)
      .def_readonly("stages", &FewChannelsPlan::stages)
      .def_readonly("stage_words", &FewChannelsPlan::stage_words)
      .def_readonly("strip", &FewChannelsPlan::strip)
      .def_readonly("strips", &FewChannelsPlan::strips)
      .def_readonly("tiles_together", &FewChannelsPlan::tiles_together)
      .def_readonly("at_once", &FewChannelsPlan::at_once)
      .def_readonly("tiles_per_sample", &FewChannelsPlan::tiles_per_sample)
      .def_readonly("slices", &FewChannelsPlan::slices)
      .def_readonly("tiles_per_slice", &FewChannelsPlan::tiles_per_slice)
      .def_readonly("smem_bytes", &FewChannelsPlan::smem_bytes)
      .def_property_readonly(
          "chunk_pairs",
          [](const FewChannelsPlan& p) { return std::vector<uint32_t>(p.chunk_pairs, p.chunk_pairs + p.k_steps); })
      .def_property_readonly("tile", [](const FewChannelsPlan& p) { return copied(p.tile); })
      .def_property_readonly("halo", [](const FewChannelsPlan& p) { return copied(p.halo); })
      .def_property_readonly("tiles", [](const FewChannelsPlan& p) { return copied(p.tiles); })
      .def_property_readonly("origin", [](const FewChannelsPlan& p) { return copied(p.origin); });

  py::class_<ChainPlan>(m, "ChainPlan", "A small chain in one launch; fields as in conv3d/small_chain/params.h.")
      .def_property_readonly("refusal",
                             [](const ChainPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("exact", &ChainPlan::exact)
      .def_readonly("blocks", &ChainPlan::blocks)
      .def_readonly("threads", &ChainPlan::threads)
      .def_readonly("plane", &ChainPlan::plane)
      .def_readonly("row_lanes_log2", &ChainPlan::row_lanes_log2)
      .def_readonly("pieces", &ChainPlan::pieces)
      .def_readonly("k", &ChainPlan::k)
      .def_readonly("k_steps", &ChainPlan::k_steps)
      .def_readonly("n_tiles", &ChainPlan::n_tiles)
      .def_readonly("n_batch", &ChainPlan::n_batch)
      .def_readonly("chunk", &ChainPlan::chunk)
      .def_readonly("chunks", &ChainPlan::chunks)
      .def_readonly("chunk_pitch", &ChainPlan::chunk_pitch)
      .def_readonly("stat_lanes_log2", &ChainPlan::stat_lanes_log2)
      .def_readonly("stat_parts", &ChainPlan::stat_parts)
      .def_readonly("lanes_log2", &ChainPlan::lanes_log2)
      .def_readonly("team_lanes_log2", &ChainPlan::team_lanes_log2)
      .def_readonly("is_team", &ChainPlan::is_team)
      .def_readonly("load_rounds", &ChainPlan::load_rounds)
      .def_readonly("cycles", &ChainPlan::cycles)
      .def_readonly("smem_bytes", &ChainPlan::smem_bytes)
      .def_property_readonly("split", [](const ChainPlan& p) { return std::make_tuple(p.split[0], p.split[1]); })
      .def_property_readonly("halo", [](const ChainPlan& p) { return copied(p.halo); });

  py::class_<AutocorrelationPlan>(m, "AutocorrelationPlan",
                                  "Fields as in conv3d/few_channels/autocorrelation/params.h.")
      .def_property_readonly(
          "refusal",
          [](const AutocorrelationPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("math", &AutocorrelationPlan::math)
      .def_readonly("chunks", &AutocorrelationPlan::chunks)
      .def_readonly("slices", &AutocorrelationPlan::slices)
      .def_readonly("slice_rows", &AutocorrelationPlan::slice_rows)
      .def_readonly("runs", &AutocorrelationPlan::runs)
      .def_readonly("run_rows", &AutocorrelationPlan::run_rows)
      .def_readonly("column_rows", &AutocorrelationPlan::column_rows)
      .def_readonly("edge_rows", &AutocorrelationPlan::edge_rows)
      .def_readonly("smem_bytes", &AutocorrelationPlan::smem_bytes)
      .def_readonly("finish_smem_bytes", &AutocorrelationPlan::finish_smem_bytes)
      .def_readonly("slice_floats", &AutocorrelationPlan::slice_floats)
      .def_readonly("cycles", &AutocorrelationPlan::cycles)
      .def_property_readonly("core_rows", [](const AutocorrelationPlan& p) { return copied(p.core_rows); })
      .def_property_readonly("core_columns", [](const AutocorrelationPlan& p) { return copied(p.core_columns); });

  py::class_<TapColumnsPlan>(m, "TapColumnsPlan",
                             "The plan for channels-innermost tensors; fields as in conv3d/wgmma/tap_columns/params.h.")
      .def_property_readonly(
          "refusal", [](const TapColumnsPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("taps_w", &TapColumnsPlan::taps_w)
      .def_readonly("c_tile", &TapColumnsPlan::c_tile)
      .def_readonly("segments", &TapColumnsPlan::segments)
      .def_readonly("teams", &TapColumnsPlan::teams)
      .def_readonly("n_tiles", &TapColumnsPlan::n_tiles)
      .def_readonly("row_bytes", &TapColumnsPlan::row_bytes)
      .def_readonly("chunks", &TapColumnsPlan::chunks)
      .def_readonly("flip", &TapColumnsPlan::flip)
      .def_readonly("first_shift", &TapColumnsPlan::first_shift)
      .def_readonly("last_shift", &TapColumnsPlan::last_shift)
      .def_readonly("anchor_to_out", &TapColumnsPlan::anchor_to_out)
      .def_readonly("strip_rows", &TapColumnsPlan::strip_rows)
      .def_readonly("strip_step", &TapColumnsPlan::strip_step)
      .def_readonly("owned_first", &TapColumnsPlan::owned_first)
      .def_readonly("owned_end", &TapColumnsPlan::owned_end)
      .def_readonly("run_strips", &TapColumnsPlan::run_strips)
      .def_readonly("runs", &TapColumnsPlan::runs)
      .def_readonly("runs_per_plane", &TapColumnsPlan::runs_per_plane)
      .def_readonly("tiles_per_sample", &TapColumnsPlan::tiles_per_sample)
      .def_readonly("tiles", &TapColumnsPlan::tiles)
      .def_readonly("blocks", &TapColumnsPlan::blocks)
      .def_readonly("taps_per_stage", &TapColumnsPlan::taps_per_stage)
      .def_readonly("boxes", &TapColumnsPlan::boxes)
      .def_readonly("box_rows", &TapColumnsPlan::box_rows)
      .def_readonly("a_stages", &TapColumnsPlan::a_stages)
      .def_readonly("b_stages", &TapColumnsPlan::b_stages)
      .def_readonly("lag", &TapColumnsPlan::lag)
      .def_readonly("wide", &TapColumnsPlan::wide)
      .def_readonly("smem_bytes", &TapColumnsPlan::smem_bytes)
      .def_readonly("packed_bytes", &TapColumnsPlan::packed_bytes)
      .def_property_readonly("taps", [](const TapColumnsPlan& p) { return copied(p.taps); })
      .def_property_readonly("padding", [](const TapColumnsPlan& p) { return copied(p.padding); })
      .def("by_width", [](const TapColumnsPlan& p, int64_t n) {
        return int64_t(n * 2 * p.by_width.magic >> 32 >> p.by_width.shift);
      });

  py::class_<PositionRowsPlan>(
      m, "PositionRowsPlan",
      "The other plan for channels-innermost tensors; fields as in conv3d/wgmma/position_rows/params.h.")
      .def_property_readonly(
          "refusal", [](const PositionRowsPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("segments", &PositionRowsPlan::segments)
      .def_readonly("columns", &PositionRowsPlan::columns)
      .def_readonly("row_bytes", &PositionRowsPlan::row_bytes)
      .def_readonly("chunks", &PositionRowsPlan::chunks)
      .def_readonly("parts", &PositionRowsPlan::parts)
      .def_readonly("copy_bytes", &PositionRowsPlan::copy_bytes)
      .def_readonly("flip", &PositionRowsPlan::flip)
      .def_readonly("row_slots", &PositionRowsPlan::row_slots)
      .def_readonly("plane_rows", &PositionRowsPlan::plane_rows)
      .def_readonly("stage_rows", &PositionRowsPlan::stage_rows)
      .def_readonly("m_tiles", &PositionRowsPlan::m_tiles)
      .def_readonly("tiles_per_sample", &PositionRowsPlan::tiles_per_sample)
      .def_readonly("blocks", &PositionRowsPlan::blocks)
      .def_readonly("tiles", &PositionRowsPlan::tiles)
      .def_readonly("x_stages", &PositionRowsPlan::x_stages)
      .def_readonly("w_stages", &PositionRowsPlan::w_stages)
      .def_readonly("lag", &PositionRowsPlan::lag)
      .def_readonly("normalizes", &PositionRowsPlan::normalizes)
      .def_readonly("piece_rows", &PositionRowsPlan::piece_rows)
      .def_readonly("smem_bytes", &PositionRowsPlan::smem_bytes)
      .def_readonly("packed_bytes", &PositionRowsPlan::packed_bytes)
      .def_property_readonly("taps", [](const PositionRowsPlan& p) { return copied(p.taps); })
      .def_property_readonly("padding", [](const PositionRowsPlan& p) { return copied(p.padding); });

  py::class_<TransposedNormPlan>(
      m, "TransposedNormPlan",
      "The plan of the convolution with its norm in one launch; fields as in conv3d/wgmma/transposed_norm/params.h.")
      .def_property_readonly(
          "refusal",
          [](const TransposedNormPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("scaled", &TransposedNormPlan::scaled)
      .def_readonly("columns", &TransposedNormPlan::columns)
      .def_readonly("parts", &TransposedNormPlan::parts)
      .def_readonly("chunks", &TransposedNormPlan::chunks)
      .def_readonly("flip", &TransposedNormPlan::flip)
      .def_readonly("reach", &TransposedNormPlan::reach)
      .def_readonly("plane", &TransposedNormPlan::plane)
      .def_readonly("m_tiles", &TransposedNormPlan::m_tiles)
      .def_readonly("tiles_per_sample", &TransposedNormPlan::tiles_per_sample)
      .def_readonly("blocks", &TransposedNormPlan::blocks)
      .def_readonly("tiles", &TransposedNormPlan::tiles)
      .def_readonly("whole_height", &TransposedNormPlan::whole_height)
      .def_readonly("boxes", &TransposedNormPlan::boxes)
      .def_readonly("box_rows", &TransposedNormPlan::box_rows)
      .def_readonly("x_stages", &TransposedNormPlan::x_stages)
      .def_readonly("w_stages", &TransposedNormPlan::w_stages)
      .def_readonly("lag", &TransposedNormPlan::lag)
      .def_readonly("first_short", &TransposedNormPlan::first_short)
      .def("short_place",
           [](const TransposedNormPlan& p, int n) { return transposed_norm_short_place(p.short_step, n, p); })
      .def_readonly("smem_bytes", &TransposedNormPlan::smem_bytes)
      .def_readonly("packed_bytes", &TransposedNormPlan::packed_bytes)
      .def_readonly("sample_bytes", &TransposedNormPlan::sample_bytes)
      .def_readonly("slots", &TransposedNormPlan::slots)
      .def_property_readonly("taps", [](const TransposedNormPlan& p) { return copied(p.taps); });

  py::class_<WgradPlan>(m, "WgradPlan",
                        "The plan of the weight gradient; fields as in conv3d/gradients/wgrad/params.h.")
      .def_property_readonly("refusal",
                             [](const WgradPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("few", &WgradPlan::few)
      .def_readonly("stride", &WgradPlan::stride)
      .def_readonly("b_blocks", &WgradPlan::b_blocks)
      .def_readonly("rows", &WgradPlan::rows)
      .def_readonly("width", &WgradPlan::width)
      .def_readonly("row_numbers", &WgradPlan::row_numbers)
      .def_readonly("row_skip", &WgradPlan::row_skip)
      .def_readonly("pitch", &WgradPlan::pitch)
      .def_readonly("back", &WgradPlan::back)
      .def_readonly("alternate", &WgradPlan::alternate)
      .def_readonly("turns", &WgradPlan::turns)
      .def_readonly("stages", &WgradPlan::stages)
      .def_readonly("a_tiles", &WgradPlan::a_tiles)
      .def_readonly("b_tiles", &WgradPlan::b_tiles)
      .def_readonly("depth_tiles", &WgradPlan::depth_tiles)
      .def_readonly("splits", &WgradPlan::splits)
      .def_readonly("slots", &WgradPlan::slots)
      .def_readonly("steps", &WgradPlan::steps)
      .def_readonly("first_step", &WgradPlan::first_step)
      .def_readonly("smem_bytes", &WgradPlan::smem_bytes)
      .def_readonly("partial_floats", &WgradPlan::partial_floats)
      .def_property_readonly("tiles", [](const WgradPlan& p) { return copied(p.tiles); })
      .def_property_readonly("row_bytes", &wgrad_row_bytes)
      .def_property_readonly("columns", &wgrad_columns)
      .def_property_readonly("microseconds", &wgrad_microseconds)
      .def_property_readonly("first_run", &wgrad_first_run)
      .def_property_readonly("second_run", &wgrad_second_run)
      .def_property_readonly("tile_floats", &wgrad_tile_floats)
      .def_property_readonly("blocks", &wgrad_blocks);

  py::class_<FewCopy>(m, "FewCopy", "How rows come into shared memory; fields as in conv3d/gradients/few_channels.h.")
      .def_readonly("piece", &FewCopy::piece)
      .def_readonly("pieces", &FewCopy::pieces)
      .def_readonly("across_log2", &FewCopy::across_log2)
      .def_readonly("rows", &FewCopy::rows)
      .def_readonly("slots", &FewCopy::slots);

  py::class_<FewWgradPlan>(m, "FewWgradPlan", "Fields as in conv3d/gradients/few_wgrad/params.h.")
      .def_property_readonly(
          "refusal", [](const FewWgradPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("dy_is_a", &FewWgradPlan::dy_is_a)
      .def_readonly("x_tiles", &FewWgradPlan::x_tiles)
      .def_readonly("dy_tiles", &FewWgradPlan::dy_tiles)
      .def_readonly("splits", &FewWgradPlan::splits)
      .def_readonly("channel_blocks", &FewWgradPlan::channel_blocks)
      .def_readonly("rows", &FewWgradPlan::rows)
      .def_property_readonly("tile", [](const FewWgradPlan& p) { return copied(p.tile); })
      .def_property_readonly("tiles", [](const FewWgradPlan& p) { return copied(p.tiles); })
      .def_property_readonly("margin", [](const FewWgradPlan& p) { return copied(p.margin); })
      .def_readonly("dy_pitch", &FewWgradPlan::dy_pitch)
      .def_readonly("dy_channel", &FewWgradPlan::dy_channel)
      .def_readonly("x_pitch", &FewWgradPlan::x_pitch)
      .def_readonly("x_plane", &FewWgradPlan::x_plane)
      .def_readonly("x_channel", &FewWgradPlan::x_channel)
      .def_readonly("dy_copy", &FewWgradPlan::dy_copy)
      .def_readonly("x_copy", &FewWgradPlan::x_copy)
      .def_readonly("all_tiles", &FewWgradPlan::all_tiles)
      .def_readonly("stages", &FewWgradPlan::stages)
      .def_readonly("stage_bytes", &FewWgradPlan::stage_bytes)
      .def_readonly("makes_dy", &FewWgradPlan::makes_dy)
      .def_readonly("k_steps", &FewWgradPlan::k_steps)
      .def_readonly("made_bytes", &FewWgradPlan::made_bytes)
      .def_readonly("dx_rows", &FewWgradPlan::dx_rows)
      .def_readonly("dx_planes", &FewWgradPlan::dx_planes)
      .def_readonly("steps", &FewWgradPlan::steps)
      .def_readonly("dx_slots", &FewWgradPlan::dx_slots)
      .def_readonly("dx_pitch", &FewWgradPlan::dx_pitch)
      .def_readonly("dx_channel", &FewWgradPlan::dx_channel)
      .def_readonly("dx_slot", &FewWgradPlan::dx_slot)
      .def_readonly("dx_k_steps", &FewWgradPlan::dx_k_steps)
      .def_property_readonly("quads", &few_wgrad_quads)
      .def("tap",
           [](const FewWgradPlan& p, int quad, int i) {
             const FewWgradTap tap = few_wgrad_tap(p, quad, i);
             return std::pair(tap.row, tap.column);
           })
      .def_readonly("blocks_per_sm", &FewWgradPlan::blocks_per_sm)
      .def_readonly("blocks", &FewWgradPlan::blocks)
      .def_readonly("smem_bytes", &FewWgradPlan::smem_bytes)
      .def_readonly("partial_floats", &FewWgradPlan::partial_floats)
      .def_readonly("cycles", &FewWgradPlan::cycles)
      .def_property_readonly("channels", &few_wgrad_channels)
      .def_property_readonly("floats", &few_wgrad_floats);

  py::class_<FewMarchPlan>(m, "FewMarchPlan", "Fields as in conv3d/gradients/few_march/params.h.")
      .def_property_readonly(
          "refusal", [](const FewMarchPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_property_readonly("kernel", [](const FewMarchPlan& p) { return copied(p.kernel); })
      .def_readonly("terms", &FewMarchPlan::terms)
      .def_readonly("inputs", &FewMarchPlan::inputs)
      .def_readonly("tiles", &FewMarchPlan::tiles)
      .def_readonly("rows", &FewMarchPlan::rows)
      .def_readonly("planes", &FewMarchPlan::planes)
      .def_readonly("pitch", &FewMarchPlan::pitch)
      .def_readonly("dy_rows", &FewMarchPlan::dy_rows)
      .def_readonly("x_rows", &FewMarchPlan::x_rows)
      .def_readonly("x_plane", &FewMarchPlan::x_plane)
      .def_readonly("dy_octet", &FewMarchPlan::dy_octet)
      .def_readonly("dy_tiles", &FewMarchPlan::dy_tiles)
      .def_readonly("dx_tiles", &FewMarchPlan::dx_tiles)
      .def_readonly("plane_steps", &FewMarchPlan::plane_steps)
      .def_readonly("dx_steps", &FewMarchPlan::dx_steps)
      .def_readonly("halves", &FewMarchPlan::halves)
      .def_readonly("slabs", &FewMarchPlan::slabs)
      .def_readonly("parts", &FewMarchPlan::parts)
      .def_readonly("marches", &FewMarchPlan::marches)
      .def_readonly("blocks", &FewMarchPlan::blocks)
      .def_readonly("smem_bytes", &FewMarchPlan::smem_bytes)
      .def_readonly("partial_floats", &FewMarchPlan::partial_floats)
      .def_readonly("cycles", &FewMarchPlan::cycles)
      .def("tap", &few_march_tap);

  py::class_<HeadGradientPlan>(m, "HeadGradientPlan", "Fields as in conv3d/gradients/head/params.h.")
      .def_property_readonly(
          "refusal", [](const HeadGradientPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("rows", &HeadGradientPlan::rows)
      .def_readonly("c_in", &HeadGradientPlan::c_in)
      .def_readonly("c_out", &HeadGradientPlan::c_out)
      .def_readonly("outputs", &HeadGradientPlan::outputs)
      .def_readonly("blocks", &HeadGradientPlan::blocks)
      .def_readonly("partial_floats", &HeadGradientPlan::partial_floats);

  py::class_<DepthwiseTile>(m, "DepthwiseTile", "Fields as in conv3d/depthwise/params.h.")
      .def_readonly("rows", &DepthwiseTile::rows)
      .def_readonly("span", &DepthwiseTile::span)
      .def_readonly("slack", &DepthwiseTile::slack)
      .def_readonly("step", &DepthwiseTile::step)
      .def_readonly("pitch", &DepthwiseTile::pitch)
      .def_readonly("plane", &DepthwiseTile::plane)
      .def_readonly("planes", &DepthwiseTile::planes)
      .def_readonly("all_rows", &DepthwiseTile::all_rows)
      .def_property_readonly(
          "divisors",
          [](const DepthwiseTile& t) {
            std::vector<std::tuple<uint32_t, uint32_t>> all;
            for (const auto& by : {t.by_rows, t.by_all_rows, t.by_span, t.by_planes}) {
              all.push_back({by.divisor, by.factor});
            }
            return all;
          },
          "(divisor, factor) of rows, all rows, span and planes.");
  py::enum_<DepthwiseMode>(m, "DepthwiseMode")
      .value("gather1", DepthwiseMode::kGather1)
      .value("gather2", DepthwiseMode::kGather2)
      .value("scatter2", DepthwiseMode::kScatter2);
  py::class_<DepthwisePlan>(m, "DepthwisePlan", "Fields as in conv3d/depthwise/params.h.")
      .def_property_readonly(
          "refusal", [](const DepthwisePlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_property_readonly("phases", [](const DepthwisePlan& p) { return copied(p.phases); })
      .def_readonly("mode", &DepthwisePlan::mode)
      .def_readonly("kernel", &DepthwisePlan::kernel)
      .def_readonly("volume", &DepthwisePlan::volume)
      .def_readonly("lanes", &DepthwisePlan::lanes)
      .def_readonly("direct", &DepthwisePlan::direct)
      .def_readonly("threads", &DepthwisePlan::threads)
      .def_readonly("rows", &DepthwisePlan::rows)
      .def_readonly("groups", &DepthwisePlan::groups)
      .def_readonly("segments", &DepthwisePlan::segments)
      .def_readonly("segment", &DepthwisePlan::segment)
      .def_property_readonly("tiles", [](const DepthwisePlan& p) { return copied(p.tiles); })
      .def_readonly("channel_blocks", &DepthwisePlan::channel_blocks)
      .def_readonly("blocks", &DepthwisePlan::blocks)
      .def_readonly("input", &DepthwisePlan::in)
      .def_readonly("output", &DepthwisePlan::out)
      .def_readonly("weight_plane", &DepthwisePlan::weight_plane)
      .def_readonly("smem_weights", &DepthwisePlan::smem_weights)
      .def_readonly("smem_out", &DepthwisePlan::smem_out)
      .def_readonly("smem_bytes", &DepthwisePlan::smem_bytes)
      .def_readonly("microseconds", &DepthwisePlan::microseconds);
  py::class_<DepthwiseWgradPlan>(m, "DepthwiseWgradPlan", "Fields as in conv3d/depthwise/params.h.")
      .def_property_readonly(
          "refusal",
          [](const DepthwiseWgradPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_property_readonly("phases", [](const DepthwiseWgradPlan& p) { return copied(p.phases); })
      .def_readonly("kernel", &DepthwiseWgradPlan::kernel)
      .def_readonly("stride", &DepthwiseWgradPlan::stride)
      .def_readonly("lanes", &DepthwiseWgradPlan::lanes)
      .def_readonly("threads", &DepthwiseWgradPlan::threads)
      .def_readonly("rows", &DepthwiseWgradPlan::rows)
      .def_readonly("groups", &DepthwiseWgradPlan::groups)
      .def_property_readonly("tiles", [](const DepthwiseWgradPlan& p) { return copied(p.tiles); })
      .def_readonly("channel_blocks", &DepthwiseWgradPlan::channel_blocks)
      .def_readonly("depth", &DepthwiseWgradPlan::depth)
      .def_readonly("taps", &DepthwiseWgradPlan::taps)
      .def_readonly("segments", &DepthwiseWgradPlan::segments)
      .def_readonly("segment", &DepthwiseWgradPlan::segment)
      .def_readonly("items", &DepthwiseWgradPlan::items)
      .def_readonly("splits", &DepthwiseWgradPlan::splits)
      .def_readonly("moved", &DepthwiseWgradPlan::moved)
      .def_readonly("still", &DepthwiseWgradPlan::still)
      .def_readonly("smem_still", &DepthwiseWgradPlan::smem_still)
      .def_readonly("smem_bytes", &DepthwiseWgradPlan::smem_bytes)
      .def_readonly("weights", &DepthwiseWgradPlan::weights)
      .def_readonly("partial_floats", &DepthwiseWgradPlan::partial_floats)
      .def_readonly("microseconds", &DepthwiseWgradPlan::microseconds);

  py::class_<FewDgradPlan>(m, "FewDgradPlan", "Fields as in conv3d/gradients/few_dgrad/params.h.")
      .def_property_readonly(
          "refusal", [](const FewDgradPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("row_tiles", &FewDgradPlan::row_tiles)
      .def_readonly("marches", &FewDgradPlan::marches)
      .def_readonly("units", &FewDgradPlan::units)
      .def_readonly("channels", &FewDgradPlan::channels)
      .def_readonly("chunks", &FewDgradPlan::chunks)
      .def_readonly("parts", &FewDgradPlan::parts)
      .def_readonly("k_steps", &FewDgradPlan::k_steps)
      .def_property_readonly("tile", [](const FewDgradPlan& p) { return copied(p.tile); })
      .def_property_readonly("tiles", [](const FewDgradPlan& p) { return copied(p.tiles); })
      .def_property_readonly("halo", [](const FewDgradPlan& p) { return copied(p.halo); })
      .def_readonly("units_w", &FewDgradPlan::units_w)
      .def_readonly("pitch", &FewDgradPlan::pitch)
      .def_readonly("channel", &FewDgradPlan::channel)
      .def_readonly("scratch_channel", &FewDgradPlan::scratch_channel)
      .def_readonly("dy_copy", &FewDgradPlan::dy_copy)
      .def_readonly("all_tiles", &FewDgradPlan::all_tiles)
      .def_readonly("stages", &FewDgradPlan::stages)
      .def_readonly("stage_bytes", &FewDgradPlan::stage_bytes)
      .def_readonly("blocks_per_sm", &FewDgradPlan::blocks_per_sm)
      .def_readonly("blocks", &FewDgradPlan::blocks)
      .def_readonly("smem_bytes", &FewDgradPlan::smem_bytes)
      .def_readonly("cycles", &FewDgradPlan::cycles);

  py::class_<MadeGradientPlans>(m, "MadeGradientPlans", "Fields as in conv3d/choice/gradients.h.")
      .def_readonly("march", &MadeGradientPlans::march)
      .def_readonly("dweight", &MadeGradientPlans::dweight)
      .def_readonly("dx", &MadeGradientPlans::dx)
      .def_readonly("samples", &MadeGradientPlans::samples)
      .def_property_readonly("why_apart", [](const MadeGradientPlans& p) {
        return p.why_apart ? py::object(py::str(p.why_apart)) : py::none();
      });

  py::class_<SplitWgradPlan>(m, "SplitWgradPlan", "Fields as in conv3d/gradients/wgrad/params.h.")
      .def_property_readonly(
          "refusal", [](const SplitWgradPlan& p) { return p.refusal ? py::object(py::str(p.refusal)) : py::none(); })
      .def_readonly("samples", &SplitWgradPlan::samples);

  py::class_<InnermostGradients>(m, "InnermostGradients", "Fields as in conv3d/choice/gradients.h.")
      .def_readonly("dx", &InnermostGradients::dx)
      .def_readonly("dweight", &InnermostGradients::dweight);

  py::class_<AtenPlan>(m, "AtenPlan");
  py::class_<DirectPlan>(m, "DirectPlan");

  py::class_<ConvGradientsChoice>(m, "ConvGradientsChoice")
      .def_readonly("dx", &ConvGradientsChoice::dx)
      .def_readonly("dweight", &ConvGradientsChoice::dweight)
      .def_property_readonly(
          "why_aten_dx",
          [](const ConvGradientsChoice& c) { return c.why_aten_dx ? py::object(py::str(c.why_aten_dx)) : py::none(); })
      .def("explain", &ConvGradientsChoice::explain);

  py::class_<Choice>(m, "Choice", "What runs; `plan` is that of the family.")
      .def_property_readonly("path", &Choice::path)
      .def_readonly("plan", &Choice::plan)
      .def_readonly("autocorrelation", &Choice::autocorrelation)
      .def_readonly("composed", &Choice::composed)
      .def_readonly("reason", &Choice::reason)
      .def("explain", &Choice::explain);

  m.def(
      "predict_conv",
      [](const ConvProblem& q, const DeviceLimits& l) {
        const ConvPrediction t = predict_conv(q, l, plan_implicit_gemm(q, l), plan_tap_columns(q, l),
                                              plan_position_rows(q, l), plan_few_channels(q, l));
        return std::vector<double>(t.us, t.us + kTimedPaths);
      },
      py::arg("problem"), py::arg("limits") = DeviceLimits{},
      "Microseconds by ATen, implicit GEMM, taps as columns, positions as rows and the kernels of few channels, as the "
      "plans "
      "predict them; 0: cannot run.");
  m.def("conv_out_size", &conv_out_size, py::arg("size"), py::arg("kernel"), py::arg("stride") = 1,
        py::arg("padding") = 0, py::arg("dilation") = 1, py::arg("transposed") = false, py::arg("output_padding") = 0,
        "Output size along one dim; below 1 when nothing fits.");
  m.def("own_margin", &own_margin, py::arg("problem"), "Of cuDNN's time: what an own kernel must stay below.");
  m.def(
      "estimate_conv",
      [](const ConvProblem& problem, const std::vector<double>& predicted, double least) {
        ConvPrediction prediction;
        std::copy_n(predicted.begin(), kTimedPaths, prediction.us);
        const ConvPrediction t = estimate_conv(problem, DeviceLimits{}, prediction, least);
        return std::vector<double>(t.us, t.us + kTimedPaths);
      },
      py::arg("problem"), py::arg("predicted"), py::arg("least"),
      "What predict_conv predicts, corrected by the measured convolutions that are at least so far away.");
  m.attr("CONV_THREADS") = kConvThreads;
  m.attr("MAX_DIM_CLASSES") = kMaxDimClasses;
  m.def("plan_implicit_gemm", &plan_implicit_gemm, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.attr("FEW_CHANNELS_STRIP") = kFewChannelsStrip;
  m.def("plan_few_channels", &plan_few_channels, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.attr("CHAIN_LOADS") = kChainLoads;
  m.attr("CHAIN_WEIGHTS") = kChainWeights;
  m.def("plan_chain", &plan_chain, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.attr("AUTOCORRELATION_CHUNK") = kAutocorrelationChunk;
  m.def("plan_autocorrelation", &plan_autocorrelation, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.attr("WGMMA_CONSUMERS") = kWgmmaConsumers;
  m.attr("TAP_COLUMNS_MAX_STAGES") = kTapColumnsMaxStages;
  m.def("plan_tap_columns", &plan_tap_columns, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.attr("POSITION_ROWS_MAX_STAGES") = kPositionRowsMaxStages;
  m.def("plan_position_rows", &plan_position_rows, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("normalizes") = false);
  m.attr("POSITION_ROWS_PIECES") = kPositionRowsPieces;
  m.def("position_rows_channel", &position_rows_channel, py::arg("row"));
  m.attr("TRANSPOSED_NORM_CHANNELS") = kTransposedNormChannels;
  m.attr("TRANSPOSED_NORM_ROW_BYTES") = kTransposedNormRowBytes;
  m.def("plan_transposed_norm", &plan_transposed_norm, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("scaled") = false);
  m.def("tap_columns_channel", &tap_columns_channel, py::arg("column"), py::arg("half"));
  m.attr("WGRAD_MAX_STAGES") = kWgradMaxStages;
  m.def(
      "plan_wgrad", [](const ConvProblem& problem, const DeviceLimits& limits) { return plan_wgrad(problem, limits); },
      py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.def("plan_few_wgrad", &plan_few_wgrad, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("makes_dy") = false);
  m.def("plan_few_march", &plan_few_march, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.def("plan_few_wgrad_dx", &plan_few_wgrad_dx, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.def("plan_few_dgrad", &plan_few_dgrad, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("dy_is_made") = false);
  m.def("plan_conv_norm_lse", &plan_conv_norm_lse, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("makes_dx") = false);
  m.def("plan_made_gradients", &plan_made_gradients, py::arg("problem"), py::arg("limits"), py::arg("with_dx"),
        py::arg("most_samples"));
  m.def("plan_head_gradient", &plan_head_gradient, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.attr("DEPTHWISE_LANES") = kDepthwiseLanes;
  m.attr("DEPTHWISE_THREADS") = kDepthwiseThreads;
  m.attr("DEPTHWISE_WGRAD_CHAIN") = depthwise_detail::kWgradChain;
  m.def("plan_depthwise", &plan_depthwise, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("of_dx") = false);
  m.def("plan_depthwise_wgrad", &plan_depthwise_wgrad, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.def(
      "depthwise_cells",
      [](const ConvProblem& problem, const std::array<int, 3>& phases, int index, int dim, bool of_dx) {
        const int steps[3] = {phases[0], phases[1], phases[2]};
        const DepthwiseCells cells =
            depthwise_cells(depthwise_phase(depthwise_pass(problem, of_dx), steps, index).pass, dim);
        return std::make_tuple(cells.cells, cells.lead, cells.skew);
      },
      py::arg("problem"), py::arg("phases"), py::arg("index"), py::arg("dim"), py::arg("of_dx") = false,
      "(cells, lead, skew) of a dim of a phase.");
  m.def(
      "depthwise_phase",
      [](const ConvProblem& problem, const std::array<int, 3>& phases, int index, const std::string& what) {
        const int steps[3] = {phases[0], phases[1], phases[2]};
        const DepthwisePass whole =
            what == "dweight" ? depthwise_wgrad_pass(problem) : depthwise_pass(problem, what == "dx");
        const DepthwisePhase phase = depthwise_phase(whole, steps, index);
        const auto list = [](const int64_t (&of)[3]) { return std::array<int64_t, 3>{of[0], of[1], of[2]}; };
        return std::make_tuple(list(phase.pass.in), list(phase.pass.out), list(phase.pass.padding),
                               list(phase.in_first), list(phase.out_first));
      },
      py::arg("problem"), py::arg("phases"), py::arg("index"), py::arg("what"),
      "(inputs, outputs, padding, first input, first output) of a phase of y, dx or dweight.");
  m.def("depthwise_taps", &depthwise_taps, py::arg("mode"), py::arg("kernel"));
  m.def("depthwise_tap", &depthwise_tap, py::arg("mode"), py::arg("kernel"), py::arg("at"), py::arg("up"));
  m.def("depthwise_cell_rows", &depthwise_cell_rows, py::arg("mode"), py::arg("volume"));
  m.def("depthwise_cell_columns", &depthwise_cell_columns, py::arg("mode"), py::arg("kernel"), py::arg("volume"));
  m.def("depthwise_wgrad_columns", &depthwise_wgrad_columns, py::arg("kernel"), py::arg("stride"), py::arg("taps"));
  m.def("depthwise_wgrad_first_tap", &depthwise_wgrad_first_tap, py::arg("block"), py::arg("stride"), py::arg("taps"));
  m.def("choose_conv_gradients", &choose_conv_gradients, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("backend") = ConvBackend::kAuto, py::arg("copies") = false);
  m.def("plan_split_wgrad", &plan_split_wgrad, py::arg("problem"), py::arg("limits") = DeviceLimits{});
  m.def("plan_wgrad_terms", &plan_wgrad_terms, py::arg("problem"), py::arg("limits"), py::arg("samples"),
        py::arg("chain") = 0);
  m.attr("SPLIT_CHAIN") = kSplitChain;
  m.attr("SPLIT_PARTIAL_FLOATS") = kSplitPartialFloats;
  m.def("wgrad_portions", &wgrad_portions, py::arg("plan"));
  m.def("wgrad_portion", &wgrad_portion, py::arg("plan"), py::arg("index"), py::arg("portions"));
  m.def("split_wgrad_microseconds", &split_wgrad_microseconds, py::arg("problem"), py::arg("limits"), py::arg("plan"));
  m.def("choose_innermost_gradients", &choose_innermost_gradients, py::arg("problem"),
        py::arg("limits") = DeviceLimits{}, py::arg("dx") = true, py::arg("dweight") = true);
  m.def("choose_conv", &choose_conv, py::arg("problem"), py::arg("limits") = DeviceLimits{},
        py::arg("backend") = ConvBackend::kAuto, py::arg("tail") = ConvTailKind::kNone);
}

GroupNormDims make_dims(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, bool channels_last) {
  GroupNormDims d;
  d.n = n;
  d.c = c;
  d.s = s;
  d.g = g;
  d.dtype = parse_dtype(dtype);
  d.channels_last = channels_last;
  return d;
}

NormPlanInput norm_input(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, int tensors,
                         bool channels_last, bool aligned, int max_blocks, int sm_count, int64_t smem_bytes) {
  NormPlanInput in;
  in.dims = make_dims(n, c, s, g, dtype, channels_last);
  in.tensors = tensors;
  in.aligned = in.aligned_alike = aligned;
  in.max_blocks = max_blocks;
  in.has_bulk_copy = max_blocks > 0;
  in.sm_count = sm_count;
  in.smem_bytes = smem_bytes;
  return in;
}

// The plan of the GroupNorm kernels that read contiguous tensors once, as a dict; {"refusal": why} where it takes
// another way. kPlan: of groups all over the GPU, or of groups that a block has for itself.
template <TilesPlan (*kPlan)(const NormPlanInput&)>
py::dict plan_tiles(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, int tensors,
                    bool channels_last, bool aligned, uint32_t x_line, bool has_bulk_copy, int sm_count,
                    int64_t smem_bytes) {
  NormPlanInput in = norm_input(n, c, s, g, dtype, tensors, channels_last, aligned, 0, sm_count, smem_bytes);
  in.x_offset = x_line * 16;
  in.has_bulk_copy = has_bulk_copy;
  const TilesPlan plan = kPlan(in);
  py::dict out;
  if (plan.refusal) {
    out["refusal"] = plan.refusal;
    return out;
  }
  const GroupTiles& p = plan.shares;
  out["blocks"] = plan.blocks;
  out["words"] = plan.words;
  out["tiles"] = p.tiles;
  out["tiles_per_group"] = p.tiles_per_group;
  out["run"] = p.run;
  out["parts"] = p.parts;
  out["merger_step"] = p.merger_step;
  out["collects"] = plan.collects;
  out["group_vectors"] = p.group_vectors;
  out["holders"] = plan.holders;
  out["s_magic"] = p.s_magic;
  out["s_shift"] = p.s_shift;
  out["s_magic64"] = p.s_magic64;
  return out;
}

// The plan of the kernels that keep a group on chip, likewise.
py::dict plan_cluster(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, int tensors,
                      bool channels_last, bool aligned, bool long_chain, uint32_t x_offset, int max_blocks,
                      int sm_count, int64_t smem_bytes) {
  NormPlanInput in = norm_input(n, c, s, g, dtype, tensors, channels_last, aligned, max_blocks, sm_count, smem_bytes);
  in.long_chain = long_chain;
  in.x_offset = x_offset;
  const ClusterPlan plan = plan_group_norm_cluster(in);
  py::dict out;
  if (plan.refusal) {
    out["refusal"] = plan.refusal;
    return out;
  }
  const GroupShares& p = plan.shares;
  out["threads"] = plan.threads;
  out["grid"] = plan.grid;
  out["hold"] = plan.hold;
  out["smem_bytes"] = plan.smem_bytes;
  out["blocks"] = p.blocks;
  out["lanes"] = p.lanes;
  out["passes"] = p.passes;
  out["elements"] = p.elements;
  out["share"] = p.share;
  out["x_line"] = p.x_line;
  out["rows"] = p.rows;
  out["s_magic"] = p.s_magic;
  out["s_shift"] = p.s_shift;
  return out;
}

// The plan of the kernels that keep channels_last tensors on chip, likewise.
py::dict plan_columns(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, int tensors,
                      bool channels_last, bool aligned, bool long_chain, int max_blocks, int sm_count,
                      int64_t smem_bytes) {
  NormPlanInput in = norm_input(n, c, s, g, dtype, tensors, channels_last, aligned, max_blocks, sm_count, smem_bytes);
  in.long_chain = long_chain;
  const ColumnPlan plan = plan_group_norm_columns(in);
  py::dict out;
  if (plan.refusal) {
    out["refusal"] = plan.refusal;
    return out;
  }
  const ColumnShares& p = plan.shares;
  out["cluster"] = plan.cluster;
  out["slot_bytes"] = p.slot_bytes;
  out["threads"] = plan.threads;
  out["smem_bytes"] = plan.smem_bytes;
  out["words"] = plan.words;
  out["cleared"] = plan.shares.cleared;
  out["slabs"] = p.slabs;
  out["slabs_per_sample"] = p.slabs_per_sample;
  out["teams"] = p.teams;
  out["blocks"] = p.blocks;
  out["rounds"] = p.rounds;
  out["last_round"] = p.last_round;
  out["rows"] = p.rows;
  out["share"] = p.share;
  out["turns"] = p.turns;
  out["chunks"] = p.chunks;
  out["vectors"] = p.vectors;
  out["columns"] = p.columns;
  out["positions"] = p.positions;
  out["positions_power"] = p.positions_power;
  out["warps_per_row"] = p.warps_per_row;
  out["walkers"] = p.walkers;
  out["stride"] = p.stride;
  out["data_bytes"] = p.data_bytes;
  out["channels"] = p.channels;
  out["groups"] = p.groups;
  out["run"] = 1 << p.run_log2;
  out["runs"] = p.runs;
  out["group_runs"] = p.group_runs;
  out["full_blocks"] = p.full_blocks;
  out["full_count"] = p.full_count;
  out["rest_count"] = p.rest_count;
  out["total_count"] = p.total_count;
  return out;
}

py::dict plan_channels(int64_t n, int64_t c, int64_t s, const std::string& dtype, bool backward, bool channels_last,
                       bool aligned, int sm_count, int sm_bytes) {
  ChannelNormParams p;
  p.n = n;
  p.c = c;
  p.s = s;
  p.dtype = parse_dtype(dtype);
  p.channels_last = channels_last;
  const ChannelNormPlan plan = plan_channel_norm(p, backward, aligned, sm_count, sm_bytes);
  py::dict out;
  out["vec"] = plan.vec;
  out["along"] = plan.along;
  out["threads"] = plan.threads;
  out["blocks"] = plan.blocks;
  out["tiles"] = plan.tiles;
  out["rows"] = plan.rows;
  out["held"] = plan.held;
  out["ring_bytes"] = plan.ring_bytes;
  out["smem_bytes"] = plan.smem_bytes;
  return out;
}

py::dict plan_row_shares(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, int tensors,
                         bool channels_last, bool aligned, bool long_chain, int max_blocks, int sm_count,
                         int64_t smem_bytes, bool holds) {
  NormPlanInput in = norm_input(n, c, s, g, dtype, tensors, channels_last, aligned, max_blocks, sm_count, smem_bytes);
  in.long_chain = long_chain;
  in.holds = holds;
  const RowPlan plan = plan_group_norm_rows(in);
  py::dict out;
  if (plan.refusal) {
    out["refusal"] = plan.refusal;
    return out;
  }
  const RowShares& p = plan.shares;
  out["smem_bytes"] = plan.smem_bytes;
  out["words"] = plan.words;
  out["cleared"] = plan.shares.cleared;
  out["teams"] = p.teams;
  out["blocks"] = p.blocks;
  out["rows"] = p.rows;
  out["share"] = p.share;
  out["vectors"] = p.vectors;
  out["summers"] = p.summers;
  out["held"] = p.held;
  out["walkers"] = p.walkers;
  out["chunk_rows"] = p.chunk_rows;
  out["chunks"] = p.chunks;
  out["rereads"] = p.rereads;
  out["slots"] = p.slots;
  out["tensor_bytes"] = p.tensor_bytes;
  out["turns"] = p.turns;
  out["again_slots"] = p.again_slots;
  out["distance"] = p.distance;
  out["backwards"] = p.backwards;
  out["element_lanes"] = 1 << p.element_lanes_log2;
  out["group_lanes"] = 1 << p.group_lanes_log2;
  out["team_lanes"] = 1 << p.team_lanes_log2;
  out["full_blocks"] = p.full_blocks;
  out["full_count"] = p.full_count;
  out["rest_count"] = p.rest_count;
  out["total_count"] = p.total_count;
  return out;
}

py::dict divisor_dict(const SmallDivisor& by) {
  py::dict out;
  out["d"] = by.d;
  out["magic"] = by.magic;
  return out;
}

// The plans of the kernels for small groups and for narrow ones, likewise.
py::dict plan_small(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, bool backward,
                    bool channels_last, bool aligned, int max_blocks, bool plain) {
  NormPlanInput in =
      norm_input(n, c, s, g, dtype, backward ? 2 : 1, channels_last, aligned, max_blocks, 132, 227 << 10);
  in.plain = plain;
  const SmallPlan plan = plan_group_norm_small(in);
  py::dict out;
  if (plan.refusal) {
    out["refusal"] = plan.refusal;
    return out;
  }
  const SmallShares& p = plan.shares;
  out["run"] = plan.run;
  out["runs"] = plan.runs;
  out["threads"] = plan.threads;
  out["grid"] = plan.grid;
  out["smem_bytes"] = plan.smem_bytes;
  out["teams"] = p.teams;
  out["chunk"] = p.chunk;
  out["elements"] = p.elements;
  out["blocks"] = 1 << p.blocks_log2;
  out["owner"] = p.owner;
  out["single"] = plan.single;
  out["plane"] = plan.plane;
  out["sums"] = p.sums;
  out["terms"] = p.terms;
  out["sum_teams"] = p.sum_teams;
  out["term_elements"] = 1 << p.run_log2;
  out["by_lanes"] = divisor_dict(p.by_lanes);
  out["places"] = std::vector<uint32_t>{p.middle, p.last};
  out["by_minor"] = divisor_dict(p.by_minor);
  out["by_groups"] = divisor_dict(p.by_groups);
  out["by_channels"] = divisor_dict(p.by_channels);
  out["by_row_terms"] = divisor_dict(p.by_row_terms);
  out["by_sum_lanes"] = divisor_dict(p.by_sum_lanes);
  return out;
}

py::dict plan_slabs(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, bool channels_last,
                    int sm_count) {
  const SlabPlan plan =
      plan_group_norm_slab(norm_input(n, c, s, g, dtype, 1, channels_last, true, 0, sm_count, 227 << 10));
  py::dict out;
  if (plan.refusal) {
    out["refusal"] = plan.refusal;
    return out;
  }
  const SlabShares& p = plan.shares;
  out["grid"] = plan.grid;
  out["columns"] = p.columns;
  out["groups"] = p.groups;
  out["walkers"] = p.walkers;
  out["per_sample"] = p.per_sample;
  out["by_per_sample"] = divisor_dict(p.by_per_sample);
  out["by_channels"] = divisor_dict(p.by_channels);
  return out;
}

// Which family takes a forward (one tensor that is read) or a backward (two), why not the others, and all in words.
py::dict choose_norm(int64_t n, int64_t c, int64_t s, int64_t g, const std::string& dtype, int tensors,
                     bool channels_last, bool aligned, int max_blocks, int sm_count, int64_t smem_bytes,
                     const std::string& act, const std::string& pre_act, bool residual) {
  NormPlanInput in = norm_input(n, c, s, g, dtype, tensors, channels_last, aligned, max_blocks, sm_count, smem_bytes);
  const NormExtras extras = residual ? NormExtras::kResidual : NormExtras::kNone;
  in.set_activations(parse_chain(pre_act), parse_chain(act), extras);
  const NormChoice choice = choose_group_norm(in);
  py::dict out, why_not;
  for (int i = 0; i < kNormFamilies; ++i) {
    if (choice.why_not[i]) why_not[kNormFamilyNames[i]] = choice.why_not[i];
  }
  out["family"] = kNormFamilyNames[static_cast<int>(choice.family())];
  out["why_not"] = why_not;
  out["kernels"] = norm_kernels(choice, in);
  out["explanation"] = explain_norm_choice(choice, in, true);
  if (const RowPlan* rows = std::get_if<RowPlan>(&choice.plan)) out["held"] = rows->shares.held;
  out["words"] = choice.scratch.words;
  out["sums"] = choice.scratch.sums;
  out["sum_rows"] = choice.scratch.sum_rows;
  return out;
}

// The plan of the backward of logsumexp behind a norm, likewise.
py::dict plan_lse_backward(int64_t n, int64_t c, int64_t s, const std::string& dtype, bool channels_last, bool aligned,
                           int sm_count) {
  const NormLseBackwardPlan p = plan_norm_lse_backward(make_dims(n, c, s, 1, dtype, channels_last), aligned, sm_count);
  py::dict out;
  if (p.refusal) {
    out["refusal"] = p.refusal;
    return out;
  }
  out["vector"] = p.vector;
  out["share_lanes"] = p.share_lanes;
  out["share_slices"] = p.share_slices;
  out["share_slice_length"] = p.share_slice_length;
  out["share_blocks"] = p.share_blocks;
  out["lanes"] = p.columns.lanes;
  out["walkers"] = p.columns.walkers;
  out["channel_blocks"] = p.columns.channel_blocks;
  out["slices"] = p.slices;
  out["slice_length"] = p.slice_length;
  out["blocks"] = p.blocks;
  return out;
}

// How the walks of passes over memory cut a channels_last tensor, and a reduction its rows.
py::dict plan_column_walk(int64_t n, int64_t c, int64_t s, int vector, bool aligned, int sm_count) {
  int64_t turns = 0, slices = 0, length = 0;
  plan_column_slices(n, c, s, vector, aligned, sm_count, &turns, &slices, &length);
  const int64_t channels = c * turns;
  const ColumnGeometry g = column_geometry(channels, channels % vector == 0 ? vector : 1);
  py::dict out;
  out["turns"] = turns;
  out["slices"] = slices;
  out["slice_length"] = length;
  out["rows"] = rows_of_turns(s, c, turns, vector);
  out["lanes"] = g.lanes;
  out["walkers"] = g.walkers;
  out["channel_blocks"] = g.channel_blocks;
  return out;
}

py::dict plan_reduction(int64_t outer, int64_t reduced, int64_t inner, int sm_count, int element_size) {
  ReduceParams p;
  p.outer = outer;
  p.reduced = reduced;
  p.inner = inner;
  p.vector = reduce_vector(p, element_size, {});
  plan_reduce(&p, sm_count);
  const ReduceGeometry g = reduce_geometry(p);
  py::dict out;
  out["vector"] = p.vector;
  out["slices"] = p.slices;
  out["slice_length"] = p.slice_length;
  out["threads"] = std::vector<int>{g.along_inner, g.along_reduced, g.along_outer};
  out["blocks"] = std::vector<int64_t>{g.inner_blocks, g.outer_blocks};
  return out;
}

// The blocks of a sample of the 1 x 1 convolution behind a norm; {"refusal": why} where it does not take it.
py::dict plan_norm_conv1x1(int64_t n, int c, int64_t s, int c_out, const std::string& dtype, int sm_count) {
  NormConv1x1Params p;
  p.n = n;
  p.c = c;
  p.s = s;
  p.c_out = c_out;
  p.sm_count = sm_count;
  p.dtype = parse_dtype(dtype);
  py::dict out;
  if (const char* why = norm_conv1x1_refusal(p)) {
    out["refusal"] = why;
  } else {
    out["blocks"] = norm_conv1x1_blocks(p);
  }
  return out;
}

// The bound of act's values over [low, high] by which scaled fp16 scales; why there is none.
py::dict scaled_half_bound(const std::string& act, float low, float high) {
  const ActChain chain = parse_chain(act);
  py::dict out;
  if (const char* why = scaled_half_act_refusal(chain)) {
    out["refusal"] = why;
  } else {
    out["largest"] = largest_magnitude(chain, low, high);
  }
  return out;
}

void bind_walks(py::module_& m) {
  m.attr("LSE_CHANNEL_STEPS") = kLseChannelSteps;
  m.attr("LSE_POSITION_STEPS") = kLsePositionSteps;
  m.attr("TRAVERSE_THREADS") = kTraverseThreads;
  m.def("plan_norm_lse_backward", &plan_lse_backward, py::arg("n"), py::arg("c"), py::arg("s"),
        py::arg("dtype") = "float32", py::arg("channels_last") = false, py::arg("aligned") = true,
        py::arg("sm_count") = 132);
  m.def("plan_column_walk", &plan_column_walk, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("vector"),
        py::arg("aligned") = true, py::arg("sm_count") = 132);
  m.def("plan_reduction", &plan_reduction, py::arg("outer"), py::arg("reduced"), py::arg("inner"),
        py::arg("sm_count") = 132, py::arg("element_size") = 4);
  m.def("scaled_half_bound", &scaled_half_bound, py::arg("act"), py::arg("low"), py::arg("high"));
  m.def("plan_norm_conv1x1", &plan_norm_conv1x1, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("c_out"),
        py::arg("dtype") = "float32", py::arg("sm_count") = 132);
}

void bind_norm(py::module_& m) {
  m.attr("TILES_SLOTS") = kTilesSlots;
  m.attr("TILES_HOLDERS") = kTilesHolders;
  m.attr("TILES_SLOT_BYTES") = kTilesSlotBytes;
  const auto def_tiles = [&](const char* name, auto plan) {
    m.def(name, plan, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("g"), py::arg("dtype") = "float32",
          py::arg("tensors") = 1, py::arg("channels_last") = false, py::arg("aligned") = true, py::arg("x_line") = 0,
          py::arg("has_bulk_copy") = true, py::arg("sm_count") = 132, py::arg("smem_bytes") = 227 << 10);
  };
  def_tiles("plan_group_norm_tiles", &plan_tiles<plan_group_norm_tiles>);
  def_tiles("plan_group_norm_alone", &plan_tiles<plan_group_norm_alone>);
  m.attr("CLUSTER_PASSES") = kClusterPasses;
  // Threads, and vectors of each, of blocks with their shares in registers: forward's, backward's.
  m.attr("CLUSTER_HELD") = std::vector<std::vector<std::pair<int, int>>>{{{kHeldThreads, kHeldFew},
                                                                          {kHeldThreads, kHeldMost},
                                                                          {256, kHeldFew},
                                                                          {256, kHeldWide},
                                                                          {kHeldMostThreads, kHeldWide}},
                                                                         {{kHeldThreads, kHeldBwd}}};
  m.attr("CLUSTER_MAX_PIECES") = kClusterMaxPieces;
  m.attr("TEAM_PASSES") = std::vector<int>{kTeamPasses, kTeamMostPasses};
  m.def("plan_group_norm_cluster", &plan_cluster, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("g"),
        py::arg("dtype") = "float32", py::arg("tensors") = 1, py::arg("channels_last") = false,
        py::arg("aligned") = true, py::arg("long_chain") = false, py::arg("x_offset") = 0, py::arg("max_blocks") = 16,
        py::arg("sm_count") = 132, py::arg("smem_bytes") = 227 << 10);
  m.attr("COLUMN_SLOTS") = kColumnSlots;
  m.attr("COLUMN_PASSES") = kColumnPasses;
  m.attr("ROW_PASSES") = kRowPasses;
  m.attr("ROW_SLOTS") = kRowSlots;
  m.attr("ROW_WRITERS") = kRowWriters;
  m.def("row_held", &row_held, py::arg("tensors"), py::arg("size"));
  m.def("plan_group_norm_rows", &plan_row_shares, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("g"),
        py::arg("dtype") = "float32", py::arg("tensors") = 1, py::arg("channels_last") = true,
        py::arg("aligned") = true, py::arg("long_chain") = false, py::arg("max_blocks") = 16, py::arg("sm_count") = 132,
        py::arg("smem_bytes") = 227 << 10, py::arg("holds") = true);
  m.def("plan_group_norm_columns", &plan_columns, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("g"),
        py::arg("dtype") = "float32", py::arg("tensors") = 1, py::arg("channels_last") = true,
        py::arg("aligned") = true, py::arg("long_chain") = false, py::arg("max_blocks") = 16, py::arg("sm_count") = 132,
        py::arg("smem_bytes") = 227 << 10);
  m.attr("CHANNEL_NORM_TABLE") = kChannelNormTable;
  m.def("plan_channel_norm", &plan_channels, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("dtype") = "float32",
        py::arg("backward") = false, py::arg("channels_last") = false, py::arg("aligned") = true,
        py::arg("sm_count") = 132, py::arg("sm_bytes") = 228 << 10);
  m.attr("SMALL_MAX_THREADS") = kSmallMaxThreads;
  m.attr("SMALL_MAX_BWD_THREADS") = kSmallMaxBwdThreads;
  m.attr("SMALL_MAX_ELEMENTS") = kSmallMaxElements;
  m.attr("SLAB_THREADS") = kSlabThreads;
  m.def("plan_group_norm_small", &plan_small, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("g"),
        py::arg("dtype") = "float32", py::arg("backward") = false, py::arg("channels_last") = false,
        py::arg("aligned") = true, py::arg("max_blocks") = 16, py::arg("plain") = false);
  m.def("plan_group_norm_slab", &plan_slabs, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("g"),
        py::arg("dtype") = "float32", py::arg("channels_last") = true, py::arg("sm_count") = 132);
  m.def("choose_group_norm", &choose_norm, py::arg("n"), py::arg("c"), py::arg("s"), py::arg("g"),
        py::arg("dtype") = "float32", py::arg("tensors") = 1, py::arg("channels_last") = false,
        py::arg("aligned") = true, py::arg("max_blocks") = 16, py::arg("sm_count") = 132,
        py::arg("smem_bytes") = 227 << 10, py::arg("act") = "none", py::arg("pre_act") = "none",
        py::arg("residual") = false);
}

}  // namespace
}  // namespace kgopt

PYBIND11_MODULE(kgopt_dev, m) {
  m.doc() = "Host-side planning of kgopt's kernels, for tests.";
  kgopt::bind_activation(m);
  kgopt::bind_conv(m);
  kgopt::bind_norm(m);
  kgopt::bind_walks(m);
}
