// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// From a plan's description to options: defaults, and everything that is refused.
#include "core/options.hpp"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

namespace xent {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr DLDataType kFloat64{kDLFloat, 64, 1};

using Change = std::function<void(xent_plan_desc &)>;

xent_plan_desc small() {
  xent_plan_desc desc{};
  desc.struct_size = sizeof desc;
  desc.vocab = 100;
  desc.max_rows = 7;
  return desc;
}

xent_options resolved(const Change &change) {
  xent_plan_desc desc = small();
  change(desc);
  xent_options options{};
  xent_error err{};
  err.struct_size = sizeof err;
  EXPECT_EQ(resolve_options(desc, &options, &err), XENT_OK) << err.message;
  return options;
}

void refused(const Change &change, const std::string &text) {
  xent_plan_desc desc = small();
  change(desc);
  xent_options options{};
  xent_error err{};
  err.struct_size = sizeof err;
  EXPECT_EQ(resolve_options(desc, &options, &err), XENT_INVALID_ARGUMENT) << text;
  EXPECT_EQ(std::string(err.message).find("xent_plan_create: "), 0u) << err.message;
  EXPECT_NE(std::string(err.message).find(text), std::string::npos) << err.message;
}

TEST(Options, ZeroMeansDefault) {
  const xent_options options = resolved([](xent_plan_desc &) {});
  EXPECT_EQ(options.struct_size, sizeof options);
  EXPECT_EQ(options.device.device_type, kDLCPU);
  EXPECT_EQ(options.logits_dtype.code, kDLFloat);
  EXPECT_EQ(options.logits_dtype.bits, 32);
  EXPECT_EQ(options.logits_dtype.lanes, 1);
  EXPECT_EQ(options.target_dtype.code, kDLInt);
  EXPECT_EQ(options.target_dtype.bits, 64);
  EXPECT_EQ(options.classes, 100);
  EXPECT_EQ(options.logit_scale, 1.0);
  EXPECT_EQ(options.softcap, 0.0);
  EXPECT_EQ(options.reduction, XENT_REDUCTION_NONE);
  EXPECT_EQ(options.has_ignore_index, 0);
  EXPECT_EQ(options.overwrite, 0);
  EXPECT_EQ(options.empty_mean_is_nan, 0);
  EXPECT_EQ(options.entropy, 0);
  EXPECT_EQ(options.predicted, 0);
}

TEST(Options, FlagsBecomeValues) {
  const xent_options ignore = resolved([](xent_plan_desc &d) {
    d.flags = XENT_PLAN_IGNORE_INDEX;
    d.ignore_index = INT64_MIN;
  });
  EXPECT_EQ(ignore.has_ignore_index, 1);
  EXPECT_EQ(ignore.ignore_index, INT64_MIN);
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.flags = XENT_PLAN_IGNORE_INDEX; }).has_ignore_index, 1);  // class 0
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.flags = XENT_PLAN_OVERWRITE_LOGITS; }).overwrite, 1);
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.flags = XENT_PLAN_ENTROPY; }).entropy, 1);
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.flags = XENT_PLAN_PREDICTED; }).predicted, 1);
  EXPECT_EQ(resolved([](xent_plan_desc &d) {
              d.flags = XENT_PLAN_EMPTY_MEAN_IS_NAN;
              d.reduction = XENT_REDUCTION_MEAN;
            }).empty_mean_is_nan,
            1);
}

TEST(Options, DevicesThatCompute) {
  const auto device = [](DLDevice given) { return resolved([given](xent_plan_desc &d) { d.device = given; }).device; };
  EXPECT_EQ(device({kDLCUDAHost, 2}).device_type, kDLCPU);
  EXPECT_EQ(device({kDLCPU, 3}).device_id, 0);
  EXPECT_EQ(device({kDLCUDAManaged, 1}).device_type, kDLCUDA);
  EXPECT_EQ(device({kDLCUDAManaged, 1}).device_id, 1);
  EXPECT_EQ(device({kDLROCM, 1}).device_type, kDLROCM);
  refused([](xent_plan_desc &d) { d.device.device_id = 1; }, "device: {0, 1} is not a DLPack device");
  refused([](xent_plan_desc &d) { d.device = DLDevice{static_cast<DLDeviceType>(-3), 0}; }, "device: {-3, 0}");
  refused([](xent_plan_desc &d) { d.device = DLDevice{kDLCUDA, -1}; }, "device: {2, -1}");
}

