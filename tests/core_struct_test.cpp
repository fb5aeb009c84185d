// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// The rule by which every sized struct is read and filled.
#include "core/structs.hpp"

#include <gtest/gtest.h>
#include <xent/xent_plugin.h>

#include <cstring>
#include <string>

namespace xent {
namespace {

template <class T>
class StructTest : public testing::Test {
 protected:
  // Longer than the library's, as a newer caller's would be.
  struct Newer {
    T known;
    unsigned char beyond[24];
  };
  StructTest() {
    std::memset(static_cast<void *>(&newer), 0, sizeof newer);
    newer.known.struct_size = sizeof(T);
    err.struct_size = sizeof err;
  }
  xent_status read() { return read_struct("function", "args", &newer.known, &out, &err); }
  void says(const std::string &text) {
    EXPECT_NE(std::string(err.message).find("function: args: "), std::string::npos) << err.message;
    EXPECT_NE(std::string(err.message).find(text), std::string::npos) << err.message;
  }

  Newer newer;
  T out;
  xent_error err{};
};

using InputStructs =
    testing::Types<xent_context_desc, xent_comm_desc, xent_plan_desc, xent_forward_args, xent_backward_args,
                   xent_loss_and_grad_args, xent_scale_grad_args, xent_partial_args, xent_combine_args>;
TYPED_TEST_SUITE(StructTest, InputStructs);

TYPED_TEST(StructTest, ExactSize) {
  std::memset(static_cast<void *>(&this->out), 0xab, sizeof this->out);
  ASSERT_EQ(this->read(), XENT_OK) << this->err.message;
  EXPECT_EQ(std::memcmp(&this->out, &this->newer.known, sizeof this->out), 0);
}

TYPED_TEST(StructTest, TooShort) {
  for (size_t size : {size_t{0}, size_t{1}, sizeof(size_t), kMinimumSize<TypeParam> - 1}) {
    this->newer.known.struct_size = size;
    EXPECT_EQ(this->read(), XENT_INVALID_STRUCT) << size;
    this->says("struct_size is " + std::to_string(size));
  }
}

TYPED_TEST(StructTest, LongerAndZeroIsAccepted) {
  this->newer.known.struct_size = sizeof this->newer;
  ASSERT_EQ(this->read(), XENT_OK) << this->err.message;
  EXPECT_EQ(this->out.struct_size, sizeof(TypeParam));
}

TYPED_TEST(StructTest, LongerAndSetIsRefused) {
  for (size_t byte = 0; byte < sizeof this->newer.beyond; ++byte) {
    this->newer.known.struct_size = sizeof this->newer;
    this->newer.beyond[byte] = 1;
    EXPECT_EQ(this->read(), XENT_INVALID_STRUCT) << byte;
    this->says("byte " + std::to_string(sizeof(TypeParam) + byte));
    this->newer.beyond[byte] = 0;
  }
  // What lies beyond the caller's own size is not looked at.
  this->newer.known.struct_size = sizeof(TypeParam) + 8;
  this->newer.beyond[8] = 1;
  EXPECT_EQ(this->read(), XENT_OK) << this->err.message;
}

TYPED_TEST(StructTest, GarbageSizeIsNotFollowed) {
  for (size_t size : {kMaximumSize + 1, SIZE_MAX, SIZE_MAX / 2}) {
    this->newer.known.struct_size = size;
    EXPECT_EQ(this->read(), XENT_INVALID_STRUCT) << size;
  }
}

TYPED_TEST(StructTest, NextMustBeNull) {
  this->newer.known.next = &this->newer;
  EXPECT_EQ(this->read(), XENT_INVALID_STRUCT);
  this->says("next");
}

TYPED_TEST(StructTest, NullIsRefused) {
  EXPECT_EQ(read_struct("function", "args", static_cast<const TypeParam *>(nullptr), &this->out, &this->err),
            XENT_INVALID_ARGUMENT);
  this->says("is NULL");
}

TEST(OutputStruct, FilledUpToTheCallersSize) {
  struct {
    xent_plan_info known;
    unsigned char beyond[16];
  } caller;
  std::memset(static_cast<void *>(&caller), 0xcd, sizeof caller);
  xent_plan_info info{};
  info.struct_size = sizeof info;
  info.saved_bytes = 77;
  xent_error err{};
  err.struct_size = sizeof err;

  caller.known.struct_size = sizeof caller.known;
  ASSERT_EQ(write_struct("function", "info", info, &caller.known, &err), XENT_OK);
  EXPECT_EQ(caller.known.saved_bytes, 77u);
  EXPECT_EQ(caller.known.struct_size, sizeof caller.known);
  EXPECT_EQ(caller.beyond[0], 0xcd);

  caller.known.struct_size = sizeof caller;
  ASSERT_EQ(write_struct("function", "info", info, &caller.known, &err), XENT_OK);
  EXPECT_EQ(caller.known.struct_size, sizeof caller);
  for (unsigned char byte : caller.beyond) EXPECT_EQ(byte, 0);

  caller.known.struct_size = 8;
  EXPECT_EQ(write_struct("function", "info", info, &caller.known, &err), XENT_INVALID_STRUCT);
  EXPECT_EQ(write_struct("function", "info", info, static_cast<xent_plan_info *>(nullptr), &err),
            XENT_INVALID_ARGUMENT);
}

TEST(ErrorStruct, WrittenAsFarAsItReaches) {
  xent_error err;
  std::memset(static_cast<void *>(&err), 0x5a, sizeof err);
  err.struct_size = sizeof err;
  const std::string long_text(2000, 'x');
  EXPECT_EQ(fail_native(&err, XENT_DEVICE_ERROR, 42, "%s", long_text.c_str()), XENT_DEVICE_ERROR);
  EXPECT_EQ(err.status, XENT_DEVICE_ERROR);
  EXPECT_EQ(err.native_code, 42);
  EXPECT_EQ(std::strlen(err.message), sizeof err.message - 1);

  // A shorter struct of an older caller.
  std::memset(static_cast<void *>(&err), 0x5a, sizeof err);
  err.struct_size = offsetof(xent_error, message) + 8;
  fail(&err, XENT_INTERNAL, "%s", long_text.c_str());
  EXPECT_STREQ(err.message, "xxxxxxx");
  EXPECT_EQ(err.message[8], 0x5a);

  // One that was never set up is left alone, and none at all is fine.
  std::memset(static_cast<void *>(&err), 0, sizeof err);
  EXPECT_EQ(fail(&err, XENT_INTERNAL, "text"), XENT_INTERNAL);
  EXPECT_EQ(err.status, 0);
  EXPECT_EQ(fail(nullptr, XENT_INTERNAL, "text"), XENT_INTERNAL);
}

}  // namespace
}  // namespace xent
