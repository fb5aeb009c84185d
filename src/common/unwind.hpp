// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A callback may end its thread: pthread_exit and pthread_cancel unwind it through us, and Python does so to threads
// that still run as its interpreter ends. `catch (...)` gets that too; where it is not thrown on, libstdc++ aborts.
#pragma once

#include <exception>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace xent {

#if defined(__GLIBCXX__)
using ThreadEnds = abi::__forced_unwind;
#else
class ThreadEnds {};  // other libraries unwind past handlers
#endif

// Of a function with such a handler: what libstdc++ gives it is at no address, which UBSan takes for a null
// reference, wherever such a function is inlined too.
#if defined(__GNUC__)
#define XENT_CATCHES_THREAD_ENDS __attribute__((no_sanitize("null"), noinline))
#else
#define XENT_CATCHES_THREAD_ENDS
#endif

}  // namespace xent