TEST(Options, Types) {
  for (const DLDataType type : {DLDataType{kDLFloat, 16, 1}, DLDataType{kDLBfloat, 16, 1}, kFloat64}) {
    EXPECT_EQ(resolved([type](xent_plan_desc &d) { d.logits_dtype = type; }).logits_dtype.bits, type.bits);
  }
  for (const DLDataType type : {DLDataType{kDLFloat, 32, 2}, DLDataType{kDLFloat, 8, 1}, DLDataType{kDLInt, 32, 1},
                                DLDataType{kDLFloat, 0, 0}}) {
    refused([type](xent_plan_desc &d) { d.logits_dtype = type; }, "logits_dtype: is ");
  }
  for (const DLDataType type : {DLDataType{kDLUInt, 64, 1}, DLDataType{kDLInt, 16, 1}, DLDataType{kDLFloat, 32, 1}}) {
    refused([type](xent_plan_desc &d) { d.target_dtype = type; }, "target_dtype: is ");
  }
  EXPECT_EQ(accumulator_dtype(resolved([](xent_plan_desc &) {})).bits, 32);
  EXPECT_EQ(accumulator_dtype(resolved([](xent_plan_desc &d) { d.logits_dtype = kFloat64; })).bits, 64);
  EXPECT_EQ(accumulator_dtype(resolved([](xent_plan_desc &d) { d.logits_dtype = DLDataType{kDLBfloat, 16, 1}; })).bits,
            32);
}

TEST(Options, Sizes) {
  refused([](xent_plan_desc &d) { d.vocab = 0; }, "vocab: is 0; it must be at least 1");
  refused([](xent_plan_desc &d) { d.vocab = -5; }, "vocab: is -5");
  refused([](xent_plan_desc &d) { d.classes = 101; }, "classes: is 101; it must be in [0, vocab = 100]");
  refused([](xent_plan_desc &d) { d.classes = -1; }, "classes: is -1");
  refused([](xent_plan_desc &d) { d.max_rows = -1; }, "max_rows: is -1");
  refused([](xent_plan_desc &d) { d.max_rows = INT64_MAX; }, "have no size in 63 bits");
  refused([](xent_plan_desc &d) { d.vocab = INT64_MAX; }, "have no size in 63 bits");
  refused([](xent_plan_desc &d) { d.max_rows = d.vocab = int64_t{1} << 31; }, "have no size in 63 bits");
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.classes = 1; }).classes, 1);
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.max_rows = 0; }).max_rows, 0);
  EXPECT_EQ(resolved([](xent_plan_desc &d) {
              d.max_rows = int64_t{1} << 32;
              d.vocab = 1 << 20;
            }).max_rows,
            int64_t{1} << 32);
}

TEST(Options, FlagsAndReduction) {
  refused([](xent_plan_desc &d) { d.flags = 1u << 5; }, "flags: bits 0x20 are unknown");
  refused([](xent_plan_desc &d) { d.flags = 0x80000001u; }, "flags: bits 0x80000000 are unknown");
  refused([](xent_plan_desc &d) { d.reduction = 3; }, "reduction: is 3");
  refused([](xent_plan_desc &d) { d.reduction = -1; }, "reduction: is -1");
  refused([](xent_plan_desc &d) { d.ignore_index = -100; }, "ignore_index: is -100 without XENT_PLAN_IGNORE_INDEX");
  refused(
      [](xent_plan_desc &d) {
        d.flags = XENT_PLAN_EMPTY_MEAN_IS_NAN;
        d.reduction = XENT_REDUCTION_SUM;
      },
      "needs XENT_REDUCTION_MEAN");
}

TEST(Options, Numbers) {
  for (const double bad : {-0.1, 1.0001, kNaN, kInf, -kInf})
    refused([bad](xent_plan_desc &d) { d.label_smoothing = bad; }, "label_smoothing: is ");
  for (const double bad : {-1e-9, kNaN, kInf, -kInf, 1e39})
    refused([bad](xent_plan_desc &d) { d.z_loss = bad; }, "z_loss: is ");
  for (const double bad : {-1.0, kNaN, kInf, -kInf, 1e39, 1e-46}) {
    refused([bad](xent_plan_desc &d) { d.softcap = bad; }, "softcap: is ");
    refused([bad](xent_plan_desc &d) { d.logit_scale = bad; }, "logit_scale: is ");
  }
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.label_smoothing = 1.0; }).label_smoothing, 1.0);
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.softcap = 30.0; }).softcap, 30.0);
  EXPECT_EQ(resolved([](xent_plan_desc &d) { d.logit_scale = double{FLT_MAX}; }).logit_scale, double{FLT_MAX});
  // In float64 arithmetic more is a number.
  EXPECT_EQ(resolved([](xent_plan_desc &d) {
              d.logits_dtype = kFloat64;
              d.z_loss = 1e39;
              d.softcap = 1e-46;
            }).softcap,
            1e-46);
  const xent_options zeros =
      resolved([](xent_plan_desc &d) { d.label_smoothing = d.z_loss = d.softcap = d.logit_scale = -0.0; });
  EXPECT_FALSE(std::signbit(zeros.label_smoothing) || std::signbit(zeros.z_loss) || std::signbit(zeros.softcap));
  EXPECT_EQ(zeros.logit_scale, 1.0);
}

}  // namespace
}  // namespace xent
